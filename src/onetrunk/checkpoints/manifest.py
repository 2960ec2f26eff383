"""Manifests: the size and sha256 of each file in a folder, written last, and the check of a folder against them.

A folder without a manifest is incomplete.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from onetrunk.utils.files import atomic_write_json, read_json, sync

MANIFEST = "manifest.json"
FORMAT = 1
DIGEST = re.compile(r"[0-9a-f]{64}")


def write_manifest(folder: str | os.PathLike[str], **about: Any) -> dict[str, Any]:
    """Sync every file in a complete folder and its subfolders to disk, then write the manifest and return it.

    Args:
        folder: holds no links, because what they point to could change.
        **about: more entries of the manifest ("step", "run"), as JSON values.

    Raises:
        RuntimeError: there is a link.
        OSError: for example because the disk is full; there is no manifest then.
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
            files[path.relative_to(root).as_posix()] = {"size": path.stat().st_size, "sha256": digest(path)}
    manifest = {"format": FORMAT, **about, "files": files}
    atomic_write_json(root / MANIFEST, manifest)
    return manifest


def read_manifest(folder: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """Return the manifest of a folder after checking its format, and its step unless that is None.

    Raises:
        RuntimeError: the manifest is missing, damaged, of another step, or names files outside the folder.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise RuntimeError(f"{MANIFEST}: missing, so the folder was not written to its end")
    try:
        content = read_json(path)
    except RuntimeError as error:
        raise RuntimeError(f"{MANIFEST}: {error}") from error
    return check_manifest(content, step)


def check_manifest(manifest: Any, step: int | None) -> dict[str, Any]:
    """Return a manifest, which may come from an untrusted place; checks and raises as `read_manifest`."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise RuntimeError(f"{MANIFEST}: not a manifest, which is a mapping with files")
    if manifest.get("format") != FORMAT:
        raise RuntimeError(f"{MANIFEST}: format {manifest.get('format')!r}, but this version reads format {FORMAT}")
    if step is not None and manifest.get("step") != step:
        raise RuntimeError(f"{MANIFEST}: written for step {manifest.get('step')!r}, expected {step}")
    for name, entry in manifest["files"].items():
        path = PurePosixPath(name)
        is_inside = path.name and not path.is_absolute() and ".." not in path.parts
        if not is_inside or str(path) != name or {"\\", "\0"} & set(name):
            raise RuntimeError(f"{MANIFEST}: {name!r} is no name of a file in the folder")
        if any(str(parent) in manifest["files"] for parent in path.parents):
            raise RuntimeError(f"{MANIFEST}: {name!r} can't be a file of a checkpoint, it is inside another file")
        is_entry = isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)
        if not is_entry or entry["size"] < 0 or not DIGEST.fullmatch(entry["sha256"]):
            raise RuntimeError(f"{MANIFEST}: the entry of {name} has no size and sha256")
    return manifest


def problems(folder: str | os.PathLike[str], step: int | None = None) -> list[str]:
    """Return how a folder differs from its manifest, as phrases; an empty list if it is whole. Reads every file.

    Unless `step` is None, the manifest must name that step.
    """
    root = Path(folder)
    try:
        files = read_manifest(root, step)["files"]
    except RuntimeError as error:
        return [str(error)]
    found = ((name, _problem(root, name, entry)) for name, entry in files.items())
    return [f"{name}: {problem}" for name, problem in found if problem]


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
        return None if digest(path) == entry["sha256"] else "other bytes than were written (sha256 differs)"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def digest(path: str | os.PathLike[str]) -> str:
    """Return the sha256 of a file, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
