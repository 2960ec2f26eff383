"""What makes startup quick and quiet: imports when a name is used, no garbage collection, no useless messages.

A collection visits every object. Those of torch and transformers take it about 0.4 s, and none of them is ever
garbage; importing them sets off several collections, and every training begins with one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any


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


def imported_when_used(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are imported when they are first used."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(homes)}")
        with without_collection():
            return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get


@contextlib.contextmanager
def peft_calls() -> Iterator[None]:
    """Drop the warning about a deprecated attribute of transformers that PEFT still reads, inside the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
