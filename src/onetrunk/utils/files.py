"""Files that are either whole or absent: atomic writes, checked reads, a usable output folder.

A write goes to a temporary file in the same folder, is fsynced, renamed over the target, and the folder is fsynced: a
process killed at any moment leaves the old file or the new one, never a piece. What it may leave behind is a hidden
`.<name>.<random>.tmp`, which no reader looks at. Knows nothing of what is inside a file.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


LONGEST_SHOWN = 300


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write; when the block ends well, it becomes `path`, durably.

    Args:
        path: the file to create or replace. Its folder is made where it is missing.

    Raises:
        OSError: the disk is full, the folder cannot be written, ...; `path` is then as it was before.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync(target.parent)


def delete_temporaries(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Delete the temporary files that killed writers left in a folder; the caller holds the folder's lock.

    Args:
        folder: its subfolders are not searched.
        name: only those of this file; None: of any.
    """
    pattern = "*" if name is None else glob.escape(name)
    for temporary in Path(folder).glob(f".{pattern}.{'[0-9a-f]' * 16}.tmp"):
        temporary.unlink(missing_ok=True)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path`: whole, or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 with the line ends it has: whole, or not at all."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write `data` as indented JSON, keys in the order given: whole, or not at all."""
    atomic_write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what a JSON file holds.

    Raises:
        RuntimeError: the file is missing, unreadable or damaged; the sentence names it.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise RuntimeError(f"{path} cannot be read ({error.strerror}); check the folder's name") from error
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"{path} is damaged or not JSON ({error}); restore it from an older copy") from error


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as safetensors: whole, or not at all. Tensors that share memory are stored one by one."""
    # Here and below: imported late, so that the command line answers `--help` without loading torch.
    from safetensors.torch import save

    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    # Not `save_file`: it makes the file unreadable to the group, whatever the umask says.
    atomic_write_bytes(path, save(copies))


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the named tensors of a safetensors file, on the CPU.

    Raises:
        RuntimeError: the file is missing, unreadable or damaged; the sentence names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except OSError as error:
        raise RuntimeError(f"{path} cannot be read ({error}); check the folder's name") from error
    except SafetensorError as error:
        raise RuntimeError(f"{path} is damaged or not safetensors ({error}); restore it from an older copy") from error


def require_output_dir(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a folder that exists and takes files; make it where it is missing.

    Raises:
        ValueError: there is a file in its place, or it is the root of the file system.
        RuntimeError: it cannot be made, or cannot be written to.
    """
    folder, shown = Path(path), str(path) if len(str(path)) <= LONGEST_SHOWN else f"{str(path)[:LONGEST_SHOWN]}..."
    if not os.fspath(path) or "\0" in str(path) or os.path.abspath(folder) == "/":
        raise ValueError(f"the output folder is {shown!r}; name a folder of the run's own")
    # A real write is the only true answer: permission bits say nothing to root or on a read-only mount.
    probe = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        if folder.is_symlink() and not folder.exists():
            raise RuntimeError(
                f"the output folder {shown} is a link that leads nowhere ({os.readlink(folder)}); delete it, or make"
                " what it leads to"
            )
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"the output folder {shown} is a file; name a folder, or move the file away")
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise RuntimeError(
            f"the output folder {shown} cannot be written ({error.strerror}); name another, or change its permissions"
        ) from error
    return folder


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


NAME = re.compile(r"[A-Za-z0-9._-]{1,96}")


def require_name(name: str, what: str) -> str:
    """Return a name that may become a part of a path.

    Args:
        name: given by a user, or read from a file.
        what: the setting or place that it comes from, for the error.

    Raises:
        ValueError: it is not 1 to 96 letters, digits and `._-`, or begins with two dots, or is a dot.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == "." or name.startswith(".."):
        shown = name[:100] if isinstance(name, str) else name
        raise ValueError(
            f"{what} is {shown!r}; a name has 1 to 96 of the characters A-Z a-z 0-9 . _ - and does not begin with '..'"
        )
    return name


def require_relative(text: str, folder: str | os.PathLike[str], what: str = "the path") -> str:
    """Return a path, or a pattern of paths, as it is written, if it stays below its folder; links are not looked at.

    Args:
        text: relative to `folder`.
        folder: which it may not leave.
        what: what names the path, for the error.

    Raises:
        ValueError: the path is empty, absolute, a URL, or holds `..`.
    """
    # A file written elsewhere may have the separators of Windows.
    parts = text.replace("\\", "/").split("/")
    if not text or "\0" in text or os.path.isabs(text) or parts[0] == "" or ".." in parts or parts[0].endswith(":"):
        raise ValueError(f"{what} is {text!r}; expected a path inside {folder}, without '..'")
    return text


def require_inside(path: str | os.PathLike[str], folder: str | os.PathLike[str], what: str = "the path") -> Path:
    """Return where a path that is named inside a file leads, links followed; it has to stay in its folder.

    Args:
        path: as it is written: relative to `folder`.
        folder: which it may not leave.
        what: what names the path, for the error.

    Raises:
        ValueError: the path is absolute, a URL, holds `..`, or a link on its way leads out of the folder.
    """
    text = require_relative(os.fspath(path), folder, what)
    root = Path(folder).resolve()
    found = (root / text).resolve()
    if not found.is_relative_to(root):
        raise ValueError(
            f"{what} is {text!r}, which a link leads to {found}, out of {folder}; put the file itself there"
        )
    return found
