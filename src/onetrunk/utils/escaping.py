"""Text that others wrote (rows, names, answers of servers) stays text in a terminal, in Markdown and in an address."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from rich.console import Console

# A terminal acts on these; the last two ranges change the direction of the text behind them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def print_any_text() -> None:
    """Let stdout and stderr print what their encoding lacks (`PYTHONIOENCODING=ascii`) as `\\xe9`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """Return a text for a terminal: control characters, all but newline and tab, are written out, such as \\x1b."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def table_console() -> Console:
    """Return a console that prints texts in tables as they are: no markup, no emoji codes, no control characters."""
    from rich.console import Console

    class TableConsole(Console):
        def render_str(self, text: str, **settings: Any) -> Any:
            return super().render_str(printable(text), **{**settings, "markup": False, "emoji": False})

    return TableConsole()


def markdown_text(text: str) -> str:
    """Return a text as one line of Markdown, in which no link, picture, HTML or column of a table begins."""
    return re.sub(r"([\\\[\]|])", r"\\\1", " ".join(text.splitlines())).replace("<", "&lt;")


def address_of(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str:
    """Return the address of a file for a page in `folder`: relative, and quoted, so that no name becomes a scheme."""
    return quote(os.fsencode(os.path.relpath(path, folder)))
