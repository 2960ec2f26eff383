"""What makes startup quick, quiet and bounded: late imports, no garbage collection, no useless messages, a time limit.

A collection visits every object. Those of torch and transformers take it about 0.4 s, and none of them is ever
garbage; importing them sets off several collections, and every training begins with one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

# Most seconds for an expression or a template that others wrote, which may have no end.
LONGEST_S = 60.0


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


@contextlib.contextmanager
def time_limit(subject: str) -> Iterator[None]:
    """Raise a ValueError that names `subject` if the block takes longer than `LONGEST_S`.

    Regular expressions and templates check for signals while they run. There is no limit outside the main thread,
    which alone gets signals, and none while a timer runs that ends sooner.
    """
    begin, (remaining, interval) = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)
    if threading.current_thread() is not threading.main_thread() or 0 < remaining < LONGEST_S:
        yield
        return

    raised: list[ValueError] = []

    def stop(*_: object) -> None:
        raised.append(ValueError(f"{subject} takes more than {LONGEST_S:g} seconds; look for a loop without an end"))
        raise raised[0]

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - begin), 1e-6), interval)
    if raised:  # The block has caught it.
        raise raised[0]
