"""The parts of a report that one run has: alarms, what a stage measured, win rates, samples before and after."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from onetrunk.report.blocks import Block, Facts, Folded, Heading, Sample, Text, Warned
from onetrunk.report.runs import Run, gain, pairs_of

# Samples of each kind, and the longest text of one.
NUM_SAMPLES = 4
LONGEST_TEXT = 1500
SIDES = ("before", "after")

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
            blocks.append(Text(text, is_faint=True))
    return blocks


def alarm_blocks(run: Run, title: str = "Alarms") -> list[Block]:
    """Return the alarms of a run, the worst first."""
    alarms = run.alarms()
    if not alarms:
        return []
    warned = [
        Warned(f"{a.name}, step {a.step}{', ended the run' if a.ended_run else ''}", a.text.rstrip(".") + ".")
        for a in alarms
    ]
    return [Heading(2, title), *warned]


def result_blocks(run: Run) -> list[Block]:
    """Return what a stage measured at its end."""
    results = run.results
    reference, policy = results.get("reference"), results.get("policy")
    blocks: list[Block] = []
    rate = results.get("win_rate")
    if isinstance(rate, dict):
        blocks += [Heading(2, "Win rate"), win_rates(rate)]
    if isinstance(policy, dict):
        before = reference if isinstance(reference, dict) else {}
        rows = [
            [name, number(before.get(name)), number(value), _change(before.get(name), value)]
            for name, value in policy.items()
        ]
        blocks += [Heading(2, "Held-out prompts"), Facts(["", "before", "after", "change"], rows)]
    rest = {name: value for name, value in results.items() if name not in ("reference", "policy", "win_rate")}
    if rest:
        rows = [[name, number(value)] for name, value in flat(rest) if not isinstance(value, (list, dict))]
        blocks.append(Folded("All that the stage measured", [Facts(["", "value"], rows)]))
    return blocks


def win_rates(rate: dict[str, Any]) -> Facts:
    """Return the win rates with their intervals."""
    rows = []
    for name in ("win_rate", "discrete_win_rate", "length_controlled_win_rate"):
        interval = rate.get("interval" if name == "win_rate" else f"{name}_interval") or [None, None]
        if rate.get(name) is not None:
            low, high = (f"{end:.1%}" if isinstance(end, float) else "?" for end in interval)
            rows.append([name.replace("_", " "), f"{rate[name]:.1%}", f"{low} to {high}"])
    rows.append(["wins, ties, losses", " / ".join(str(rate.get(k, "?")) for k in ("wins", "ties", "losses")), ""])
    return Facts([f"against {rate.get('opponent', 'the opponent')}", "value", "95% interval"], rows)


def sample_blocks(run: Run) -> list[Block]:
    """Return completions before and after: the largest gains, the largest losses, and random ones."""
    pairs = pairs_of(run)
    if not pairs:
        return []
    scored = sorted((pair for pair in pairs if gain(pair) is not None), key=gain)
    losses = [pair for pair in scored[:NUM_SAMPLES] if gain(pair) < 0]
    gains = [pair for pair in reversed(scored[-NUM_SAMPLES:]) if gain(pair) > 0]
    # The same ones every time.
    drawn = random.Random(0).sample(pairs, min(NUM_SAMPLES, len(pairs)))
    blocks: list[Block] = [Heading(2, "The same prompts before and after")]
    for title, chosen in (("Random ones", drawn), ("The largest gains", gains), ("The largest losses", losses)):
        if chosen:
            blocks += [Heading(3, title), *map(_sample, chosen)]
    return blocks


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested mappings as names with slashes."""
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        pairs += flat(value, f"{prefix}{name}/") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return pairs


def number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _change(before: Any, after: Any) -> str:
    return f"{after - before:+.4g}" if all(isinstance(x, (int, float)) for x in (before, after)) else ""


def _sample(pair: tuple[dict[str, Any], dict[str, Any]]) -> Sample:
    titles = [f"{side}, score {number(row.get('score')) or 'none'}" for side, row in zip(SIDES, pair, strict=True)]
    texts = [_plain(row.get("completion")) for row in pair]
    return Sample(_plain(pair[0].get("prompt")), list(zip(titles, texts, strict=True)))


def _plain(text: Any) -> str:
    if isinstance(text, list):
        text = "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in text)
    text = str(text)
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ..."
