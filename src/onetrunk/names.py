"""Names from users, and paths made of them: neither may lead out of the folder they are meant for. Opens no file."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
