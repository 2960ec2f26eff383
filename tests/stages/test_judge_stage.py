"""`onetrunk judge`: figures worked out by hand, known biased judges exposed, and the verb from start to end."""

import itertools
import json
import math
import random

import pytest

from onetrunk import cli
from onetrunk.data.pairs import Group
from onetrunk.judges.labels import PairLabel
from onetrunk.stages.judge import Judged, agreement, findings, judge_metrics, wilson_interval
from tests.judges.stub_server import StubServer
from tests.stages.small_runs import error_of, read_rows, write_rows
from tests.stages.small_runs import metrics as read_metrics

LENGTHS = """
def longer(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def right(prompts, completions, **columns):
    return [float("right" in text) for text in completions]
"""
CONSTITUTION = """
name: named
principles:
  - text: Which completion is longer?
    tags: [longer, right]
"""


def label(*orders, consistent=True):
    """Return the label of one principle that answered P(first better) in both orders."""
    return PairLabel(sum(orders) / len(orders), consistent, (("p", tuple(orders)),))


NUMBERS = itertools.count()


def row(probability_orders, better="a" * 8, other="b" * 4, people=1.0, subset="all", prompt=None):
    prompt = f"prompt {next(NUMBERS)}" if prompt is None else prompt
    return Judged(Group(prompt, (better, other), 1, people, subset=subset), (label(*probability_orders),))


def test_wilson_interval_is_that_of_the_textbook():
    # Wilson 1927 by hand for 8 of 10 at z = 1.95996: (.8 + .19207) / 1.38415 +- 1.41603 * sqrt(.016 + .009604) ...
    low, high = wilson_interval(8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 5)[0] == 0 and wilson_interval(5, 5)[1] == 1
    assert all(map(math.isnan, wilson_interval(0, 0)))


def test_rows_of_one_prompt_do_not_narrow_an_interval():
    metrics = judge_metrics([row((0.9, 0.9) if i < 8 else (0.1, 0.1), prompt=f"p{i}") for i in range(10)] * 6)
    assert metrics["accuracy"] == 0.8 and metrics["accuracy_interval"] == list(wilson_interval(8, 10))


def test_accuracy_and_consistency_by_hand():
    rows = [row((0.9, 0.7)), row((0.9, 0.3)), row((0.5, 0.5)), row((0.2, 0.1)), row((0.9, 0.9), people=0.5)]
    rows[1] = Judged(rows[1].group, (label(0.9, 0.3, consistent=False),))
    metrics = judge_metrics(rows)
    # Right, right (mean .6, but contradictory), a tie, wrong; the last row is a tie of the people.
    assert metrics["accuracy"] == (1 + 1 + 0.5 + 0) / 4
    assert metrics["consistent_accuracy"] == 1 / 4
    assert metrics["rows"] == 5 and metrics["equal_for_people"] == 1 and metrics["ties"] == 1


def test_the_best_of_four_is_right_only_above_all_others_and_shares_a_tie():
    group = Group("p", ("best", "x", "y", "z"), 1)
    right = Judged(group, (label(0.9, 0.9), label(0.6, 0.6), label(0.7, 0.7)))
    tied = Judged(group, (label(0.9, 0.9), label(0.5, 0.5), label(0.5, 0.5)))
    wrong = Judged(group, (label(0.9, 0.9), label(0.4, 0.4), label(0.9, 0.9)))
    assert [r.score for r in (right, tied, wrong)] == [1, 1 / 3, 0]


def test_a_row_without_an_answer_is_not_counted_as_wrong():
    missing = Judged(Group("p", ("a", "b"), 1), (PairLabel(None, False, (("p", (0.9, None)),), errors=("server",)),))
    silent = Judged(Group("p", ("a", "b"), 1), (PairLabel(None, False, (("p", (None, None)),), abstentions=("", "")),))
    metrics = judge_metrics([row((0.9, 0.9)), missing, silent])
    assert (metrics["accuracy"], metrics["decided"]) == (1.0, 1)
    assert (metrics["unjudged"], metrics["abstained"]) == (1, 1)


def test_a_judge_of_length_is_exposed_and_a_fair_one_is_not():
    better, other = "x" * 10, "x" * 30
    pairs = [(better, other) if i % 2 else (other, better) for i in range(60)]
    biased = [row((0.9, 0.9) if len(a) > len(b) else (0.1, 0.1), a, b) for a, b in pairs]
    metrics = judge_metrics(biased)
    length = metrics["length"]
    assert length["preferred"] == 1.0 and length["preferred_by_people"] == 0.5
    assert length["accuracy_more"] == 1.0 and length["accuracy_less"] == 0.0
    said = " ".join(findings(metrics))
    assert "prefers the longer completion in 100% of the pairs, people in 50%" in said
    assert "not shown to be better than chance" in said
    fair = judge_metrics([row((0.8, 0.8), a, b) for a, b in pairs])
    # Right in 80% of the words, in 100% of the pairs: under-confident, and nothing else.
    assert [line for line in findings(fair) if "calibration error" not in line] == []


def test_a_judge_is_badly_calibrated_only_beyond_what_chance_does_to_so_few_rows():
    def is_blamed(seed, num_rows, too_sure=0.0):
        draw, rows = random.Random(seed), []
        for _ in range(num_rows):
            share = draw.uniform(0.5, 1.0 - too_sure)
            said = share + too_sure
            rows.append(row((said, said) if draw.random() < share else (1 - said, 1 - said)))
        return any("calibration error" in line for line in findings(judge_metrics(rows)))

    # Of 20 rows of a perfect judge the error is 0.2 on average.
    assert sum(is_blamed(seed, 20) for seed in range(20)) <= 2
    assert all(is_blamed(seed, 100, too_sure=0.3) for seed in range(10))


def test_agreement_counts_equal_verdicts_of_judges_and_of_people():
    groups = [Group(f"prompt {i}", (f"better {i}", f"other {i}"), 1) for i in range(4)]
    always = [Judged(g, (label(0.9, 0.9),)) for g in groups]
    other = [Judged(g, (label(p, p),)) for g, p in zip(groups, (0.9, 0.6, 0.5, 0.1), strict=True)]
    assert agreement({"always": always, "other": other}) == {
        "always / other": {"pairs": 4, "agreement": 0.5},
        "always / people": {"pairs": 4, "agreement": 1.0},
        "other / people": {"pairs": 4, "agreement": 0.5},
    }


WRITTEN = [
    {"prompt": f"prompt {i}", "chosen": f"right {'x' * (i % 7)}", "rejected": f"wrong, but longer {i}", "subset": s}
    for i, s in enumerate(["easy", "hard"] * 12)
]


@pytest.fixture
def judge(empty_folder):
    """Return a function that runs the verb in an empty folder on rows; it returns the exit code."""
    (empty_folder / "checks.py").write_text(LENGTHS)
    (empty_folder / "principles.yaml").write_text(CONSTITUTION)

    def call(rows, *options):
        write_rows(empty_folder / "rows.jsonl", rows)
        return cli.main(["judge", "--dataset_name", "rows.jsonl", "--output_dir", "out", *options])

    return call


def rubric(tag):
    check = json.dumps({tag: f"checks.py:{tag}"})
    return ["--judge", "rubric", "--rubric", check, "--constitution", "principles.yaml"]


def test_a_judge_that_is_always_for_the_longer_one_is_exposed_in_the_report(judge, tmp_path, capsys):
    assert judge(WRITTEN, *rubric("longer")) == 0
    entry = read_metrics(tmp_path / "out")["judges"]["rubric"]
    assert entry["all"]["accuracy"] == 0 and entry["all"]["length"]["preferred"] == 1
    assert entry["all"]["position"]["position_consistency"] == 1
    assert set(entry["subsets"]) == {"easy", "hard"} and entry["subsets"]["easy"]["rows"] == 12
    page = (tmp_path / "out/_report/report.html").read_text()
    text = (tmp_path / "out/_report/report.md").read_text()
    for shown in (page, text):
        assert "prefers the longer completion in 100% of the pairs, people in 0%" in " ".join(shown.split())
        assert "Accuracy by subset" in shown and "mean of the subsets" in shown
    assert 'alt="reliability"' in page
    rows = read_rows(tmp_path / "out/pairs.jsonl")
    assert len(rows) == 24 and rows[0]["judges"]["rubric"]["probability"] < 0.5
    assert "prefers the longer completion" in capsys.readouterr().out


def test_the_folder_of_a_training_is_rejected(judge, tmp_path, capsys):
    (tmp_path / "out/checkpoint-3").mkdir(parents=True)
    for options in ([], ["--dry_run"]):
        assert judge(WRITTEN, *rubric("longer"), *options) == 1
        assert "out holds a training (checkpoint-3), whose metrics and report" in error_of(capsys)


def test_a_judge_on_a_server_that_takes_the_first_is_exposed_and_costs_are_counted(judge, tmp_path, capsys):
    prices = ["--judge_prices", json.dumps({"judge-1": [2.0, 10.0]})]
    with StubServer(bias=10.0) as stub:
        words = ["--judge", stub.url, "--judge_model", stub.model, *prices]
        assert judge(WRITTEN, *words) == 0
        asked = len(stub.bodies)
        assert judge(WRITTEN, *words) == 0  # From the ledger, but for the questions of the check at startup.
        again = len(stub.bodies) - asked
    values = read_metrics(tmp_path / "out")
    position = values["judges"]["judge-1"]["all"]["position"]
    assert position["first_slot_rate"] == 1 and position["position_consistency"] == 0
    assert values["judges"]["judge-1"]["all"]["accuracy"] == 0.5 == values["judges"]["judge-1"]["all"]["ties"] / 48
    costs = values["costs"]["judge-1"]
    # Two orders of each pair once; the stub reports one token read and one written per call.
    assert costs["questions"] == 48 and costs["calls"] == asked + again and again < 4
    assert costs["usd"] == pytest.approx(12.0 * costs["calls"] / 1e6)
    said = " ".join(capsys.readouterr().out.split())
    assert "prefers the completion shown first in 100% of its answers" in said


def test_several_judges_are_measured_alone_and_together_and_compared(judge, tmp_path):
    with StubServer() as stub:
        words = ["--judge", "rubric", stub.url, "--judge_model", stub.model, *rubric("right")[2:]]
        assert judge(WRITTEN, *words) == 0
        questions = [body for body in stub.bodies if "> prompt 3\n" in body["messages"][0]["content"]]
    values = read_metrics(tmp_path / "out")
    assert list(values["judges"]) == ["rubric", "judge-1", "ensemble"]
    assert values["judges"]["rubric"]["all"]["accuracy"] == 1
    # The ensemble is made of what the members said: nothing was bought for it.
    assert len(questions) == 2 and values["costs"]["judge-1"]["questions"] == 48
    for said in (row["judges"] for row in read_rows(tmp_path / "out/pairs.jsonl")):
        mean = (said["rubric"]["probability"] + said["judge-1"]["probability"]) / 2
        assert said["ensemble"]["probability"] == pytest.approx(mean)
    assert values["agreement"]["rubric / people"]["agreement"] == 1
    assert set(values["agreement"]) > {"rubric / judge-1", "judge-1 / people"}
    assert "| rubric / judge-1 | 24 |" in (tmp_path / "out/_report/report.md").read_text()
