"""Drops single messages of other libraries that a user cannot act on. Imports none of those libraries."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

# Concerns only 4-bit models on a CPU, but appears whenever PEFT is imported and bitsandbytes is installed.
_CPU_KERNEL = "Failed to load CPU gemm_4bit_forward"


def silence_imports() -> None:
    """Drop the message of bitsandbytes about a missing CPU kernel. Call it before PEFT is imported."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_wanted)


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_CPU_KERNEL)


@contextlib.contextmanager
def peft_calls() -> Iterator[None]:
    """Drop the warning about a deprecated attribute of transformers that PEFT still reads, inside the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
