"""The parts of a report that one run has: alarms, what a stage measured, win rates, samples before and after."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from onetrunk.judges.labels import judge_warnings
from onetrunk.report.blocks import Block
from onetrunk.report.runs import PAIRS, Run, gain, pairs_of, read_lines

# Samples of each kind, and the longest text of one.
NUM_SAMPLES = 4
LONGEST_TEXT = 1500
SIDES = ("before", "after")
# A win rate at equal length that differs by this much from the plain one is reported.
NOTABLE_LENGTH_EFFECT = 0.1

logger = logging.getLogger(__name__)


def blocks_of(parts: Iterable[tuple[Path, Callable[[], Sequence[Block]]]]) -> list[Block]:
    """Return the blocks of all parts of a page, each given with the file or folder that it is made of.

    A part that cannot be made, because what it is made of is damaged, is one sentence, and the same warning.
    """
    blocks: list[Block] = []
    for source, make in parts:
        try:
            blocks += make()
        except OSError:  # The page cannot be written.
            raise
        except Exception as error:  # Files may hold anything, under every key.
            text = f"A part is left out: {source} is damaged ({type(error).__name__}: {error})."
            logger.warning(text)
            blocks.append(Block(text=text))
    return blocks


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


def win_rates(rate: dict[str, Any], title: str = "Win rate") -> Block:
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
    findings = [("the judge", text) for text in contest_findings(rate)]
    return Block(title, columns=[against, "value", "95% interval"], rows=rows, alarms=findings)


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
        f"win rate {won} against {rate['opponent']} on {rate['prompts']} prompts by the judge {rate['judge']}: its"
        f" mean probability of being the better one; counted, {counted}: {rate['wins']} wins, {rate['ties']} ties,"
        f" {rate['losses']} losses"
    ]
    at_equal_length = rate["length_controlled_win_rate"]
    if at_equal_length is not None and math.isfinite(at_equal_length):
        lines.append(f"at equal length the win rate would be {level}")
        if abs(at_equal_length - rate["win_rate"]) >= NOTABLE_LENGTH_EFFECT:
            difference = rate["mean_length_difference"]
            lines.append(
                f"length decides a part of it: the completions are {abs(difference):.0f} characters"
                f" {'longer' if difference > 0 else 'shorter'} on average, and the judge does not treat lengths alike"
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
    return [Block("The same prompts before and after", blocks=blocks)] if blocks else []


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
    """Return a share in percent, with its interval if that is known; nothing for what is no number."""
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
    titles = [f"{side}, score {number(row.get('score')) or 'none'}" for side, row in zip(SIDES, pair, strict=True)]
    texts = [plain(row.get("completion")) for row in pair]
    return plain(pair[0].get("prompt")), list(zip(titles, texts, strict=True))
