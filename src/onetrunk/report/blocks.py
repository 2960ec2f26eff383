"""What a page shows, the parts that pages share, and the templates that make HTML and Markdown of them.

The templates escape everything that a run says (completions, names, settings): it cannot become part of the page.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from onetrunk.judges.labels import judge_warnings
from onetrunk.report.runs import PAIRS, Run, gain, pairs_of, read_lines
from onetrunk.utils.redaction import markdown_text
from onetrunk.utils.sample_text import score_text, transcript_text

# The files of a report, and their templates.
PAGE, MARKDOWN = "report.html", "report.md"
# Samples of each kind, and the longest text of one.
NUM_SAMPLES = 4
LONGEST_TEXT = 1500
SIDES = ("before", "after")
SAMPLES_NOTE = (
    "Each side is one sample of every prompt. Some samples score higher or lower by chance, also where nothing was"
    " learned: whether the mean changed is in the verdict."
)
# A win rate at equal length that differs by this much from the plain one is reported.
NOTABLE_LENGTH_EFFECT = 0.1


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
    # The block is a verdict: good, mixed or bad.
    level: str = ""


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


def alarm_blocks(run: Run, title: str = "Alarms") -> list[Block]:
    """Return the alarms of a run, the worst first."""
    alarms = [
        (f"{a.name}, step {a.step}{', ended the run' if a.ended_run else ''}", a.text.rstrip(".") + ".")
        for a in run.alarms()
    ]
    return [Block(title, alarms=alarms)] if alarms else []


def result_blocks(run: Run) -> list[Block]:
    """Return what a stage measured at its end."""
    rest = dict(run.results)
    before, policy = (rest.pop(name, None) for name in ("reference", "policy"))
    rate = rest.get("win_rate")
    blocks: list[Block] = []
    if isinstance(rate, dict):
        blocks.append(win_rates(rate))
    if isinstance(policy, dict):
        before = before if isinstance(before, dict) else {}
        rows = [(name, before.get(name), value) for name, value in policy.items()]
        cells = [[name, number(first), number(last), _change(first, last)] for name, first, last in rows]
        blocks.append(Block("Held-out prompts", columns=["", "before", "after", "change"], rows=cells))
    return [*blocks, all_measured(rest, "All that the stage measured")] if rest else blocks


def all_measured(values: dict[str, Any], title: str) -> Block:
    """Return every value, folded."""
    rows = [[name, number(value)] for name, value in flat(values) if not isinstance(value, (list, dict))]
    return Block(title, columns=["", "value"], rows=rows, is_folded=True)


def win_rates(rate: dict[str, Any]) -> Block:
    """Return the win rates with their intervals."""
    rows = []
    for name in ("win_rate", "discrete_win_rate", "length_controlled_win_rate"):
        interval = rate.get("interval" if name == "win_rate" else f"{name}_interval") or [None, None]
        if rate.get(name) is not None:
            low, high = (share(end) or "?" for end in interval)
            rows.append([name.replace("_", " "), f"{rate[name]:.1%}", f"{low} to {high}"])
    rows.append(["wins, ties, losses", " / ".join(str(rate.get(k, "?")) for k in ("wins", "ties", "losses")), ""])
    rows += [[f"by the principle: {name}", share(value), ""] for name, value in rate.get("principles", {}).items()]
    against = f"against {rate.get('opponent', 'the opponent')}"
    said = "; ".join(contest_findings(rate))
    text = f"{said[:1].upper()}{said[1:]}." if said else ""
    return Block("Win rate", text=text, columns=[against, "value", "95% interval"], rows=rows)


def contest_findings(rate: dict[str, Any]) -> list[str]:
    """Return the win rate of an evaluation in words, and reasons to doubt it."""
    if "position" not in rate:
        return []
    won, counted, level = (
        share(rate[name], rate[interval])
        for name, interval in (
            ("win_rate", "interval"),
            ("discrete_win_rate", "discrete_win_rate_interval"),
            ("length_controlled_win_rate", "length_controlled_win_rate_interval"),
        )
    )
    lines = [
        f"win rate {won} against {rate['opponent']} on {rate['prompts']} prompts by the judge {rate['judge']} (its"
        f" mean probability of being better); by count, {counted}: {rate['wins']} wins, {rate['ties']} ties,"
        f" {rate['losses']} losses"
    ]
    at_equal_length = rate["length_controlled_win_rate"]
    if at_equal_length is not None and math.isfinite(at_equal_length):
        lines.append(f"at equal length the win rate would be {level}")
        if abs(at_equal_length - rate["win_rate"]) >= NOTABLE_LENGTH_EFFECT:
            difference = rate["mean_length_difference"]
            lines.append(
                f"length explains a part of it: the completions are {abs(difference):.0f} characters"
                f" {'longer' if difference > 0 else 'shorter'} on average, and the judge depends on length"
            )
    if rate["is_extrapolated"]:
        lines.append(
            "one side is the longer one in more than four of five pairs: the win rate at equal length is extrapolated,"
            " and mostly too high for the shorter side"
        )
    lines += judge_warnings(rate["position"])
    if rate["unjudged"]:
        lines.append(f"{rate['unjudged']} pairs have no verdict yet; the same command asks for them again")
    return lines


def sample_blocks(run: Run) -> list[Block]:
    """Return completions before and after: the largest gains, the largest losses, and random ones."""
    pairs = pairs_of(run)
    scored = sorted((pair for pair in pairs if gain(pair) is not None), key=gain)
    losses = [pair for pair in scored[:NUM_SAMPLES] if gain(pair) < 0]
    gains = [pair for pair in reversed(scored[-NUM_SAMPLES:]) if gain(pair) > 0]
    # The same ones every time.
    drawn = random.Random(0).sample(pairs, min(NUM_SAMPLES, len(pairs)))
    kinds = (("Random ones", drawn), ("The largest gains", gains), ("The largest losses", losses))
    blocks = [Block(title, samples=list(map(_sample, chosen))) for title, chosen in kinds if chosen]
    return [Block("The same prompts before and after", text=SAMPLES_NOTE, blocks=blocks)] if blocks else []


def lost_blocks(run: Run) -> list[Block]:
    """Return the pairs of an evaluation that a judge gives to the opponent most clearly."""
    lost = [row for row in read_lines(run.folder / PAIRS) if row.get("outcome") == "loss"]
    samples = [
        (plain(row["prompt"]), [("the opponent", plain(row["opponent"])), ("the model", plain(row["policy"]))])
        for row in sorted(lost, key=lambda row: row["probability"])[:NUM_SAMPLES]
    ]
    return [Block("The clearest losses before the judge", samples=samples)] if samples else []


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested mappings as names with slashes."""
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        pairs += flat(value, f"{prefix}{name}/") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return pairs


def number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def share(value: Any, interval: Any = None) -> str:
    """Return a share in percent, with its interval if that is known; nothing for what is not a number."""
    if not isinstance(value, (int, float)):
        return ""
    low, high = interval if interval and None not in interval else (None, None)
    return f"{value:.1%}" + (f" ({low:.1%} to {high:.1%})" if low is not None else "")


def plain(text: Any) -> str:
    """Return a prompt or a completion as one text, the end of a long one left out."""
    if isinstance(text, list):
        text = "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in text)
    text = str(text)
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ..."


def _change(before: Any, after: Any) -> str:
    return f"{after - before:+.4g}" if all(isinstance(x, (int, float)) for x in (before, after)) else ""


def _sample(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    scores = [score_text(number(row.get("score")) or "none", row) for row in pair]
    titles = [f"{side}, score {score}" for side, score in zip(SIDES, scores, strict=True)]
    episodes = [row.get("transcript") for row in pair]
    texts = [plain(transcript_text(e) if e else row.get("completion")) for e, row in zip(episodes, pair, strict=True)]
    return plain(pair[0].get("prompt")), list(zip(titles, texts, strict=True))
