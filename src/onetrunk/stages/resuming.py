"""Where a run goes on, where it may begin, and who writes there: `resume_from_checkpoint`, `overwrite_output_dir`.

Knows paths and checkpoint folders; what a checkpoint must hold is the trainer's to say.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.folders import checkpoint_folders
from onetrunk.checkpoints.manifest import MANIFEST, problems
from onetrunk.files import require_output_dir
from onetrunk.locks import held_folder

TRAINER_STATE = "trainer_state.json"
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
    from onetrunk.trainers.resume_point import LOOP_FILES, locate, open_mirror

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
    (Path(args.output_dir) / MANIFEST).unlink(missing_ok=True)
    for folder in (*checkpoint_folders(args.output_dir), *(Path(args.output_dir) / name for name in BRANCHES)):
        if folder.is_dir():
            shutil.rmtree(folder)


def last_finished_checkpoint(output_dir: str | os.PathLike[str]) -> Path | None:
    """Return the last checkpoint that was written to its end, if any; nothing in it is read."""
    finished = [path for path in checkpoint_folders(output_dir) if (path / MANIFEST).is_file()]
    return finished[-1] if finished else None


def nothing_left(resume: str, max_steps: int, num_epochs: float) -> str | None:
    """Say so where a checkpoint lies at the planned end of a run or past it; None where there are steps to train.

    Args:
        resume: the checkpoint folder.
        max_steps: planned optimizer steps; not above 0: the plan is `num_epochs`.
        num_epochs: planned passes over the rows.
    """
    path = Path(resume) / TRAINER_STATE
    if not path.is_file():
        return None
    state = json.loads(path.read_text(encoding="utf-8"))
    step, epoch = state.get("global_step") or 0, state.get("epoch") or 0
    if step < max_steps or (max_steps <= 0 and epoch < num_epochs):
        return None
    plan = f"max_steps {max_steps}" if max_steps > 0 else f"num_train_epochs {num_epochs:g}"
    return f"nothing is left to train: {resume} is at step {step}, the end of {plan}; raise it to train on"
