"""Keeps the garbage collector away from what is imported.

A collection visits every object. Those of torch and transformers take it about 0.4 s, and none of them is ever
garbage; importing them sets off several collections, and every training begins with one.
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


def freeze_loaded() -> None:
    """Let later collections skip every object that exists now, until the process exits."""
    gc.freeze()
    # Triton reports what is frozen at exit as leaked. Only one call is registered, however often this is called.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
