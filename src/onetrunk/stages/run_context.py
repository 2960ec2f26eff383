"""What surrounds the work of every stage: secrets, signals, the lock of the output folder, exit codes, resuming.

A user's mistake becomes a message and an exit code (CONTRIBUTING.md lists them), not a stack trace.
ONETRUNK_TRACEBACK=1 shows where an error came from.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from torch import distributed

from onetrunk.checkpoints.folders import (
    FINISHED,
    MANIFEST,
    PREFIX,
    checkpoint_folders,
    checkpoint_problems,
    delete_old_run,
    require_free,
)
from onetrunk.checkpoints.resume_point import AUTO, LOOP_FILES, locate, open_mirror
from onetrunk.checkpoints.signals import Stopped
from onetrunk.models.speedups.memory_use import is_out_of_memory
from onetrunk.parallel.heartbeat import Heartbeat
from onetrunk.parallel.layout import launch_layout
from onetrunk.report.report import write_report_of
from onetrunk.report.runs import read_run
from onetrunk.report.verdict import verdict_of
from onetrunk.stages.options.reading import UsageError, say
from onetrunk.utils.files import (
    atomic_write_json,
    delete_temporaries,
    held_folder,
    read_json,
    read_number,
    reading_content,
    require_output_dir,
)
from onetrunk.utils.redaction import add_stored_token, print_any_text, printable, shown
from onetrunk.verbs import VERBS

if TYPE_CHECKING:
    from transformers import Trainer

    from onetrunk.ppo.config import PPOConfig
    from onetrunk.reward_models.training import RewardModelConfig
    from onetrunk.stages.arguments import SFTArguments

    TrainingSettings = SFTArguments | RewardModelConfig | PPOConfig

PACKAGE = Path(__file__).resolve().parents[1]
# Errors whose message is enough for the user: the first group where our own code raises them, and the second also
# from libraries (a file, a setting, or a package that is missing).
OUR_ERRORS = (ValueError, TypeError, RuntimeError, OSError, ImportError)
LIBRARY_ERRORS = (ValueError, OSError, ImportError)
# The disk is full, or the user's quota or the limit on the size of a file is reached.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
EXIT_INTERRUPTED, EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
# Trainings and evaluations have one of these fields. Shards of preferences share a folder, so `prefs` locks its own.
LOCKING_FIELDS = ("resume_from_checkpoint", "opponent")
CARD = "README.md"  # Pushing a result rewrites it.


class Terminated(BaseException):
    """SIGTERM, SIGUSR1 or SIGHUP arrived. Not an Exception, so that no `except Exception` catches it."""

    def __init__(self, number: int = signal.SIGTERM):
        super().__init__(number)
        self.number = number


def run_stage(
    verb: str,
    parse: Callable[[list[str]], tuple[Any, ...]],
    work: Callable[..., None],
    argv: Sequence[str] | None = None,
    is_dry: bool = False,
) -> int:
    """Run a stage and return its exit code. Raises only errors that are bugs.

    Args:
        parse: turns the words after the verb into the arguments of `work`.
        is_dry: the work writes nothing, so the output folder is not locked.
    """
    # Deprecated names that PEFT and transformers use of each other: no user of a stage can act on them.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|accelerate")
    parsed: tuple[Any, ...] = ()
    print_any_text()
    try:
        with secrets_redacted(), signals_as_exception():
            parsed = parse(list(sys.argv[1:] if argv is None else argv))
            check_launch_of(verb)  # Before any model loads.
            with _output_folder(() if is_dry else parsed):
                work(*parsed)
        return 0
    except BaseException as error:
        # BaseException: a user's class may inherit from it directly, and its message must be redacted too.
        code = _exit_code(verb, parsed, error)
        if code is None:
            sys.excepthook = print_redacted  # Python prints the stack trace when the process ends.
            raise
        return code


def check_launch_of(verb: str) -> None:
    """Raise ValueError if the accelerate config of the launch asks for what the stage does not support."""
    layout = launch_layout()
    trainings = [name for name, verb in VERBS.items() if verb.trains]
    if layout is not None and layout.tensor > 1 and verb not in trainings:
        raise ValueError(
            f"tensor parallelism is supported by onetrunk {', '.join(trainings)}, not by onetrunk {verb}; launch it"
            " with accelerate_configs/fsdp2.yaml, which shards the frozen base"
        )


@contextlib.contextmanager
def signals_as_exception() -> Iterator[None]:
    """Raise Terminated when SIGTERM, SIGUSR1 or SIGHUP arrives, so that files are closed and a message is printed.

    Only the first is raised: another one would end the cleaning up that the first has started. A training replaces
    these handlers while it runs. Under nohup SIGHUP stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread can handle signals.
        return

    received: list[int] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise Terminated(number)

    numbers = [signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, terminate) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _output_folder(parsed: Sequence[Any]) -> Iterator[None]:
    """Lock the output folder of a training or an evaluation, and write the heartbeat of a training. Rank 0 locks."""
    args = next((part for part in parsed if any(hasattr(part, name) for name in LOCKING_FIELDS)), None)
    rank = int(os.environ.get("RANK", "0"))
    with contextlib.ExitStack() as stack:
        if args is not None and rank == 0:
            stack.enter_context(held_folder(require_output_dir(args.output_dir)))
            delete_temporaries(args.output_dir)
        if _training_settings(parsed) is not None:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
            stack.enter_context(Heartbeat.of(args.output_dir, rank).running(world_size))
        yield


def _training_settings(parsed: Sequence[Any]) -> TrainingSettings | None:
    return next((part for part in parsed if hasattr(part, "resume_from_checkpoint")), None)


def _exit_code(verb: str, parsed: tuple[Any, ...], error: BaseException) -> int | None:
    """Print what ended a stage and return its exit code; print nothing and return None for a bug."""
    if isinstance(error, SystemExit):
        if isinstance(error, Stopped):
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
    if isinstance(error, UsageError):
        say(f"error: {message}", f"all options: onetrunk {verb} --help")
        return 2
    way = _how_to_resume(parsed) if is_out_of_memory(error) else ""
    say(f"error: {message}{way}", after_bar=bool(parsed))
    return 1


def end_process_group() -> None:
    """End torch.distributed: its threads can abort a process that exits while they run (exit code 134)."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _how_to_resume(parsed: Sequence[Any]) -> str:
    """Return how to resume a training that was stopped, to end a message; "" for a stage without checkpoints."""
    args = _training_settings(parsed)
    if args is None:
        return ""
    checkpoint = last_finished_checkpoint(args.output_dir)
    if checkpoint is None:
        return f"; {args.output_dir} holds no checkpoint yet, so the next run starts from the beginning"
    return f"; the same command with --resume auto resumes from {checkpoint}"


def explain(error: BaseException) -> str | None:
    """Return the message to print for an error; None for an error that is a bug."""
    # safetensors and tokenizers raise errors of their own.
    full = not isinstance(error, OUR_ERRORS) and re.search("|".join(map(os.strerror, FULL)), str(error))
    if full or (isinstance(error, OSError) and error.errno in FULL):
        where, reason = getattr(error, "filename", None) or "a file", full[0] if full else error.strerror
        return (
            f"{where} cannot be written ({reason}); make room there, or choose another output_dir, another folder"
            " for caches (HF_HOME) or for temporary files (TMPDIR)"
        )
    if is_out_of_memory(error):
        return (
            "out of memory; lower per_device_train_batch_size (or set microbatch_tokens), max_rollout_rows, or"
            f" max_completion_length, or set activation_checkpointing ({str(error).splitlines()[0]})"
        )
    if isinstance(error, TemplateError):
        return f"a chat template failed on a conversation ({error}); repair chat_template.jinja, or change the rows"
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)
    if isinstance(error, OUR_ERRORS) and is_ours:
        return str(error)
    if isinstance(error, LIBRARY_ERRORS):
        return f"{error} ({type(error).__name__}; ONETRUNK_TRACEBACK=1 shows where)"
    return None


@contextlib.contextmanager
def secrets_redacted() -> Iterator[None]:
    """Redact log records, warnings, and errors raised in a thread or a destructor, inside the block.

    Log records are redacted when they are made, not by a filter: libraries add handlers of their own at any time, and
    each would need the filter.
    """
    add_stored_token()
    make_record, format_warning = logging.getLogRecordFactory(), warnings.formatwarning
    hooks = threading.excepthook, sys.unraisablehook
    logging.setLogRecordFactory(lambda *args, **kwargs: _redacted_record(make_record(*args, **kwargs)))
    warnings.formatwarning = lambda *args, **kwargs: shown(format_warning(*args, **kwargs))
    threading.excepthook = sys.unraisablehook = _print_uncaught
    try:
        yield
    finally:
        logging.setLogRecordFactory(make_record)
        warnings.formatwarning = format_warning
        threading.excepthook, sys.unraisablehook = hooks


def _redacted_record(record: logging.LogRecord) -> logging.LogRecord:
    try:
        message = record.getMessage()
    except Exception:  # The message does not fit its arguments.
        message = f"{record.msg} {record.args}"
    record.msg, record.args = shown(message), ()
    if record.exc_info and record.exc_info[0] is not None:
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        record.exc_info, record.exc_text = None, shown(trace)
    return record


def _print_uncaught(args: threading.ExceptHookArgs | sys.UnraisableHookArgs) -> None:
    """Print what a thread or a `__del__` raised; Python continues after both."""
    if args.exc_type is not SystemExit:
        print_redacted(args.exc_type, args.exc_value, args.exc_traceback)


def print_redacted(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Print a stack trace to stderr as Python does, without secrets."""
    print(shown("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def begin(verb: str, args: TrainingSettings, needed: Sequence[str] | None = None) -> tuple[bool, str | None]:
    """Return whether the run in `output_dir` is finished already, and the checkpoint to resume from.

    `verb` names the stage. `needed` are the files that this trainer needs; None: those that every trainer needs.
    """
    message = _finished(args)
    if message is not None:
        if args.process_index == 0:
            print(f"{verb}: {message}")
        mirror = open_mirror(args)
        if mirror is not None:  # A kill may have ended the last upload, which comes after FINISHED.
            mirror.push_result(args.output_dir)
        return True, None
    resume = _resume_point(args, needed or LOOP_FILES)
    if not resume:
        require_free(args.output_dir, args.overwrite_output_dir)
    return False, resume


@contextlib.contextmanager
def recorded(trainer: Trainer, resume: str | None, verb: str, *arguments: Any) -> Iterator[None]:
    """Record the training in the block for its report, under the name of the stage, with its further `arguments`.

    First delete what `overwrite_output_dir` allows to delete of an old run, unless the training resumes. The new run
    is ready at this point, so no mistake in its settings costs the old one.
    """
    # These import the PPO trainer, which a check of a folder does not need.
    from onetrunk.ppo.monitoring.progress import StepProgress
    from onetrunk.report.record import RunRecord

    args, record = trainer.args, RunRecord(trainer, verb, arguments)
    trainer.add_callback(record)
    if verb != "ppo" and not args.disable_tqdm:  # PPO's trainer shows rollouts.
        StepProgress().add_to(trainer)
    if not resume and args.overwrite_output_dir and args.should_save:
        delete_old_run(args.output_dir)
    try:
        yield
    except Stopped as stopped:
        record.note_stop(stopped.signal_name)
        raise


def finish(verb: str, trainer: Trainer, what: str, **card: str | None) -> None:
    """Push the result if that is set, record that the run has ended, and print where it is, its alarms and its report.

    `what` is the result, in words; `card` are keywords of the trainer's `create_model_card`.
    """
    from onetrunk.parallel.groups import wait_for_first_process  # A check of a folder does not need it.

    wait_for_first_process()  # It measures the result.
    trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    if trainer.is_world_process_zero():
        folder = Path(trainer.args.output_dir)
        run = {"step": trainer.state.global_step, "epoch": trainer.state.epoch, "ended": trainer.ended}
        atomic_write_json(folder / FINISHED, run)
        alarms = read_run(folder).alarms()
        print(f"{verb}: saved {what} in {folder}; alarms: {len(alarms) or 'none'}")
        for alarm in alarms:  # The worst first.
            print(printable(f"  {alarm.text}"))
        say_how(folder, verb, trainer.args.write_report)
    trainer.mirror_result()  # With what was measured after it was saved.
    trainer.accelerator.end_training()


def say_how(folder: str | Path, verb: str, with_report: bool = True) -> None:
    """Print the verdict on a run that has ended; write its report and print where it is."""
    page = write_report_of(folder) if with_report else None
    verdict = verdict_of(read_run(folder))
    if verdict is not None:
        print(printable(f"{verb}: {verdict.level.upper()}: {verdict}"))
    if page is not None:
        print(f"{verb}: report: {page}")


def _finished(args: TrainingSettings) -> str | None:
    """Return the message for a resumed run that has nothing left to do; None if it has something left.

    A run is finished when it has written its result, unless more steps are planned now, or the run was ended early
    and `continue_ended_run` is set.
    """
    output_dir = Path(args.output_dir)
    path = output_dir / FINISHED
    if not path.is_file() or not has_result(output_dir):
        return None
    run = read_json(path)
    with reading_content(path):
        run = {"step": read_number(run["step"], int), "epoch": read_number(run["epoch"]), "ended": run["ended"]}
    if str(args.resume_from_checkpoint).lower() not in ("true", AUTO):
        # A checkpoint given by its path is the end only if it is this run's last one.
        end = output_dir / f"{PREFIX}{run['step']}"
        if not end.is_dir() or end.resolve() != Path(str(args.resume_from_checkpoint)).resolve():
            return None
    if run["ended"] is not None:
        is_over = not args.continue_ended_run
        why = f"where it was ended ({run['ended']}); set continue_ended_run to true to continue"
    else:
        is_over = run["step"] >= args.max_steps if args.max_steps > 0 else run["epoch"] >= args.num_train_epochs
        why = "its planned end; raise num_rollouts, max_steps or num_train_epochs to continue"
    message = f"nothing is left to train: the run in {args.output_dir} is finished at step {run['step']}, {why}"
    return message if is_over else None


def _resume_point(args: TrainingSettings, needed: Sequence[str]) -> str | None:
    mirror = open_mirror(args)
    word = str(args.resume_from_checkpoint or "").lower()
    values = {"": None, "none": None, "false": None, "true": True, AUTO: AUTO}
    return locate(values.get(word, args.resume_from_checkpoint), args, needed, mirror)


def has_result(output_dir: str | os.PathLike[str]) -> bool:
    """Return whether a run has left its complete, undamaged result next to its checkpoints."""
    return all(problem.startswith(f"{CARD}:") for problem in checkpoint_problems(output_dir))


def last_finished_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the last complete checkpoint, if any, by its manifest's presence; nothing in it is read."""
    complete = [path for path in checkpoint_folders(output_dir) if (path / MANIFEST).is_file()]
    return complete[-1] if complete else None
