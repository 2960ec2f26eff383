"""Imports that wait for no garbage collection.

A collection visits every object there is: a million of torch and transformers, for half a second, and none of them is
ever garbage. Their import would set off several; later, so does every training that begins or ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_loaded_uncollected() -> None:
    """Keep what exists now out of every later collection, until the process exits."""
    gc.freeze()
    # Triton reports what is frozen at exit as leaked. Only one call is registered, however often this is called.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
