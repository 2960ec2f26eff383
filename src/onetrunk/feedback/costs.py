"""What judges cost over all runs in a folder: counters that survive a kill, prices, and a budget."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from onetrunk.judges.judge import Judge, Usage
from onetrunk.servers.errors import EndOfCalls
from onetrunk.utils.ledger import Database
from onetrunk.utils.options import option

COSTS_FILE = "ledger/costs.db"
# How long a process waits for the other shards; they hold the database for milliseconds.
WAIT_S = 300.0
# Seconds between two transactions without a budget.
SAVE_EVERY_S = 2.0
EXAMPLE = "{judge-model: [0.4, 1.6]}"
COUNTERS = [field.name for field in fields(Usage)]
# Per judge: its last known price, and its counters over all runs.
SELECT = (
    f"SELECT judge, prompt_price, completion_price, {', '.join(f'SUM({name})' for name in COUNTERS)}"
    " FROM usage LEFT JOIN prices USING (judge) GROUP BY judge"
)
# Without waiting for the disk: a transaction survives the kill of a process, though perhaps no power cut.
SETUP = (
    "PRAGMA synchronous = OFF;"
    " CREATE TABLE IF NOT EXISTS prices (judge PRIMARY KEY, prompt_price, completion_price);"
    f" CREATE TABLE IF NOT EXISTS usage (run, judge, {', '.join(COUNTERS)}, PRIMARY KEY (run, judge))"
)


@dataclass
class CostConfig:
    """What judges cost, and how much a run may spend."""

    judge_prices: dict[str, list[float]] | None = option(
        None,
        "USD per million tokens read, and per million written, by the name of a judge or its model:"
        f" {EXAMPLE}; as JSON on the command line. With it, costs are shown in USD.",
    )
    judge_budget_usd: float | None = option(
        None,
        "Most USD that judges may cost in this output_dir, over all its runs and shards, above 0; needs judge_prices."
        " A run stops before a question that might exceed it. All answers are kept: the same command with a larger"
        " budget continues.",
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
    """The budget has no room for the next question. Every answer is kept, also of calls that were in flight."""


class Costs:
    """What judges cost over all runs in a folder: counters that survive a kill, a price table, and a budget.

    The database is shared by all shards of the folder: it has a row for each judge of each run, which only that run
    writes. With a budget, a call to a server reserves its largest cost there before it is sent, until the cost of the
    call is known. A killed process, or a call without an answer, leaves its reservation: the call may have been paid.

    Raises:
        ValueError: a price of a judge that is not asked, or a budget without a price of a judge on a server.
    """

    def __init__(self, folder: Path, judges: Sequence[Judge], settings: CostConfig):
        self.budget_usd = settings.judge_budget_usd
        members = dict(chain.from_iterable(judge.members.items() for judge in judges))
        self._prices = _prices(settings.judge_prices or {}, members)
        unpriced = [name for name, member in members.items() if member.is_remote and name not in self._prices]
        if self.budget_usd is not None and unpriced:
            raise ValueError(
                f"judge_budget_usd is set and judge_prices has no price of {', '.join(unpriced)}; give one, or [0, 0]"
                " if it costs nothing"
            )
        self._run = secrets.token_hex(8)
        self._usages = {name: Usage() for name in members}
        for name, member in members.items():
            member.usage = self._usages[name]  # What was used before is not part of this run.
            if self.budget_usd is not None:
                member.usage.budget = partial(self.reserve, name)
        self._database = _open(folder)
        with self._database.writing() as database:
            prices = [(name, *price) for name, price in self._prices.items()]
            database.executemany("INSERT OR REPLACE INTO prices VALUES (?, ?, ?)", prices)
            self._write(database)

    def _write(self, database: sqlite3.Connection) -> None:
        """Write the counters of this run, and read the counters of all runs and shards."""
        rows = [(self._run, name, *astuple(usage)) for name, usage in self._usages.items()]
        database.executemany(f"INSERT OR REPLACE INTO usage VALUES (?, ?{', ?' * len(COUNTERS)})", rows)
        self._rows, self._saved = database.execute(SELECT).fetchall(), time.monotonic()

    @property
    def usd(self) -> float | None:
        """What all runs have cost in USD as of the last transaction, reservations included; None without a price."""
        known = [usd for _, _, usd in map(_parsed, self._rows) if usd is not None]
        return sum(known) if known else None

    def reserve(self, judge: str, prompt_tokens: int = 0, completion_tokens: int = 0) -> None:
        """Reserve the tokens of a call, which its judge releases; without tokens only check the budget.

        Raises:
            BudgetReached: there is no room for them.
        """
        if not prompt_tokens:
            self.check()
            return
        most = Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens).cost_usd(self._prices[judge])
        with self._database.writing() as database:
            self._write(database)
            has_room = self.usd + most <= self.budget_usd
            if has_room:
                self._usages[judge].hold(prompt_tokens, completion_tokens)
                self._write(database)
        if not has_room:
            raise self._reached(f", the next question may cost {most:.4f}")

    def check(self) -> None:
        """Raise BudgetReached if the budget is spent; without a budget only save from time to time."""
        if self.budget_usd is not None or time.monotonic() - self._saved >= SAVE_EVERY_S:
            self.save()
        if self.budget_usd is not None and self.usd >= self.budget_usd:
            raise self._reached()

    def _reached(self, question: str = "") -> BudgetReached:
        unsettled = self._sum().unsettled_calls
        at_most = f", with {unsettled} calls of unknown cost counted in full" if unsettled else ""
        return BudgetReached(
            f"the judges have cost {self.usd:.4f} USD{at_most}{question}, and judge_budget_usd is"
            f" {self.budget_usd:g}; all answers are kept: raise judge_budget_usd and run the same command again to"
            " continue"
        )

    def save(self) -> None:
        """Commit the counters, and read the counters of the other shards."""
        with self._database.writing() as database:
            self._write(database)

    def close(self) -> None:
        """Save, and close the file; the counters can still be read."""
        self.save()
        self._database.close()

    def _sum(self) -> Usage:
        total = Usage()
        for _, usage, _ in map(_parsed, self._rows):
            total.add(usage)
        return total

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the counters of all runs by judge as of the last transaction, with the price where it is known."""
        return _by_judge(self._rows)

    def shown(self) -> dict[str, str]:
        """Return tokens, failed calls and USD as of the last transaction, for a progress bar."""
        total = self._sum()
        values = {"tokens": f"{total.prompt_tokens + total.completion_tokens:,}"}
        if total.failed_calls:
            values["failed calls"] = str(total.failed_calls)
        return values | ({} if self.usd is None else {"usd": f"{self.usd:.4f}"})


def read_costs(folder: Path) -> dict[str, Any]:
    """Return the counters of an output folder by judge; none without its file."""
    if not (folder / COSTS_FILE).is_file():
        return {}
    with contextlib.closing(_open(folder)) as database:
        return _by_judge(database.rows(SELECT))


def _open(folder: Path) -> Database:
    return Database(folder / COSTS_FILE, WAIT_S, SETUP, "what was spent is forgotten")


def _parsed(row: tuple[Any, ...]) -> tuple[str, Usage, float | None]:
    """Return name, counters and USD of a row; None in place of USD without a price."""
    judge, *price = row[:3]
    usage = Usage(**dict(zip(COUNTERS, row[3:], strict=True)))
    return judge, usage, None if None in price else usage.cost_usd(price)


def _by_judge(rows: Sequence[tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    return {judge: usage.as_dict(usd) for judge, usage, usd in map(_parsed, rows)}


def _prices(prices: dict[str, list[float]], members: dict[str, Judge]) -> dict[str, list[float]]:
    """Return the prices by the names of the judges; `prices` may have the names of their models."""
    aliases = {name: (name, member.name, str(member.identity.get("model"))) for name, member in members.items()}
    unknown = sorted(set(prices) - set(chain.from_iterable(aliases.values())))
    if unknown:
        raise ValueError(f"judge_prices names {unknown[0]}; the judges of this run are {', '.join(members)}")
    by_name = {name: next((prices[a] for a in names if a in prices), None) for name, names in aliases.items()}
    return {name: price for name, price in by_name.items() if price is not None}


def _is_price(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number < float("inf")
