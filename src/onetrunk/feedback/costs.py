"""What judges cost over all runs in a folder: counters that survive a kill, a price table, and a budget.

The counters are in `_report/costs.json`, apart from statistics and card: these are the same bytes however often a run
was stopped, and the costs are not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.judges.base import Judge
from onetrunk.judges.usage import Usage, usages_of
from onetrunk.utils.calls import EndOfCalls
from onetrunk.utils.files import atomic_write_json, read_json
from onetrunk.utils.options import option

COSTS = "_report/costs.json"
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

    Raises:
        ValueError: a price of a judge that is not asked, or a budget without a price of each judge on a server.
    """

    def __init__(self, folder: Path, judges: Sequence[Judge], settings: CostConfig):
        self.path, self.budget_usd = folder / COSTS, settings.judge_budget_usd
        self._usages: dict[str, Usage] = {}
        names: dict[str, tuple[str, ...]] = {}
        for judge in judges:
            self._usages |= usages_of(judge)
            for member, name in zip(getattr(judge, "judges", [judge]), usages_of(judge), strict=True):
                names[name] = (name, member.name, str(getattr(member, "identity", {}).get("model")))
        self._began = {name: usage.copy() for name, usage in self._usages.items()}
        stored = read_json(self.path) if self.path.is_file() else {}
        # The file also has what follows from the counters, for people.
        self._earlier = {name: Usage().add(values) for name, values in stored.items()}
        self.prices = _prices(settings.judge_prices or {}, names)
        self._written = time.monotonic()

    def totals(self) -> dict[str, Usage]:
        """Return the counters of all runs in the folder, by judge."""
        totals = {name: usage.copy() for name, usage in self._earlier.items()}
        for name, usage in self._usages.items():
            totals.setdefault(name, Usage()).add(usage.minus(self._began[name]))
        return totals

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
        """Write the counters of all runs."""
        self._written = time.monotonic()
        atomic_write_json(self.path, self.as_dict())

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the counters of all runs by judge, with the price where it is known."""
        return {name: usage.as_dict(self.prices.get(name)) for name, usage in self.totals().items()}

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
    """Return the counters in the file of an output folder; none without the file."""
    path = folder / COSTS
    return read_json(path) if path.is_file() else {}


def _prices(prices: dict[str, list[float]], names: dict[str, tuple[str, ...]]) -> dict[str, list[float]]:
    known = {alias for aliases in names.values() for alias in aliases}
    unknown = sorted(set(prices) - known)
    if unknown:
        raise ValueError(f"judge_prices names {unknown[0]}; the judges of this run are {', '.join(names)}")
    found = {name: [prices[alias] for alias in aliases if alias in prices] for name, aliases in names.items()}
    return {name: matches[0] for name, matches in found.items() if matches}


def _is_price(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number < float("inf")
