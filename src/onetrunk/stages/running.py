"""What every stage does around its work: a user's mistake becomes a sentence and an exit code, not a stack trace.

Exit codes: 0 done; 2 the command line or the YAML file is wrong, and nothing was started; 1 anything that is found
later, in settings that contradict the data or the model, in the machine, or in a run that failed. A training that a
signal stops writes a checkpoint and ends with 0; what keeps none ends with 130 (interrupted), 143 (terminated), 138
(SIGUSR1) or 129 (SIGHUP: the terminal, or the reader of the output, is gone). ONETRUNK_TRACEBACK=1 shows where a
sentence came from.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onetrunk.stages.parsing import UsageError
from onetrunk.stages.resuming import folder_of, last_finished_checkpoint
from onetrunk.stages.secrets import print_redacted, secrets_kept
from onetrunk.utils.output import lasting_output
from onetrunk.utils.redaction import redact

PACKAGE = Path(__file__).resolve().parents[1]
OUR_ERRORS = (ValueError, TypeError, RuntimeError, OSError, ImportError)
# Raised with a sentence by the libraries below us too: a file, a setting, or a package that is missing.
SENTENCES = (ValueError, OSError, ImportError)
# The disk, the user's share of it, or the size that a file may have.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How long after a lost signal it is sent again.
RETRY_SIGNAL_S = 0.02
EXIT_INTERRUPTED, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM, SIGUSR1 or SIGHUP arrived. No Exception, for nothing on the way up may take it for an error of its own.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int = signal.SIGTERM):
        super().__init__(number)
        self.number = number


def run_stage(
    verb: str,
    parse: Callable[[list[str]], tuple[Any, ...]],
    work: Callable[..., None],
    argv: Sequence[str] | None,
) -> int:
    """Run a stage and return its exit code; only an error that nobody foresaw leaves as an exception.

    Args:
        verb: its name on the command line.
        parse: makes the stage's arguments of its words.
        work: does the work, given those arguments.
        argv: the words after the verb; None: those of this process.
    """
    with lasting_output():
        return _run_stage(verb, parse, work, argv)


def _run_stage(
    verb: str,
    parse: Callable[[list[str]], tuple[Any, ...]],
    work: Callable[..., None],
    argv: Sequence[str] | None,
) -> int:
    # No user of a stage could act on either: old names that PEFT and transformers still use of each other, and kernels
    # that only matter for 4-bit models on a CPU.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    parsed: tuple[Any, ...] = ()
    try:
        with secrets_kept(), signals_as_exception():
            parsed = parse(list(sys.argv[1:] if argv is None else argv))
            with folder_of(parsed):
                work(*parsed)
    except SystemExit as stop:
        if hasattr(stop, "checkpoint"):  # checkpoints.stopping.Stopped, which needs torch
            say(str(stop), after_bar=True)
            end_process_group()
        elif isinstance(stop.code, str):
            say(f"error: {stop.code}", after_bar=True)  # A user's sys.exit("why"), which Python would print.
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        say(f"interrupted{way_on(parsed)}", after_bar=True)
        return EXIT_INTERRUPTED
    except Terminated as stop:
        say(f"terminated ({signal.Signals(stop.number).name}){way_on(parsed)}", after_bar=True)
        return 128 + stop.number
    except BaseException as error:
        # A user's class may stand directly on BaseException, and its message leaves by the same way.
        sentence = explain(error)
        if sentence is None:
            sys.excepthook = print_redacted  # Python prints the stack trace when the process ends.
            raise
        if os.environ.get("ONETRUNK_TRACEBACK") == "1":
            print_redacted(*sys.exc_info())
        say(f"error: {sentence}", after_bar=bool(parsed))
        if isinstance(error, UsageError):
            say(f"all options: onetrunk {verb} --help")
            return 2
        return 1
    return 0


def end_process_group() -> None:
    """End torch.distributed: its threads can abort a process that exits while they run (exit code 134)."""
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


def say(sentence: str, after_bar: bool = False) -> None:
    """Print to stderr, secrets taken out; `after_bar` ends a line first on which a progress bar may stand."""
    sentence = redact(sentence)
    print(f"\n{sentence}" if after_bar else sentence, file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_as_exception() -> Iterator[None]:
    """Raise Terminated where SIGTERM, SIGUSR1 or SIGHUP arrives, so that files are closed and a sentence is said, as
    after Ctrl-C; a training takes them over while it lasts. Under nohup SIGHUP stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Signals are the main thread's alone.
        return

    def terminate(number: int, frame: Any) -> None:
        raise Terminated(number)

    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, terminate) for number in numbers}
    try:
        with lost_signals_sent_again():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def lost_signals_sent_again() -> Iterator[None]:
    """Send a signal again if Python dropped the exception that it raised.

    A signal can arrive while a destructor or a weakref callback runs. Python prints an exception that is raised there
    and continues, so without this the signal would be lost.
    """
    hook = sys.unraisablehook
    retries: list[threading.Timer] = []

    def unraisable(args: Any) -> None:
        if not isinstance(args.exc_value, Terminated | KeyboardInterrupt):
            hook(args)
            return
        number = getattr(args.exc_value, "number", signal.SIGINT)
        # Later and from another thread: sent from here, its exception would be dropped as well. It goes to the main
        # thread by name, so that it wakes whatever that thread waits for.
        retry = threading.Timer(RETRY_SIGNAL_S, signal.pthread_kill, (threading.main_thread().ident, number))
        retry.daemon = True
        retries.append(retry)
        retry.start()

    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for retry in retries:
            retry.cancel()


def way_on(parsed: Sequence[Any]) -> str:
    """Say how a training that was stopped goes on, as the end of a sentence; nothing for a stage that can't."""
    args = next((part for part in parsed if hasattr(part, "resume_from_checkpoint")), None)
    if args is None:
        return ""
    checkpoint = last_finished_checkpoint(args.output_dir)
    if checkpoint is None:
        return f"; no checkpoint is in {args.output_dir} yet, so the next run starts anew"
    return f"; the same command with --resume auto goes on from {checkpoint}"


def explain(error: BaseException) -> str | None:
    """Return the sentence to print for an error, secrets taken out; None if it was not foreseen."""
    sentence = _sentence(error)
    return None if sentence is None else redact(sentence)


def _sentence(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in FULL:
        where = f"{error.filename} cannot be written" if error.filename else "a file cannot be written"
        return (
            f"{where} ({error.strerror}); make room there, or choose another output_dir, another folder for caches"
            " (HF_HOME) or for temporary files (TMPDIR)"
        )
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


def _raised_by_us(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)
