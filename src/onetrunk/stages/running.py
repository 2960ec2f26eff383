"""What every stage does around its work: a user's mistake becomes a sentence and an exit code, not a stack trace.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. ONETRUNK_TRACEBACK=1 shows where a sentence came from.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from onetrunk.stages.parsing import UsageError

PACKAGE = Path(__file__).resolve().parents[1]
OUR_ERRORS = (ValueError, TypeError, RuntimeError, OSError, ImportError)
# Raised with a sentence by the libraries below us too: a file, a setting, or a package that is missing.
SENTENCES = (ValueError, OSError, ImportError)


def run_stage(verb: str, stage: Callable[[list[str]], None], argv: Sequence[str] | None) -> int:
    """Run a stage and return its exit code; only an error that nobody foresaw leaves as an exception.

    Args:
        verb: its name on the command line.
        stage: parses its words and does the work.
        argv: the words after the verb; None: those of this process.
    """
    # No user of a stage could act on either: old names that PEFT and transformers still use of each other, and kernels
    # that only matter for 4-bit models on a CPU.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        stage(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print("interrupted; go on from the last checkpoint with --resume_from_checkpoint true", file=sys.stderr)
        return 130
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            raise
        if os.environ.get("ONETRUNK_TRACEBACK") == "1":
            traceback.print_exc()
        print(f"error: {sentence}", file=sys.stderr)
        if isinstance(error, UsageError):
            print(f"all options: onetrunk {verb} --help", file=sys.stderr)
            return 2
        return 1
    return 0


def explain(error: Exception) -> str | None:
    """Return the sentence to print for an error, None if it was not foreseen."""
    if type(error).__name__ == "OutOfMemoryError":
        return (
            "out of memory; lower per_device_train_batch_size (or set microbatch_tokens), max_rollout_rows, or"
            f" max_completion_length ({str(error).splitlines()[0]})"
        )
    if isinstance(error, OUR_ERRORS) and _raised_by_us(error):
        return str(error)
    if isinstance(error, SENTENCES):
        return f"{error} ({type(error).__name__}; ONETRUNK_TRACEBACK=1 shows where)"
    return None


def _raised_by_us(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)
