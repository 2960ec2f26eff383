"""Where a run goes on, where it may begin, and who writes there: `resume_from_checkpoint`, `overwrite_output_dir`.

Knows paths and checkpoint folders; what a checkpoint must hold is the trainer's to say.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.folders import FINISHED, PREFIX, checkpoint_folders, delete
from onetrunk.checkpoints.manifest import MANIFEST, problems
from onetrunk.utils.files import atomic_write_json, delete_temporaries, read_json, require_output_dir
from onetrunk.utils.locks import held_folder

# What a finished run leaves beside its checkpoints: an adapter, or a whole model.
RESULTS = ("adapter_config.json", "config.json")
# Branches that a run saves only if it has them: left over, they would be taken for the next one's.
BRANCHES = ("reference", "value")
# Written anew when a result is pushed.
CARD = "README.md"
AUTO = "auto"
# Fields of the settings of trainings, and of evaluations. Shards of preferences share a folder: `prefs` holds its own.
HELD = ("resume_from_checkpoint", "opponent")


def resume_point(args: Any, needed: Sequence[str] | None = None) -> str | None:
    """Return the checkpoint folder that a run goes on from, verified; None to start anew.

    Args:
        args: with resume_from_checkpoint (a folder, true, auto, or nothing) and output_dir.
        needed: files that the trainer needs besides; None: those of every trainer.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError, RuntimeError: there is no checkpoint to go on from, or none is whole.
    """
    from onetrunk.checkpoints.resume_point import LOOP_FILES, locate, open_mirror

    mirror = open_mirror(args)
    value = args.resume_from_checkpoint
    word = str(value).lower()
    if value is None or word in ("false", "none", ""):
        return None
    given: str | bool = word == "true" or (AUTO if word == AUTO else str(value))
    if isinstance(given, str) and given != AUTO and not Path(given).is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint {value} is no folder (working folder {Path.cwd()}); give a checkpoint-* folder,"
            " true for the last one in output_dir, or auto for that one if there is any"
        )
    return locate(given, args, needed or LOOP_FILES, mirror)


@contextlib.contextmanager
def folder_of(parsed: Sequence[Any]) -> Iterator[None]:
    """Be the one process that writes to the output folder of a training or an evaluation, if the arguments are its.

    Raises:
        ValueError, RuntimeError: the folder can't be written to, or another process writes there.
    """
    args = next((part for part in parsed if any(hasattr(part, name) for name in HELD)), None)
    if args is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    with held_folder(require_output_dir(args.output_dir)):
        delete_temporaries(args.output_dir)
        yield


def require_new_run(args: Any, resume: str | bool | None) -> None:
    """Refuse to begin where another run has left something, unless `overwrite_output_dir` says so.

    A new run's checkpoints would be sorted among the old ones, which are then deleted or resumed in its place.

    Raises:
        ValueError: names what is there.
    """
    if resume or args.overwrite_output_dir:
        return
    found = left_by_a_run(args.output_dir)
    if found:
        raise ValueError(
            f"{args.output_dir} holds a run already ({', '.join(found)}); set resume_from_checkpoint to true to go on"
            " with it, overwrite_output_dir to true to delete its checkpoints and start anew, or another output_dir"
        )


def has_result(output_dir: str | os.PathLike[str]) -> bool:
    """Say whether a run has left its adapter or its model beside its checkpoints, all of it, as it was written."""
    return not result_problems(output_dir)


def result_problems(output_dir: str | os.PathLike[str]) -> list[str]:
    """Return how a result differs from its manifest, a phrase each; nothing for one that is as it was written."""
    return [problem for problem in problems(output_dir) if not problem.startswith(f"{CARD}:")]


def left_by_a_run(output_dir: str | os.PathLike[str]) -> list[str]:
    """Return the names of the checkpoints and of the result that a training has left in a folder."""
    results = [name for name in RESULTS if (Path(output_dir) / name).is_file()]
    return [path.name for path in checkpoint_folders(output_dir)] + results


def delete_old_run(args: Any, resume: str | bool | None) -> None:
    """Delete the checkpoints and branches of the run that `overwrite_output_dir` gives up; call it last of all."""
    if resume or not args.overwrite_output_dir or not args.should_save:
        return
    for name in (FINISHED, MANIFEST):
        (Path(args.output_dir) / name).unlink(missing_ok=True)
    for folder in (*checkpoint_folders(args.output_dir), *(Path(args.output_dir) / name for name in BRANCHES)):
        if folder.is_dir():
            delete(folder)


def last_finished_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the last checkpoint that was written to its end, if any; nothing in it is read."""
    finished = [path for path in checkpoint_folders(output_dir) if (path / MANIFEST).is_file()]
    return finished[-1] if finished else None


def begin(verb: str, args: Any, needed: Sequence[str] | None = None) -> tuple[bool, str | None]:
    """Look at the output folder; return whether the run is finished already, and the checkpoint to resume from.

    Args:
        verb: name of the stage; it says so where the run is finished.
        args: settings of a training.
        needed: as for `resume_point`.

    Raises:
        ValueError, FileNotFoundError: a folder that holds another run, or no checkpoint to resume from.
    """
    said = finished(args)
    if said is not None:
        if args.process_index == 0:
            print(f"{verb}: {said}")
        return True, None
    resume = resume_point(args, needed)
    require_new_run(args, resume)
    return False, resume


def finished(args: Any) -> str | None:
    """Return what to say of a run that is resumed and has nothing left to do; None where there is something.

    It has nothing left to do once it has written all that it writes, unless more steps are planned now, or it was
    ended early and `continue_ended_run` is set.

    Args:
        args: settings of a training.
    """
    path = Path(args.output_dir) / FINISHED
    if not path.is_file() or not has_result(args.output_dir):
        return None
    run = read_json(path)
    if not all((Path(args.output_dir) / name).is_file() for name in run["files"]):
        return None
    word = str(args.resume_from_checkpoint).lower()
    if word not in ("true", AUTO):
        # A checkpoint that is named is the end only if it is that of this run.
        end = Path(args.output_dir) / f"{PREFIX}{run['step']}"
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


def note_finished(trainer: Any) -> None:
    """Write down that a run has left all that it leaves; a stage calls it last of all.

    Args:
        trainer: one of ours, trained.
    """
    if trainer.is_world_process_zero():
        folder = Path(trainer.args.output_dir)
        run = {"step": trainer.state.global_step, "epoch": trainer.state.epoch, "ended": trainer.ended}
        # A report that is deleted later is written again.
        run["files"] = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name[0] not in "._")
        atomic_write_json(folder / FINISHED, run)
