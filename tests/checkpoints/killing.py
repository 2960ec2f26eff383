"""Runs in processes that may be killed, forked from a server that has imported everything; and their checkpoints,
changed as somebody could who knows the manifest."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from onetrunk.checkpoints.folders import checkpoint_folders, read_manifest, write_manifest
from tests.checkpoints import crash_runs
from tests.places import FORKED


def started(target: Callable[..., None], *args: Any) -> Any:
    """Return a started process that runs `target`, quietly."""
    process = FORKED.Process(target=crash_runs.forked, args=(target, *args))
    process.start()
    return process


def exit_code(target: Callable[..., None], *args: Any) -> int:
    """Run `target` in a process and return how it ended: below 0, the number of the signal that killed it."""
    process = started(target, *args)
    process.join(900)  # In seconds: a hanging process is found, a busy machine is not taken for one.
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


def digest_of(folder: Path) -> dict[str, str]:
    """Return what the finished run in a folder has become."""
    return json.loads((folder / "digest.json").read_text())


@cache
def uninterrupted(kind: str) -> Path:
    """Return the folder of a run of a kind that was never stopped; read it alone."""
    folder = Path(mkdtemp())
    assert exit_code(crash_runs.finish, kind, folder) == 0
    return folder


@cache
def interrupted(kind: str) -> Path:
    """Return the folder of a run with two checkpoints, killed before it wrote the third; read it alone."""
    folder, third = Path(mkdtemp()), 9 if kind == "ppo" else 6
    assert exit_code(crash_runs.killed_while_saving, kind, folder, third, 1) == -signal.SIGKILL
    assert len(checkpoint_folders(folder)) == 2
    return folder


def resumed_equals_uninterrupted(kind: str, folder: Path) -> None:
    """Finish the run in `folder`, and compare it with one that was never stopped."""
    assert exit_code(crash_runs.finish, kind, folder) == 0
    whole, found = digest_of(uninterrupted(kind)), digest_of(folder)
    assert {"weights", "metrics", "step"} <= set(found)
    assert found == {part: whole[part] for part in found}


def copied(source: Path, target: Path) -> Path:
    """Copy a run's folder."""
    return Path(shutil.copytree(source, target, dirs_exist_ok=True))


def with_new_manifest(folder: Path) -> None:
    """Make the manifest fit what the folder holds now."""
    about = read_manifest(folder)
    write_manifest(folder, **{key: value for key, value in about.items() if key != "files"})


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file of a checkpoint, and the manifest with it."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with_new_manifest(path.parent)
