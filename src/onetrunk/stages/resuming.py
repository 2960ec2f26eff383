"""Where a training resumes, whether it may start in its output folder, and whether it is finished already.

This module looks at paths and checkpoint folders; `checkpoints/resume_point.py` verifies what a checkpoint must hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onetrunk.checkpoints.folders import (
    FINISHED,
    PREFIX,
    checkpoint_folders,
    delete_old_run,
    left_by_a_run,
    require_free,
)
from onetrunk.checkpoints.manifest import MANIFEST, problems
from onetrunk.checkpoints.resume_point import LOOP_FILES, locate, open_mirror
from onetrunk.checkpoints.stopping import Stopped
from onetrunk.report.report import write_report_of
from onetrunk.report.runs import read_run
from onetrunk.utils.escaping import printable
from onetrunk.utils.files import atomic_write_json, delete_temporaries, read_json, require_output_dir
from onetrunk.utils.locks import held_folder

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import Trainer

    from onetrunk.ppo.config import PPOConfig
    from onetrunk.reward_models.trainer import RewardModelConfig
    from onetrunk.stages.arguments import SFTArguments

    TrainingSettings = SFTArguments | RewardModelConfig | PPOConfig

__all__ = ["begin", "finish", "has_result", "last_finished_checkpoint", "left_by_a_run", "locked_output_dir", "train"]

# Pushing a result rewrites it.
CARD = "README.md"
AUTO = "auto"
# How the result is loaded, by whether it is an adapter; a reward model has its own README.
LOADED = ("sft", "ppo")
LOADING = {
    True: 'peft.AutoPeftModelForCausalLM.from_pretrained("{folder}")',
    False: 'transformers.AutoModelForCausalLM.from_pretrained("{folder}")',
}
# How long a run that was stopped waits for its page. Schedulers kill what is left after 30 s or more.
REPORT_WAIT_S = 15.0
NOT_SHARED = "--exclude 'checkpoint-*' --exclude '_*'"
# Trainings and evaluations have one of these fields. Shards of preferences share a folder, so `prefs` locks its own.
LOCKING_FIELDS = ("resume_from_checkpoint", "opponent")


def begin(verb: str, args: TrainingSettings, needed: Sequence[str] | None = None) -> tuple[bool, str | None]:
    """Return whether the run in `output_dir` is finished already, and the checkpoint to resume from.

    `verb` names the stage. `needed` are the files that this trainer needs; None: those that every trainer needs.

    Raises:
        ValueError, FileNotFoundError: the folder holds another run, or no checkpoint to resume from.
    """
    message = _finished(args)
    if message is not None:
        if args.process_index == 0:
            print(f"{verb}: {message}")
        return True, None
    resume = _resume_point(args, needed or LOOP_FILES)
    if not resume:
        require_free(args.output_dir, args.overwrite_output_dir)
    return False, resume


def train(trainer: Trainer, resume: str | None, verb: str, *arguments: Any) -> None:
    """Train from a checkpoint; without one, first delete what `overwrite_output_dir` allows to delete of an old run.

    The new run is ready at this point, so no mistake in its settings costs the old one. The run is recorded for its
    report under the name of the stage, `verb`, with its further `arguments`.
    """
    from onetrunk.report.record import RunRecord  # Imports the PPO trainer, which a check of a folder does not need.

    args, record = trainer.args, RunRecord(trainer, verb, arguments)
    trainer.add_callback(record)
    if not resume and args.overwrite_output_dir and args.should_save:
        delete_old_run(args.output_dir)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Stopped as stopped:
        record.note_stop(stopped.signal_name)
        if args.write_report and trainer.is_world_process_zero():
            write_report_of_stopped(args.output_dir)
        raise


def finish(verb: str, trainer: Trainer, what: str, **card: str | None) -> None:
    """Push the result if that is set, record that the run has written all its files, and print where they are.

    `what` is the result, in words; `card` are keywords of the trainer's `create_model_card`.
    """
    trainer.accelerator.wait_for_everyone()
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    if trainer.is_world_process_zero():
        folder = Path(trainer.args.output_dir)
        run = {"step": trainer.state.global_step, "epoch": trainer.state.epoch, "ended": trainer.ended}
        # With these names, a report that is deleted later is written again.
        run["files"] = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name[0] not in "._")
        atomic_write_json(folder / FINISHED, run)
        print_end(verb, trainer, what)
    trainer.accelerator.end_training()


def write_report_of_stopped(folder: str | os.PathLike[str]) -> None:
    """Write the report of a run that a signal has stopped, in a process of its own; never raises.

    Everything is saved by now. Nothing that goes wrong with the page, or takes long, may change how the run ends, nor
    may a second signal: the page is then left out.
    """
    command = [sys.executable, "-m", "onetrunk", "report", os.path.abspath(folder)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        # In a session of its own: a second Ctrl-C is for this process, which then ends the other one.
        with subprocess.Popen(command, **quiet, start_new_session=True) as process:
            try:
                code = process.wait(REPORT_WAIT_S)
            finally:
                process.kill()
        why = f"its process ended with {code}" if code else None
    except BaseException as error:  # Also what a signal raises.
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        logger.warning("%s: no report was written (%s); onetrunk report %s writes it", folder, why, folder)


def print_end(verb: str, trainer: Trainer, what: str) -> None:
    """Write the report of a run that has ended; print its alarms, the worst first, and what can be done next."""
    folder, args = Path(trainer.args.output_dir), trainer.args
    page = write_report_of(folder) if args.write_report else None
    alarms = read_run(folder).alarms()
    if alarms:
        print(f"{verb}: {len(alarms)} alarm{'s' if len(alarms) > 1 else ''}, the worst first:")
    for alarm in alarms:
        print(printable(f"  {alarm.text}"))
    print(f"{verb}: saved {what} in {folder}. What to do next:")
    commands = {
        "read how it went": None if page is None else str(page),
        "see the curves": f"tensorboard --logdir {shlex.quote(str(folder))}"
        if "tensorboard" in args.report_to
        else None,
        "load it": LOADING[(folder / "adapter_config.json").is_file()].format(folder=folder)
        if verb in LOADED
        else None,
        "share it": None if args.push_to_hub else f"hf upload USER/NAME {shlex.quote(str(folder))} . {NOT_SHARED}",
    }
    for purpose, command in commands.items():
        if command is not None:
            print(f"  {purpose:<17} {command}")


def say_where(page: Path | None, verb: str) -> None:
    """Print where the report of a stage is; nothing if none was written."""
    if page is not None:
        print(f"{verb}: how it went: {page}")


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
    if not all((output_dir / name).is_file() for name in run["files"]):
        return None
    if str(args.resume_from_checkpoint).lower() not in ("true", AUTO):
        # A checkpoint given by its path is the end only if it is this run's last one.
        end = output_dir / f"{PREFIX}{run['step']}"
        if not end.is_dir() or end.resolve() != Path(str(args.resume_from_checkpoint)).resolve():
            return None
    if run["ended"] is not None:
        if args.continue_ended_run:
            return None
        why = f"where it was ended ({run['ended']}); set continue_ended_run to true to train on"
    elif args.max_steps > 0:
        if run["step"] < args.max_steps:
            return None
        rollouts = getattr(args, "num_rollouts", None)
        plan = f"num_rollouts {rollouts}" if rollouts else f"max_steps {args.max_steps}"
        why = f"the end of {plan}; raise it to train on"
    else:
        if run["epoch"] < args.num_train_epochs:
            return None
        why = f"the end of num_train_epochs {args.num_train_epochs:g}; raise it to train on"
    return f"nothing is left to train: the run in {args.output_dir} is finished at step {run['step']}, {why}"


def _resume_point(args: TrainingSettings, needed: Sequence[str]) -> str | None:
    mirror = open_mirror(args)
    value = args.resume_from_checkpoint
    word = str(value).lower()
    if value is None or word in ("false", "none", ""):
        return None
    if word in ("true", AUTO):
        return locate(True if word == "true" else AUTO, args, needed, mirror)
    if not Path(value).is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint {value} is no folder (working folder {Path.cwd()}); give a checkpoint-* folder,"
            " true for the last one in output_dir, or auto for that one if there is any"
        )
    return locate(str(value), args, needed, mirror)


@contextlib.contextmanager
def locked_output_dir(parsed: Sequence[Any]) -> Iterator[None]:
    """Lock the output folder for this run. Does nothing for commands without one, and on ranks other than 0.

    Raises:
        ValueError, RuntimeError: the folder cannot be written to, or another process writes there.
    """
    args = next((part for part in parsed if any(hasattr(part, name) for name in LOCKING_FIELDS)), None)
    if args is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    with held_folder(require_output_dir(args.output_dir)):
        delete_temporaries(args.output_dir)
        yield


def has_result(output_dir: str | os.PathLike[str]) -> bool:
    """Return whether a run has left its complete, undamaged result next to its checkpoints."""
    return all(problem.startswith(f"{CARD}:") for problem in problems(output_dir))


def last_finished_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the last complete checkpoint, if any, by its manifest's presence; nothing in it is read."""
    complete = [path for path in checkpoint_folders(output_dir) if (path / MANIFEST).is_file()]
    return complete[-1] if complete else None
