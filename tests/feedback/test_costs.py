"""What judges cost: counters over runs and shards of a folder, prices, and a budget that is never passed.

The server counts what it was asked, and so what is paid: `billed`.
"""

import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from onetrunk.feedback.asking import Asker
from onetrunk.feedback.costs import BudgetReached, CostConfig, Costs, read_costs
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Judge, Pair, Principle, Usage, Verdict
from onetrunk.judges.judge_config import EnsembleJudge
from onetrunk.judges.server import ServerJudge, most_tokens
from onetrunk.servers.fleet import RetryPolicy
from onetrunk.utils.ledger import Ledger
from tests.feedback.runs import in_a_process
from tests.judges.stub_server import StubServer

PRICED = CostConfig(judge_prices={"served": [2.0, 10.0]}, judge_budget_usd=1.0)
# USD per million tokens of the server below, and a budget of about 80 questions.
PRICE, BUDGET = (10.0, 40.0), 0.25
PAIRS = [Pair(f"Prompt {i}", f"One {i}. {'word ' * (i % 50)}", f"Other {i}") for i in range(80)]
CONSTITUTION = Constitution("test", (Principle("Which is better?"),))
POLICY = RetryPolicy(max_calls=2, first_delay_s=0.001, max_delay_s=0.01, call_timeout_s=60)


class Served(Judge):
    """A judge behind a server, as far as costs see it."""

    is_remote = True

    def __init__(self, name="served"):
        self.name, self.identity = name, {"kind": "fake", "name": name}

    def _answer(self, items, principle, keep):
        for index in range(len(items)):
            self.usage.prompt_tokens += 300_000
            keep(index, Verdict(0.5))


def tokens_of(body):
    """Return what the server bills for a call."""
    return {"prompt_tokens": len(json.dumps(body["messages"])) // 3, "completion_tokens": body["max_tokens"] // 2}


def billed(stub):
    """Return what the server bills in USD, for every call that reached it."""
    tokens = [tokens_of(body) for body in stub.bodies]
    return sum(t["prompt_tokens"] * PRICE[0] + t["completion_tokens"] * PRICE[1] for t in tokens) / 1e6


def label(stub, folder, budget=BUDGET, concurrency=8, shard="", pairs=PAIRS):
    """Label the pairs in a folder as a run does."""
    judge = ServerJudge(stub.url, stub.model, max_concurrency=concurrency, policy=POLICY)
    costs = Costs(folder, [judge], CostConfig({stub.model: list(PRICE)}, budget))
    with Ledger(folder / f"ledger{shard}.db") as ledger:
        try:
            Asker(judge, CONSTITUTION, ledger, 1.0, costs=costs).labels(pairs)
        finally:
            costs.close()


@pytest.fixture
def stub():
    with StubServer() as server:
        server.usage_of = tokens_of
        yield server


@pytest.mark.parametrize("concurrency", [1, 64])
def test_a_budget_is_used_up_but_never_passed_and_repeats_of_a_spent_run_send_no_question(stub, tmp_path, concurrency):
    stub.latency_s = 0.002
    asked = []
    for _ in range(3):
        with pytest.raises(BudgetReached, match=r"cost \d.\d+ USD.*, the next question may cost 0.0\d+, and judge_b"):
            label(stub, tmp_path, concurrency=concurrency)
        asked.append(len(stub.bodies))
    trials = 2 + asked[2] - asked[0]  # Of the first run and the last; of the others, if there was room for it.
    assert trials <= 4
    # What is left has no room for one question at its largest possible cost.
    largest = max(most_tokens(body)[0] for body in stub.bodies) * PRICE[0] / 1e6 + 0.001
    costs = read_costs(tmp_path)["judge-1"]
    # A call whose end is not known, as after a connection that breaks on a busy machine, counts in full.
    unsettled = costs["unsettled_calls"]
    assert billed(stub) <= costs["usd"] + 1e-9 and BUDGET - largest < costs["usd"] <= BUDGET
    assert unsettled or costs["usd"] == pytest.approx(billed(stub))
    # The same command with a larger budget buys only what is missing.
    label(stub, tmp_path, budget=100)
    assert 2 * len(PAIRS) <= len(stub.bodies) - trials <= 2 * len(PAIRS) + unsettled


@pytest.mark.parametrize("form", [None, {"prompt_tokens": 10**400, "completion_tokens": True}], ids=["none", "giant"])
def test_a_server_that_reports_no_usable_usage_is_estimated_said_so_and_stops_at_the_budget(
    stub, tmp_path, form, caplog
):
    stub.usage_of = lambda body: form
    with pytest.raises(BudgetReached):
        label(stub, tmp_path, budget=0.2)
    assert 0.02 < billed(stub) <= 0.2
    counters = read_costs(tmp_path)["judge-1"]
    assert counters["estimated_calls"] == counters["calls"] == len(stub.bodies)
    assert [r.message for r in caplog.records if "does not report the tokens" in r.message]


def test_four_shards_with_64_calls_in_flight_each_keep_one_budget(stub, tmp_path):
    stub.latency_s = 0.002
    ends = []

    def shard(index):
        try:
            label(stub, tmp_path, concurrency=64, shard=f"-{index}", pairs=PAIRS[index::4])
        except BudgetReached as end:
            ends.append(end)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(shard, range(4)))
    assert len(ends) >= 2 and 0.5 * BUDGET < billed(stub) <= BUDGET  # Some may have had all their answers before.


def test_kills_at_random_moments_never_spend_more_than_the_budget(stub, tmp_path):
    def work():
        try:
            label(stub, tmp_path, concurrency=16)
        except BudgetReached:
            (tmp_path / "spent").touch()
            signal.pause()

    stub.latency_s, generator = 0.02, random.Random(2)
    for _ in range(3):
        due = len(stub.bodies) + generator.randint(1, 40)
        code = in_a_process(work, when=lambda due=due: len(stub.bodies) >= due or (tmp_path / "spent").exists())
        assert code == -signal.SIGKILL
    with pytest.raises(BudgetReached):
        label(stub, tmp_path)
    assert billed(stub) <= BUDGET
    # Calls in flight at a kill count in full, because they may be paid.
    counters = read_costs(tmp_path)["judge-1"]
    assert counters["unsettled_calls"] > 0 and billed(stub) < counters["usd"] <= BUDGET


@pytest.mark.parametrize(("fault", "stays"), [("reset", True), ("500", False)])
def test_a_call_that_may_be_paid_keeps_its_reservation_and_a_rejected_one_does_not(stub, tmp_path, fault, stays):
    stub.fault, stub.rate, stub.fails_on = fault, 1.0, lambda body: "Prompt 3" in str(body)
    label(stub, tmp_path, pairs=PAIRS[:8], budget=100)
    counters = read_costs(tmp_path)["judge-1"]
    failed = counters["failed_calls"]
    assert failed >= 2 and counters["unsettled_calls"] == (failed if stays else 0)


def test_the_runs_of_a_folder_add_up_and_a_later_price_counts_for_earlier_tokens(tmp_path):
    judge = Served()
    judge.usage.prompt_tokens += 5  # Before the run began.
    costs = Costs(tmp_path, [judge], CostConfig())
    judge.usage.add(Usage(calls=1, questions=1, prompt_tokens=100_000, completion_tokens=10_000))
    costs.save()
    assert "usd" not in read_costs(tmp_path)["served"]
    again = Costs(tmp_path, [Served()], PRICED)
    # 0.1 million tokens at 2 USD and 0.01 million at 10 USD.
    assert again.usd == pytest.approx(0.3)
    assert read_costs(tmp_path)["served"] == again.as_dict()["served"]
    assert again.as_dict()["served"]["questions"] == 1
    # Another judge in the same folder has the same budget.
    assert Costs(tmp_path, [Served("other")], CostConfig({"other": [1, 1]}, 1.0)).usd == pytest.approx(0.3)


def test_a_judge_of_the_users_own_stops_after_the_answer_that_passes_the_budget_and_is_not_asked_again(tmp_path):
    asked = []
    for _ in range(2):
        judge = Served()
        costs = Costs(tmp_path, [judge], PRICED)
        with Ledger(tmp_path / "ledger.db") as ledger, pytest.raises(BudgetReached):
            Asker(judge, CONSTITUTION, ledger, 1.0, costs=costs).labels(PAIRS)
        asked.append(judge.usage.prompt_tokens // 300_000)
    assert asked == [2, 0]  # 0.6 USD each.


def test_a_budget_needs_the_price_of_every_judge_on_a_server(tmp_path):
    both = EnsembleJudge([Served(), Served("other")])
    with pytest.raises(ValueError, match="no price of other; give one, or .0, 0. if it costs nothing"):
        Costs(tmp_path, [both], PRICED)
    free = CostConfig(judge_prices={"served": [2.0, 10.0], "other": [0, 0]}, judge_budget_usd=1.0)
    assert Costs(tmp_path, [both], free).usd == 0
