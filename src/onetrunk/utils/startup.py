"""What makes startup quick and quiet: no garbage collection during imports, and no messages nobody can act on.

A collection visits every object. Those of torch and transformers take it about 0.4 s, and none of them is ever
garbage; importing them sets off several collections, and every training begins with one.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import warnings
from collections.abc import Iterator

# Concerns only 4-bit models on a CPU, but appears whenever PEFT is imported and bitsandbytes is installed.
_CPU_KERNEL = "Failed to load CPU gemm_4bit_forward"


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


def silence_imports() -> None:
    """Drop the message of bitsandbytes about a missing CPU kernel. Call it before PEFT is imported."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.addFilter(lambda record: not record.getMessage().startswith(_CPU_KERNEL))


@contextlib.contextmanager
def peft_calls() -> Iterator[None]:
    """Drop the warning about a deprecated attribute of transformers that PEFT still reads, inside the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
