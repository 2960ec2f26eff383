"""Checkpoint folders of a run: published whole, found verified, the oldest deleted only when a newer one is proven.

A checkpoint is made in `<output_dir>/.saving/`, gets its manifest, and is renamed to `<output_dir>/checkpoint-<step>`.
A process killed at any moment leaves the older checkpoints as they were. Knows paths and manifests; nothing of
training.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from onetrunk.checkpoints.manifest import MANIFEST, problems, sync

PREFIX = "checkpoint-"
STAGING = ".saving"
# Written last of all by a stage, beside the result. On the Hub no name with an underscore is uploaded.
FINISHED = "_finished.json"
# Always kept: the last may be damaged by what ends the run.
LEAST_KEPT = 2


def step_of(folder: str | os.PathLike[str]) -> int | None:
    """Return the step in the name of a checkpoint folder; None for any other name."""
    number = Path(folder).name.removeprefix(PREFIX)
    return int(number) if Path(folder).name.startswith(PREFIX) and number.isascii() and number.isdigit() else None


def checkpoint_folders(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoint folders of a run, by step, whole or not."""
    root = Path(output_dir)
    found = [path for path in root.glob(f"{PREFIX}*") if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=step_of)


def checkpoint_problems(folder: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with a checkpoint folder, a phrase each; its manifest has to name the step of its name."""
    step = step_of(folder)
    return problems(folder) if step is None else problems(folder, step=step)


def begin_staging(output_dir: str | os.PathLike[str]) -> Path:
    """Return the folder in which checkpoints are made, empty: what a killed process left there is deleted."""
    staging = Path(output_dir) / STAGING
    if staging.is_symlink() or staging.is_file():
        staging.unlink()
    elif staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def publish(source: Path, target: Path) -> None:
    """Give a whole folder its name, durably; a folder that has the name goes first.

    Raises:
        OSError: the disk is full, ...; what had the name has it still, or lies whole in the folder of `source`.
    """
    replaced = source.with_name(f"{source.name}.replaced")
    if os.path.lexists(target):
        os.rename(target, replaced)
    os.rename(source, target)
    sync(target.parent)
    if os.path.lexists(replaced):
        delete(replaced)


def set_aside_later(output_dir: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename the finished checkpoints after a step, from which a run takes another course; return their new names.

    They are the newest by their step: rotation would delete the new course's checkpoints in their place, and a run
    that is resumed would go on from them.
    """
    aside = []
    for folder in checkpoint_folders(output_dir):
        if step_of(folder) > step and (folder / MANIFEST).is_file():
            names = (folder.with_name(f"{folder.name}.aside{number}") for number in itertools.count())
            name = next(name for name in names if not os.path.lexists(name))
            os.rename(folder, name)
            aside.append(name)
    return aside


def delete(folder: Path) -> None:
    """Delete a folder, its manifest first, so that half of it is never taken for a whole one.

    Of a link only the link goes: what it leads to may be somebody's only copy.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def rotate(output_dir: str | os.PathLike[str], keep: int | None, kept: Collection[Path] = ()) -> list[Path]:
    """Delete the oldest checkpoints beyond `keep` and return them; the newest has been verified by the caller.

    Args:
        output_dir: of the run.
        keep: how many stay, at least LEAST_KEPT of them; None: all.
        kept: folders that stay whatever their age (the best one, one that is being copied).
    """
    if not keep or keep < 0:
        return []
    spared = {Path(path).resolve() for path in kept}
    folders = checkpoint_folders(output_dir)
    newest = max(keep, LEAST_KEPT)
    # One that has to stay takes the place of one that could.
    extra = sum(path.resolve() in spared for path in folders[:-newest])
    newest = max(newest - extra, LEAST_KEPT)
    doomed = [path for path in folders[:-newest] if path.resolve() not in spared]
    for path in doomed:
        delete(path)
    return doomed


def last_whole(output_dir: str | os.PathLike[str], tell: Callable[[str], None] = lambda _: None) -> Path | None:
    """Return the last checkpoint of a run that is as it was written; None where there is no checkpoint at all.

    Args:
        output_dir: of the run.
        tell: receives a sentence for each checkpoint that is passed over.

    Raises:
        RuntimeError: there are checkpoints, and none is whole.
    """
    folders = checkpoint_folders(output_dir)
    for folder in reversed(folders):
        found = checkpoint_problems(folder)
        if not found:
            return folder
        tell(f"{folder} is damaged and passed over ({described(found)})")
    if folders:
        raise RuntimeError(
            f"none of the {len(folders)} checkpoints in {output_dir} is whole (the last, {folders[-1].name}:"
            f" {described(checkpoint_problems(folders[-1]))}); restore one from a copy, or start anew in another"
            " output_dir"
        )
    return None


def described(found: list[str], most: int = 3) -> str:
    """Return the first problems of a folder as one phrase, and how many more there are."""
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more


def last_checkpoint(output_dir: str | Path, step: int) -> str | None:
    """Return the name of the last checkpoint in a folder that was saved at `step` or before; None: there is none."""
    found = [folder.name for folder in checkpoint_folders(output_dir) if step_of(folder) <= step]
    return found[-1] if found else None
