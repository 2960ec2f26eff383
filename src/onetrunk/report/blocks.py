"""What a page shows, and the templates that make HTML and Markdown of it.

The templates escape everything that a run says (completions, names, settings): it cannot become part of the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from onetrunk.utils.redaction import markdown_text

# The files of a report, and their templates.
PAGE, MARKDOWN = "report.html", "report.md"


@dataclass(frozen=True)
class Figure:
    """A plot or a picture: an element of the page, and for Markdown the address of a PNG file."""

    title: str
    address: str
    element: Markup
    note: str = ""


@dataclass(frozen=True)
class Block:
    """A heading and what stands under it, in the order of the fields; what is empty is left out."""

    title: str = ""
    text: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    # Addresses (`address_of`) for the first column, by the text of the cell.
    links: Mapping[str, str] = field(default_factory=dict)
    # The title of each, and its explanation.
    alarms: Sequence[tuple[str, str]] = ()
    figures: Sequence[Figure] = ()
    # The prompt of each, and texts side by side: what each is, and the text.
    samples: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    blocks: Sequence[Block] = ()
    # A reader unfolds it.
    is_folded: bool = False


def rendered(name: str, title: str, blocks: Sequence[Block]) -> str:
    """Return the text of the file PAGE or MARKDOWN."""
    return _TEMPLATES.get_template(name).render(title=title, blocks=blocks)


def fenced(text: str) -> str:
    """Return a text in a fence that is longer than any in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


# The name of a template decides: HTML is escaped by itself, and in Markdown every value passes one of the filters.
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {"line": markdown_text, "fenced": fenced}
