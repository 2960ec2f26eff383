"""What judges cost over all runs in a folder: counters that survive a kill, a price table, and a budget.

The counters are in `_report/costs.json`, apart from statistics and card: these are the same bytes however often a run
was stopped, and the costs are not. Each shard has a file of its own, because shards run at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.judges.base import Judge
from onetrunk.judges.usage import Usage, usages_of
from onetrunk.utils.calls import EndOfCalls
from onetrunk.utils.files import atomic_write_json, read_json
from onetrunk.utils.options import option

FOLDER, FILES = "_report", "costs*.json"
# Seconds between two writes of the file while judges answer.
SAVE_EVERY_S = 2.0
EXAMPLE = "{judge-model: [0.4, 1.6]}"


@dataclass
class CostConfig:
    """What judges cost, and how much a run may spend."""

    judge_prices: dict[str, list[float]] | None = option(
        None,
        "USD per million tokens that a judge reads, and that it writes, by the judge's or model's name:"
        f" {EXAMPLE}; as JSON on the command line. With it, costs are shown in USD.",
    )
    judge_budget_usd: float | None = option(
        None,
        "Stop when the judges' calls have cost this much in this output_dir, over all its runs, above 0; needs"
        " judge_prices. All answers are kept: the same command with a larger budget continues.",
    )

    def __post_init__(self) -> None:
        for name, price in (self.judge_prices or {}).items():
            is_pair = isinstance(price, (list, tuple)) and len(price) == 2
            if not is_pair or not all(_is_price(number) for number in price):
                raise ValueError(
                    f"judge_prices gives {name} the price {price!r}; expected two numbers of 0 or more, USD per"
                    f" million tokens read and written, such as {EXAMPLE}"
                )
        if self.judge_budget_usd is None:
            return
        if not self.judge_budget_usd > 0:
            raise ValueError(f"judge_budget_usd is {self.judge_budget_usd}; set an amount above 0, or leave it out")
        if not self.judge_prices:
            raise ValueError(
                f"judge_budget_usd is set and judge_prices is not, so nothing has a price; give one, such as {EXAMPLE}"
            )


class BudgetReached(EndOfCalls):
    """The budget is spent. Every answer is kept, also of calls that were in flight."""


class Costs:
    """The counters of the judges of a folder.

    Args:
        folder: the output folder; its file is read, and written with the counters of this run added.
        judges: those that are asked; None: no judge is asked, and only the file counts.
        settings: prices and budget.
        suffix: of the file's name, for a shard.

    Raises:
        ValueError: a price of a judge that is not asked, or a budget without a price of a judge on a server.
    """

    def __init__(self, folder: Path, judges: Sequence[Judge], settings: CostConfig, suffix: str = ""):
        self.path, self.budget_usd = folder / FOLDER / f"costs{suffix}.json", settings.judge_budget_usd
        self._usages: dict[str, Usage] = {}
        names: dict[str, tuple[str, ...]] = {}
        remote = []
        for judge in judges:
            self._usages |= usages_of(judge)
            for member, name in zip(getattr(judge, "judges", [judge]), usages_of(judge), strict=True):
                names[name] = (name, member.name, str(getattr(member, "identity", {}).get("model")))
                remote += [name] if getattr(member, "is_remote", False) else []
        self.prices = _prices(settings.judge_prices or {}, names)
        unpriced = [name for name in remote if name not in self.prices]
        if self.budget_usd is not None and unpriced:
            raise ValueError(
                f"judge_budget_usd is set and judge_prices has no price of {', '.join(unpriced)}; give one, or [0, 0]"
                " if it costs nothing"
            )
        self._began = {name: usage.copy() for name, usage in self._usages.items()}
        self._earlier = _counters([self.path] if self.path.is_file() else [])
        self._read_others()

    def totals(self) -> dict[str, Usage]:
        """Return the counters of all runs in the folder, by judge; those of other shards as of the last `save`."""
        totals = self._own()
        for name, usage in self._others.items():
            totals.setdefault(name, Usage()).add(usage)
        return totals

    def _own(self) -> dict[str, Usage]:
        """Return the counters of this run, and of the earlier ones in its file."""
        own = {name: usage.copy() for name, usage in self._earlier.items()}
        for name, usage in self._usages.items():
            own.setdefault(name, Usage()).add(usage.minus(self._began[name]))
        return own

    def _read_others(self) -> None:
        self._others = _counters(path for path in self.path.parent.glob(FILES) if path != self.path)
        self._written = time.monotonic()

    @property
    def usd(self) -> float | None:
        """What all runs have cost in USD, without judges that have no price; None without prices."""
        if not self.prices:
            return None
        totals = self.totals()
        return sum(totals[name].cost_usd(price) for name, price in self.prices.items() if name in totals)

    def check(self) -> None:
        """Write the file from time to time.

        Raises:
            BudgetReached: the budget is spent.
        """
        if time.monotonic() - self._written >= SAVE_EVERY_S:
            self.save()
        if self.budget_usd is not None and self.usd >= self.budget_usd:
            self.save()
            raise BudgetReached(
                f"the judges have cost {self.usd:.4f} USD, and judge_budget_usd is {self.budget_usd:g}; all answers"
                " are kept: raise judge_budget_usd and run the same command again to continue"
            )

    def save(self) -> None:
        """Write the counters of the runs of this shard, and read those of the others."""
        atomic_write_json(self.path, self._shown(self._own()))
        self._read_others()

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the counters of all runs by judge, with the price where it is known."""
        return self._shown(self.totals())

    def _shown(self, usages: dict[str, Usage]) -> dict[str, dict[str, Any]]:
        usd = {name: usages[name].cost_usd(price) for name, price in self.prices.items() if name in usages}
        return {name: usage.as_dict(usd.get(name)) for name, usage in usages.items()}

    def shown(self) -> dict[str, str]:
        """Return tokens, failed calls and USD so far, for a progress bar."""
        total = Usage()
        for usage in self.totals().values():
            total.add(usage)
        values = {"tokens": f"{total.prompt_tokens + total.completion_tokens:,}"}
        if total.failed_calls:
            values["failed calls"] = str(total.failed_calls)
        return values | ({} if self.usd is None else {"usd": f"{self.usd:.4f}"})


def read_costs(folder: Path) -> dict[str, Any]:
    """Return the counters in the files of an output folder; none without a file."""
    paths = sorted((folder / FOLDER).glob(FILES))
    usd: dict[str, float] = {}
    for values in map(read_json, paths):
        for name, counters in values.items():
            if "usd" in counters:
                usd[name] = usd.get(name, 0.0) + counters["usd"]
    return {name: usage.as_dict(usd.get(name)) for name, usage in _counters(paths).items()}


def _counters(paths: Iterable[Path]) -> dict[str, Usage]:
    """Return the sums of the counters in files. These also hold what follows from the counters, for people."""
    sums: dict[str, Usage] = {}
    for path in paths:
        for name, values in read_json(path).items():
            sums.setdefault(name, Usage()).add(values)
    return sums


def _prices(prices: dict[str, list[float]], names: dict[str, tuple[str, ...]]) -> dict[str, list[float]]:
    known = {alias for aliases in names.values() for alias in aliases}
    unknown = sorted(set(prices) - known)
    if unknown:
        raise ValueError(f"judge_prices names {unknown[0]}; the judges of this run are {', '.join(names)}")
    found = {name: [prices[alias] for alias in aliases if alias in prices] for name, aliases in names.items()}
    return {name: matches[0] for name, matches in found.items() if matches}


def _is_price(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number < float("inf")
