"""What a folder holds, file by file: sizes and digests in a manifest that is written last, and the check against it.

A folder without a manifest was not written to its end. Knows nothing of what is inside a file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from onetrunk.utils.files import atomic_write_json, read_json

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK = 1 << 20
DIGEST = re.compile(r"[0-9a-f]{64}")


def write_manifest(folder: str | os.PathLike[str], **about: Any) -> dict[str, Any]:
    """Make every file below a folder durable, then write the manifest; return it.

    Args:
        folder: written to its end. Links in it are refused: what they point at could change.
        **about: what else the manifest says, in terms of JSON ("step", "run", ...).

    Raises:
        RuntimeError: there is a link.
        OSError: the disk is full, ...; there is no manifest then.
    """
    root = Path(folder)
    files: dict[str, dict[str, Any]] = {}
    for path in _walk(root):
        if path.is_symlink():
            raise RuntimeError(f"{path} is a link; a checkpoint holds files alone")
        if path.is_file() and path != root / MANIFEST:
            sync(path)
            files[path.relative_to(root).as_posix()] = {"size": path.stat().st_size, "sha256": digest(path)}
    for path in (*_walk(root), root):
        if path.is_dir():
            sync(path)
    manifest = {"format": FORMAT, **about, "files": files}
    atomic_write_json(root / MANIFEST, manifest)
    return manifest


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of a folder, its form checked.

    Raises:
        RuntimeError: it is missing, damaged, or names files outside the folder.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise RuntimeError(f"{MANIFEST}: missing, so the folder was not written to its end")
    try:
        content = read_json(path)
    except RuntimeError as error:
        raise RuntimeError(f"{MANIFEST}: {error}") from error
    return check_manifest(content)


def check_manifest(manifest: Any) -> dict[str, Any]:
    """Return what a manifest says, if it has the form of one; a manifest may come from elsewhere.

    Raises:
        RuntimeError: it has not, or names a file outside its folder.
    """
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise RuntimeError(f"{MANIFEST}: not a manifest, which is a mapping with files")
    if manifest.get("format") != FORMAT:
        raise RuntimeError(f"{MANIFEST}: format {manifest.get('format')!r}, and this version knows {FORMAT}")
    for name, entry in manifest["files"].items():
        parts = PurePosixPath(name)
        if not name or parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name:
            raise RuntimeError(f"{MANIFEST}: {name!r} is no name of a file in the folder")
        is_entry = isinstance(entry, dict) and type(entry.get("size")) is int and isinstance(entry.get("sha256"), str)
        if not is_entry or entry["size"] < 0 or not DIGEST.fullmatch(entry["sha256"]):
            raise RuntimeError(f"{MANIFEST}: the entry of {name} has no size and sha256")
    return manifest


def problems(folder: str | os.PathLike[str], **about: Any) -> list[str]:
    """Return what differs from the manifest, a phrase each; nothing for a whole folder.

    Args:
        folder: to be checked; every file is read.
        **about: what the manifest has to say besides ("step").
    """
    root = Path(folder)
    try:
        manifest = read_manifest(root)
    except RuntimeError as error:
        return [str(error)]
    found = [
        f"{MANIFEST}: written for {name} {manifest.get(name)!r}, expected {value!r}"
        for name, value in about.items()
        if manifest.get(name) != value
    ]
    for name, entry in manifest["files"].items():
        problem = _problem(root, name, entry)
        if problem:
            found.append(f"{name}: {problem}")
    return found


def digest(path: str | os.PathLike[str]) -> str:
    """Return the sha256 of a file, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: str | os.PathLike[str]) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _walk(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
