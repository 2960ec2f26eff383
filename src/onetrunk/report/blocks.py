"""The parts of a report, and how each becomes HTML and Markdown.

Everything that a run says (completions, names, settings) is escaped: a completion cannot become part of the page.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onetrunk.utils.escaping import markdown_text

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1f2329; --faint: #5c6470; --line: #d8dce2; --box: #f5f6f8;
  --bad: #c01c28; --good: #1a7f37; --link: #0b5fc5; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --ink: #e4e7eb; --faint: #9aa3af; --line: #333a44;
  --box: #1d222a; --bad: #ff7b72; --good: #56d364; --link: #79b8ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 16px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6em; margin: .2em 0; } h2 { margin: 1.6em 0 .4em; border-bottom: 1px solid var(--line); }
h3 { margin: 1em 0 .3em; font-size: 1.05em; } a { color: var(--link); } .faint { color: var(--faint); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .93em; }
th, td { text-align: left; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 18px; }
figure { margin: 0; } figcaption { font-weight: 600; }
figure p { margin: 2px 0; font-size: .88em; color: var(--faint); }
svg { width: 100%; height: auto; max-width: 620px; } svg text { font-family: system-ui, sans-serif !important; }
img { max-width: 100%; background: #fff; }
.sample { border: 1px solid var(--line); border-radius: 6px; padding: 8px 12px; margin: 10px 0;
  background: var(--box); }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 280px), 1fr)); gap: 12px; }
pre { white-space: pre-wrap; margin: 4px 0; font: 13px/1.45 ui-monospace, monospace; }
.alarm { border-left: 4px solid var(--bad); padding: 2px 12px; margin: 10px 0; }
details { margin: 10px 0; } summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Heading:
    """A heading of level 1, 2 or 3."""

    level: int
    text: str

    def as_html(self) -> str:
        return f"<h{self.level}>{html.escape(self.text)}</h{self.level}>"

    def as_markdown(self) -> str:
        return f"{'#' * self.level} {markdown_text(self.text)}"


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    is_faint: bool = False

    def as_html(self) -> str:
        kind = ' class="faint"' if self.is_faint else ""
        return f"<p{kind}>{html.escape(self.text)}</p>"

    def as_markdown(self) -> str:
        return markdown_text(self.text)


@dataclass(frozen=True)
class Facts:
    """A table. Cells are text; `links` are the addresses (`address_of`) of cells of the first column, by text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    links: tuple[tuple[str, str], ...] = ()

    def as_html(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        links = dict(self.links)
        rows = []
        for row in self.rows:
            cells = [html.escape(cell).replace("\n", "<br>") for cell in row]
            if row[0] in links:
                cells[0] = f'<a href="{html.escape(links[row[0]], quote=True)}">{cells[0]}</a>'
            rows.append("".join(f"<td>{cell}</td>" for cell in cells))
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def as_markdown(self) -> str:
        lines = [f"| {' | '.join(map(markdown_text, self.columns))} |", "|---" * len(self.columns) + "|"]
        return "\n".join([*lines, *(f"| {' | '.join(map(markdown_text, row))} |" for row in self.rows)])


@dataclass(frozen=True)
class Figure:
    """A plot: an SVG element for the page, and the PNG file next to it for Markdown."""

    name: str
    title: str
    note: str
    svg: str

    def as_html(self) -> str:
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        return f"<figure><figcaption>{html.escape(self.title)}</figcaption>{self.svg}{note}</figure>"

    def as_markdown(self) -> str:
        return f"### {self.title}\n\n![{self.title}]({self.name}.png)\n\n{self.note}".rstrip()


@dataclass(frozen=True)
class Image:
    """A picture that the stage has drawn."""

    path: Path
    address: str

    def as_html(self) -> str:
        data = base64.b64encode(self.path.read_bytes()).decode()
        name = html.escape(self.path.stem)
        return f'<figure><figcaption>{name}</figcaption><img alt="{name}" src="data:image/png;base64,{data}"></figure>'

    def as_markdown(self) -> str:
        return f"![{markdown_text(self.path.stem)}]({self.address})"


@dataclass(frozen=True)
class Plots:
    """Plots and pictures next to each other, as many as the width has room for."""

    parts: Sequence[Figure | Image]

    def as_html(self) -> str:
        return f'<div class="plots">{"".join(part.as_html() for part in self.parts)}</div>'

    def as_markdown(self) -> str:
        return "\n\n".join(part.as_markdown() for part in self.parts)


@dataclass(frozen=True)
class Sample:
    """The completions of one prompt, side by side."""

    prompt: str
    sides: Sequence[tuple[str, str]]  # What it is, and the text.

    def as_html(self) -> str:
        sides = "".join(
            f'<div><span class="faint">{html.escape(name)}</span><pre>{html.escape(text)}</pre></div>'
            for name, text in self.sides
        )
        return f'<div class="sample"><pre>{html.escape(self.prompt)}</pre><div class="sides">{sides}</div></div>'

    def as_markdown(self) -> str:
        parts = [("prompt", self.prompt), *self.sides]
        return "\n\n".join(f"{markdown_text(name)}:\n\n{fenced(text)}" for name, text in parts)


@dataclass(frozen=True)
class Warned:
    """An alarm with its explanation."""

    title: str
    text: str

    def as_html(self) -> str:
        return f'<div class="alarm"><strong>{html.escape(self.title)}</strong><br>{html.escape(self.text)}</div>'

    def as_markdown(self) -> str:
        return f"- **{markdown_text(self.title)}**: {markdown_text(self.text)}"


@dataclass(frozen=True)
class Folded:
    """Blocks that a reader unfolds."""

    title: str
    blocks: Sequence[Block]

    def as_html(self) -> str:
        inside = "".join(block.as_html() for block in self.blocks)
        return f"<details><summary>{html.escape(self.title)}</summary>{inside}</details>"

    def as_markdown(self) -> str:
        return "\n\n".join([f"### {markdown_text(self.title)}", *(block.as_markdown() for block in self.blocks)])


Block = Heading | Text | Facts | Plots | Sample | Warned | Folded


def page(title: str, blocks: Sequence[Block]) -> str:
    """Return a whole HTML page; nothing in it is loaded from elsewhere."""
    body = "\n".join(block.as_html() for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # No script, no font and no picture from anywhere.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
        ' img-src data:">\n'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title>\n<style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def markdown(blocks: Sequence[Block]) -> str:
    return "\n\n".join(block.as_markdown() for block in blocks) + "\n"


def fenced(text: str) -> str:
    """Return a text in a fence that is longer than any in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
