"""Messages of the libraries below that no user could act on, each told by its own words; all others pass.

Knows words alone, and imports none of those libraries.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

# A kernel for 4-bit bases on a CPU alone, asked for by every import of PEFT where bitsandbytes is installed.
_CPU_KERNEL = "Failed to load CPU gemm_4bit_forward"


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_CPU_KERNEL)


def silence_imports() -> None:
    """Drop what bitsandbytes logs of a missing CPU kernel; call it before PEFT is imported. Twice is as once."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_wanted)


@contextlib.contextmanager
def peft_calls() -> Iterator[None]:
    """Drop, inside the block, the warning for an old name that PEFT still reads of transformers' models."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
