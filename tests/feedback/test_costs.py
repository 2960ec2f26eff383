"""What judges cost: counters over runs and shards of a folder, prices, and a budget."""

import json

import pytest

from onetrunk.feedback.costs import BudgetReached, CostConfig, Costs, read_costs
from onetrunk.judges.base import Judge, Verdict
from onetrunk.judges.load import EnsembleJudge

PRICED = CostConfig(judge_prices={"served": [2.0, 10.0]}, judge_budget_usd=1.0)


class Served(Judge):
    """A judge behind a server, as far as costs see it."""

    is_remote = True

    def __init__(self, name="served"):
        self.name, self.identity = name, {"kind": "fake", "name": name}

    def _answer(self, items, principle, keep):
        for index in range(len(items)):
            keep(index, Verdict(0.5))


def use(judge, prompt_tokens, completion_tokens):
    judge.usage.calls += 1
    judge.usage.questions += 1
    judge.usage.prompt_tokens += prompt_tokens
    judge.usage.completion_tokens += completion_tokens


def test_the_runs_of_a_folder_add_up_and_a_later_price_counts_for_earlier_tokens(tmp_path):
    judge = Served()
    use(judge, 5, 5)  # Before the run began.
    costs = Costs(tmp_path, [judge], CostConfig())
    use(judge, 100_000, 10_000)
    costs.save()
    assert "usd" not in read_costs(tmp_path)["served"]
    again = Costs(tmp_path, [Served()], PRICED)
    # 0.1 million tokens at 2 USD and 0.01 million at 10 USD.
    assert again.usd == pytest.approx(0.3)
    again.save()
    assert read_costs(tmp_path)["served"] == again.as_dict()["served"]
    assert again.as_dict()["served"]["questions"] == 1


def test_shards_that_run_at_the_same_time_lose_no_costs_and_share_the_budget(tmp_path):
    judges = [Served(), Served()]
    shards = [Costs(tmp_path, [judge], PRICED, f"-{i:05d}-of-00002") for i, judge in enumerate(judges)]
    for judge, costs in zip(judges, shards, strict=True):
        use(judge, 300_000, 0)
        costs.check()  # 0.6 USD each.
    for costs in shards:
        costs.save()
    total = read_costs(tmp_path)["served"]
    assert total["prompt_tokens"] == 600_000 and total["questions"] == 2
    assert total["usd"] == pytest.approx(1.2) and total["usd_per_1000_questions"] == pytest.approx(600)
    with pytest.raises(BudgetReached, match=r"have cost 1.2000 USD, and judge_budget_usd is 1"):
        shards[1].check()


def test_a_budget_needs_the_price_of_every_judge_on_a_server(tmp_path):
    both = EnsembleJudge([Served(), Served("other")])
    with pytest.raises(ValueError, match="no price of other; give one, or .0, 0. if it costs nothing"):
        Costs(tmp_path, [both], PRICED)
    free = CostConfig(judge_prices={"served": [2.0, 10.0], "other": [0, 0]}, judge_budget_usd=1.0)
    assert Costs(tmp_path, [both], free).usd == 0


def test_a_damaged_file_of_costs_is_named(tmp_path):
    (tmp_path / "_report").mkdir()
    (tmp_path / "_report/costs.json").write_text(json.dumps({"served": {"calls": 1}})[:-3])
    with pytest.raises(RuntimeError, match="costs.json"):
        Costs(tmp_path, [Served()], PRICED)
