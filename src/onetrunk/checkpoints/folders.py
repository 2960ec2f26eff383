"""The checkpoint folders of a run: how they are written, published, found, verified and deleted.

A checkpoint is made in `<output_dir>/.saving/`, gets its manifest (the size and sha256 of each file), and is renamed
to `<output_dir>/checkpoint-<step>`. A folder without a manifest is incomplete. An older checkpoint is deleted only
after a newer one was verified, so a process that is killed at any moment leaves the older checkpoints unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from onetrunk.utils.files import atomic_write_json, read_json, sync

T = TypeVar("T")

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
STAGING = ".saving"
# A stage writes this file last, next to the result. A name with an underscore is not uploaded to the Hub.
FINISHED = "_finished.json"
# What a finished run leaves next to its checkpoints: an adapter, or a whole model.
RESULTS = ("adapter_config.json", "config.json")
# What was measured of it: a run without held-out rows writes none of these.
MEASURED = ("metrics.json", "all_results.json", "eval_results.json", "reliability.png")
MEASURED += ("_report/completions-before.jsonl", "_report/completions-after.jsonl")
# Files that not every result has: an old one's would be read with the new one.
OPTIONAL = ("chat_template.jinja", "value_head.safetensors", "score_scale.json", "generation_config.json")
OPTIONAL += ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
# Branches that only some runs save: an old run's would be taken for the new run's.
BRANCHES = ("reference",)
# This many checkpoints are always kept: whatever ends the run may also damage the last one.
LEAST_KEPT = 2
# How torch and safetensors report that a file could not be written.
WRITE_FAILED = re.compile(
    r"PytorchStreamWriter|unexpected pos|No space left|File too large|Disk quota|SafetensorError"
)


def write_manifest(folder: str | os.PathLike[str], **about: Any) -> None:
    """Sync every file in a complete folder and its subfolders to disk, then write the manifest.

    Args:
        folder: holds no links, because what they point to could change.
        **about: more entries of the manifest ("step"), as JSON values.
    """
    root = Path(folder)
    files: dict[str, dict[str, Any]] = {}
    for path in (*sorted(root.rglob("*")), root):
        if path.is_symlink() and path != root:
            raise RuntimeError(f"{path} is a link; a checkpoint may hold files only")
        if path == root / MANIFEST:
            continue
        sync(path)
        if path.is_file():
            files[path.relative_to(root).as_posix()] = {"size": path.stat().st_size, "sha256": _digest(path)}
    atomic_write_json(root / MANIFEST, {**about, "files": files})


def read_manifest(folder: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Return the manifest of a folder, checked as by `check_manifest`."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise RuntimeError(f"{MANIFEST}: missing, so the folder was not written to its end")
    try:
        content = read_json(path)
    except RuntimeError as error:
        raise RuntimeError(f"{MANIFEST}: {error}") from error
    return check_manifest(content, step)


def check_manifest(manifest: Any, step: int | None) -> dict[str, Any]:
    """Return a manifest, which may come from an untrusted place, after checking its form.

    Unless `step` is None, the manifest must name that step. Raises as `read_manifest`.
    """
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise RuntimeError(f"{MANIFEST}: not a manifest, which is a mapping with files")
    if step is not None and manifest.get("step") != step:
        raise RuntimeError(f"{MANIFEST}: written for step {manifest.get('step')!r}, expected {step}")
    for name, entry in manifest["files"].items():
        path = PurePosixPath(name)
        if not path.name or path.is_absolute() or ".." in path.parts or "\\" in name:
            raise RuntimeError(f"{MANIFEST}: {name!r} is not a file name in the folder")
        is_entry = isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)
        if not is_entry:
            raise RuntimeError(f"{MANIFEST}: the entry of {name} has no size and sha256")
    return manifest


def checkpoint_problems(folder: str | os.PathLike[str]) -> list[str]:
    """Return how a checkpoint or a result differs from its manifest, as phrases; an empty list if it is whole.

    Reads every file. The manifest of a checkpoint must name the step in the folder's name.
    """
    root = Path(folder)
    try:
        files = read_manifest(root, step_of(root))["files"]
    except RuntimeError as error:
        return [str(error)]
    faults = ((name, _problem(root, name, entry)) for name, entry in files.items())
    return [f"{name}: {fault}" for name, fault in faults if fault]


def _problem(root: Path, name: str, entry: dict[str, Any]) -> str | None:
    path = root / name
    if any(part.is_symlink() for part in (path, *path.parents) if part != root and root in part.parents):
        return "a link"
    if not path.is_file():
        return "missing"
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"{size} bytes where {entry['size']} were written"
        return None if _digest(path) == entry["sha256"] else "changed since it was written (sha256 differs)"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def step_of(folder: str | os.PathLike[str]) -> int | None:
    """Return the step in the name of a checkpoint folder; None for any other name."""
    name = Path(folder).name
    number = name.removeprefix(PREFIX)
    return int(number) if name.startswith(PREFIX) and number.isascii() and number.isdigit() else None


def checkpoint_folders(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoint folders of a run in the order of their steps, damaged ones included."""
    folders = [path for path in Path(output_dir).glob(f"{PREFIX}*") if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=step_of)


def described(problems: list[str]) -> str:
    """Return the first three problems as one phrase, with the number of the others."""
    more = [f"and {len(problems) - 3} more"] if len(problems) > 3 else []
    return "; ".join(problems[:3] + more)


def last_whole(output_dir: str | os.PathLike[str], tell: Callable[[str], None]) -> Path | None:
    """Return the last checkpoint of a run that matches its manifest; None if there are no checkpoints.

    `tell` receives a warning for each damaged checkpoint that is skipped.
    """
    names = [folder.name for folder in reversed(checkpoint_folders(output_dir))]
    name = first_whole(names, lambda name: checkpoint_problems(Path(output_dir) / name), str(output_dir), tell)
    return None if name is None else Path(output_dir) / name


def first_whole(
    names: Iterable[str], problems_of: Callable[[str], list[str]], place: str, tell: Callable[[str], None]
) -> str | None:
    """Return the first checkpoint in a place that has no problems; `tell` receives a warning for each before it."""
    damage: list[str] = []
    for name in names:
        problems = problems_of(name)
        if not problems:
            return name
        damage.append(f"{name}: {described(problems)}")
        tell(f"{place}/{name} is damaged and skipped ({described(problems)})")
    if damage:
        raise RuntimeError(
            f"none of the {len(damage)} checkpoints in {place} is whole ({damage[0]}); restore one from a copy, or"
            " start a new run in another place"
        )
    return None


def last_checkpoint(output_dir: str | os.PathLike[str], step: int) -> str | None:
    """Return the name of the last checkpoint in a folder that was saved at `step` or before; None if there is none."""
    names = [folder.name for folder in checkpoint_folders(output_dir) if step_of(folder) <= step]
    return names[-1] if names else None


def left_by_a_run(output_dir: str | os.PathLike[str]) -> list[str]:
    """Return the names of the checkpoints and of the result that a training has left in a folder."""
    results = [name for name in RESULTS if (Path(output_dir) / name).is_file()]
    return [path.name for path in checkpoint_folders(output_dir)] + results


def require_no_training(output_dir: str | os.PathLike[str]) -> None:
    """Raise ValueError for the folder of a training, in which another verb would write metrics and a report."""
    names = left_by_a_run(output_dir)
    if names:
        raise ValueError(
            f"{output_dir} holds a training ({', '.join(names)}), whose metrics and report would be replaced; name"
            " another output_dir"
        )


def require_free(output_dir: str | os.PathLike[str], overwrites: bool) -> None:
    """Raise ValueError for a folder that holds a run already: new checkpoints would be sorted among the old ones,
    which could then be resumed in their place.
    """
    names = [] if overwrites else left_by_a_run(output_dir)
    if names:
        raise ValueError(
            f"{output_dir} holds a run already ({', '.join(names)}); resume it (--resume auto, or"
            " train(resume_from_checkpoint=True) in Python), set overwrite_output_dir to true to delete its"
            " checkpoints and start over, or set another output_dir"
        )


def delete_old_run(output_dir: str | os.PathLike[str]) -> None:
    """Delete the checkpoints of a run, and files that could be mistaken for the result of the next one."""
    for name in (FINISHED, MANIFEST, *MEASURED):
        (Path(output_dir) / name).unlink(missing_ok=True)
    for folder in (*checkpoint_folders(output_dir), *(Path(output_dir) / name for name in BRANCHES)):
        if folder.is_dir():
            delete(folder)


def begin_staging(output_dir: str | os.PathLike[str]) -> Path:
    """Return an empty folder in which checkpoints are made. What a killed process left there is deleted."""
    staging = Path(output_dir) / STAGING
    if staging.is_symlink() or staging.is_file():
        staging.unlink()
    elif staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def published_path(folder: Path) -> Path:
    """Return where a folder that is written under STAGING will be: a checkpoint, or the result in the run's folder."""
    if folder.parent.name != STAGING:
        return folder
    run = folder.parent.parent
    return run / folder.name if step_of(folder) is not None else run


def publish(source: Path, target: Path) -> None:
    """Rename a complete folder durably, replacing any folder that has the name."""
    replaced = source.with_name(f"{source.name}.replaced")
    if os.path.lexists(target):
        os.rename(target, replaced)
    os.rename(source, target)
    sync(target.parent)
    if os.path.lexists(replaced):
        delete(replaced)


def install(staged: Path, target: Path, **about: Any) -> None:
    """Move a finished result from the staging folder into the run's folder, file by file; delete the staging folder.

    The manifest comes last and marks the result as complete; `about` are more entries of it.
    """
    (target / MANIFEST).unlink(missing_ok=True)
    kinds = [name for name in RESULTS if (staged / name).is_file()]
    for name in (*RESULTS, *OPTIONAL) if kinds else ():  # A model next to an old adapter would be read as that.
        if not (staged / name).is_file():
            (target / name).unlink(missing_ok=True)
    write_manifest(staged, **about)
    paths = [path for path in staged.rglob("*") if path.is_file()]
    for path in sorted(paths, key=lambda path: path.name == MANIFEST):
        place = target / path.relative_to(staged)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    sync(target)
    shutil.rmtree(staged.parent)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn a failed write inside the block into one error that names the cause."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not WRITE_FAILED.search(f"{type(error).__name__}: {error}"):
            raise
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise RuntimeError(
            f"{target} could not be written ({reason}; {free_bytes(target):,} bytes are free there). Older"
            " checkpoints are unchanged: make room, and resume with --resume auto"
        ) from error


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of a path, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def set_aside_later(output_dir: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename the complete checkpoints after a step from which a run is resumed, and return their new names.

    Otherwise they would count as the newest ones: rotation would delete the run's new checkpoints instead, and a run
    that is resumed later would resume from them.
    """
    renamed = []
    for folder in checkpoint_folders(output_dir):
        if step_of(folder) > step and (folder / MANIFEST).is_file():
            names = (folder.with_name(f"{folder.name}.aside{number}") for number in itertools.count())
            renamed.append(folder.rename(next(name for name in names if not os.path.lexists(name))))
    return renamed


def delete(folder: Path) -> None:
    """Delete a folder, its manifest first, so that a partly deleted folder never counts as whole.

    Of a link only the link is deleted: its target may be somebody's only copy.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def rotate(output_dir: str | os.PathLike[str], keep: int | None, kept: Collection[Path] = ()) -> list[Path]:
    """Delete the oldest checkpoints and return their paths. The caller has verified the newest one.

    Args:
        kept: folders to keep whatever their age (the best one, one that is being uploaded).
    """
    folders, protected = checkpoint_folders(output_dir), {Path(path).resolve() for path in kept}
    oldest = surplus(folders, keep, [folder for folder in folders if folder.resolve() in protected])
    for path in oldest:
        delete(path)
    return oldest


def surplus(checkpoints: Sequence[T], keep: int | None, kept: Collection[T]) -> list[T]:
    """Return the oldest of the checkpoints, which are in the order of their steps, beyond `keep` and not in `kept`.

    One in `kept` counts towards `keep`, but the LEAST_KEPT newest always stay. If `keep` is None, all stay.
    """
    if not keep or keep < 0:
        return []
    newest = max(keep, LEAST_KEPT)
    newest = max(newest - sum(checkpoint in kept for checkpoint in checkpoints[:-newest]), LEAST_KEPT)
    return [checkpoint for checkpoint in checkpoints[:-newest] if checkpoint not in kept]
