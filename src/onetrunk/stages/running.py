"""What surrounds the work of every stage: a user's mistake becomes a message and an exit code, not a stack trace.

CONTRIBUTING.md lists the exit codes. ONETRUNK_TRACEBACK=1 shows where an error came from.
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
from types import FrameType
from typing import Any

from onetrunk.models.speedups.memory_use import is_out_of_memory
from onetrunk.parallel.heartbeat import Heartbeat
from onetrunk.parallel.sharding import launch_layout
from onetrunk.stages.options.parser import UsageError
from onetrunk.stages.resuming import last_finished_checkpoint, locked_output_dir
from onetrunk.stages.secrets import print_redacted, secrets_redacted
from onetrunk.utils.escaping import printable
from onetrunk.utils.output import lasting_output
from onetrunk.utils.redaction import redact

PACKAGE = Path(__file__).resolve().parents[1]
# Errors whose message is enough for the user: these where our own code raises them, and the second group from the
# libraries below us too (a file, a setting, or a package that is missing).
OUR_ERRORS = (ValueError, TypeError, RuntimeError, OSError, ImportError)
LIBRARY_ERRORS = (ValueError, OSError, ImportError)
# The disk is full, or the user's quota or the limit on the size of a file is reached.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A lost signal is sent again after this time.
RETRY_SIGNAL_S = 0.02
TRAININGS = ("sft", "reward", "distill", "ppo")
EXIT_INTERRUPTED, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM, SIGUSR1 or SIGHUP arrived. Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, number: int = signal.SIGTERM):
        super().__init__(number)
        self.number = number


def check_launch_of(verb: str) -> None:
    """Raise ValueError if the accelerate config of the launch asks for what the stage does not support."""
    if verb == "report":  # It only reads files, also for a training that was launched so.
        return
    layout = launch_layout()
    if layout is not None and layout.tensor > 1 and verb not in TRAININGS:
        raise ValueError(
            f"tensor parallelism is supported by onetrunk {', '.join(TRAININGS)}, not by onetrunk {verb}; launch it"
            " with accelerate_configs/fsdp2.yaml, which shards the frozen base"
        )


def run_stage(
    verb: str,
    parse: Callable[[list[str]], tuple[Any, ...]],
    work: Callable[..., None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a stage and return its exit code. Raises only errors that are bugs.

    `parse` turns the words after the verb (None: those of this process) into the arguments of `work`.
    """
    # No user of a stage can act on either: deprecated names that PEFT and transformers use of each other, and kernels
    # that only matter for 4-bit models on a CPU.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    parsed: tuple[Any, ...] = ()
    with lasting_output():
        try:
            with secrets_redacted(), signals_as_exception():
                parsed = parse(list(sys.argv[1:] if argv is None else argv))
                check_launch_of(verb)  # Before any model loads.
                with locked_output_dir(parsed), _heartbeat(parsed):
                    work(*parsed)
            return 0
        except BaseException as error:
            # BaseException: a user's class may inherit from it directly, and its message must be redacted too.
            code = _exit_code(verb, parsed, error)
            if code is None:
                sys.excepthook = print_redacted  # Python prints the stack trace when the process ends.
                raise
            return code


def _exit_code(verb: str, parsed: tuple[Any, ...], error: BaseException) -> int | None:
    """Print what ended a stage and return its exit code; print nothing and return None for a bug."""
    if isinstance(error, SystemExit):
        if hasattr(error, "checkpoint"):  # checkpoints.stopping.Stopped
            say(str(error), after_bar=True)
            end_process_group()
        elif isinstance(error.code, str):
            say(f"error: {error.code}", after_bar=True)  # A user's sys.exit("why"), which Python would print.
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        say(f"interrupted{_how_to_resume(parsed)}", after_bar=True)
        return EXIT_INTERRUPTED
    if isinstance(error, Terminated):
        say(f"terminated ({signal.Signals(error.number).name}){_how_to_resume(parsed)}", after_bar=True)
        return 128 + error.number
    message = explain(error)
    if message is None:
        return None
    if os.environ.get("ONETRUNK_TRACEBACK") == "1":
        print_redacted(type(error), error, error.__traceback__)
    way = _how_to_resume(parsed) if is_out_of_memory(error) else ""
    say(f"error: {message}{way}", after_bar=bool(parsed))
    if isinstance(error, UsageError):
        say(f"all options: onetrunk {verb} --help")
        return 2
    return 1


@contextlib.contextmanager
def _heartbeat(parsed: Sequence[Any]) -> Iterator[None]:
    """Write the heartbeat of a training, from here to its end. Does nothing for a command that does not train."""
    args = next((part for part in parsed if hasattr(part, "resume_from_checkpoint")), None)
    if args is None:
        yield
        return
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    with Heartbeat.of(args.output_dir, rank).running(world_size):
        yield


def end_process_group() -> None:
    """End torch.distributed: its threads can abort a process that exits while they run (exit code 134)."""
    if "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


def say(message: str, after_bar: bool = False) -> None:
    """Print to stderr, without secrets; `after_bar` first ends a line that may hold a progress bar."""
    message = printable(redact(message))
    print(f"\n{message}" if after_bar else message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def signals_as_exception() -> Iterator[None]:
    """Raise Terminated when SIGTERM, SIGUSR1 or SIGHUP arrives, so that files are closed and a message is printed.

    A training replaces these handlers while it runs. Under nohup SIGHUP stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread can handle signals.
        return

    def terminate(number: int, frame: FrameType | None) -> None:
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

    def unraisable(args: sys.UnraisableHookArgs) -> None:
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


def _how_to_resume(parsed: Sequence[Any]) -> str:
    """Return how to resume a training that was stopped, to end a message; "" for a stage without checkpoints."""
    args = next((part for part in parsed if hasattr(part, "resume_from_checkpoint")), None)
    if args is None:
        return ""
    checkpoint = last_finished_checkpoint(args.output_dir)
    if checkpoint is None:
        return f"; {args.output_dir} holds no checkpoint yet, so the next run starts from the beginning"
    return f"; the same command with --resume auto resumes from {checkpoint}"


def explain(error: BaseException) -> str | None:
    """Return the message to print for an error, without secrets; None for an error that is a bug."""
    message = _message(error)
    return None if message is None else redact(message)


def _message(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in FULL:
        where = f"{error.filename} cannot be written" if error.filename else "a file cannot be written"
        return (
            f"{where} ({error.strerror}); make room there, or choose another output_dir, another folder for caches"
            " (HF_HOME) or for temporary files (TMPDIR)"
        )
    if is_out_of_memory(error):
        return (
            "out of memory; lower per_device_train_batch_size (or set microbatch_tokens), max_rollout_rows, or"
            f" max_completion_length, or set activation_checkpointing ({str(error).splitlines()[0]})"
        )
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)
    if isinstance(error, OUR_ERRORS) and is_ours:
        return str(error)
    if isinstance(error, LIBRARY_ERRORS):
        return f"{error} ({type(error).__name__}; ONETRUNK_TRACEBACK=1 shows where)"
    return None
