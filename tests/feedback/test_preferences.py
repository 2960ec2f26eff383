"""From texts to pairs, from labels to rows and from rows to statistics, by hand-worked numbers."""

from itertools import combinations

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from onetrunk.data.rows import check_preferences
from onetrunk.feedback.asking import Asker, FailureLimit
from onetrunk.feedback.preferences import PreferenceMaker, PreferenceStatistics, all_pairs, best_worst_pair, distinct
from onetrunk.feedback.sampling import PromptItem
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Pair, Principle, prompt_key
from onetrunk.judges.labels import statistics_warnings
from onetrunk.stages.prefs.arguments import check_pairing
from onetrunk.types import SampledText
from onetrunk.utils.ledger import Ledger
from tests.judges.fakes import ToldJudge

CONSTITUTION = Constitution("t", (Principle("heavy", 3.0), Principle("light", 1.0)))


@pytest.fixture
def make(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:

        def maker(answers, **settings):
            """`answers` of (principle, shown first, shown second) or (principle, completion)."""

            def answer(item, principle):
                texts = (item.first, item.second) if isinstance(item, Pair) else (item.text,)
                return answers[principle.text, *texts]

            judge = ToldJudge(answer, "table")
            asker = Asker(judge, CONSTITUTION, ledger, 0.5)
            return judge, PreferenceMaker(asker, seed=0, **settings)

        yield maker


def sampled(*texts):
    return [SampledText(text) for text in texts]


def item(prompt="Why?"):
    return PromptItem(prompt, prompt_key(prompt), [1])


def both(heavy, light, heavy_flipped=None):
    """Answers on the pair a, b: that a is better; flipped ones as shown (b first)."""
    answers = {("heavy", "a", "b"): heavy, ("light", "a", "b"): light, ("light", "b", "a"): 1 - light}
    return {**answers, ("heavy", "b", "a"): 1 - heavy if heavy_flipped is None else heavy_flipped}


@pytest.mark.parametrize("prompt", ["Why?", [{"role": "user", "content": "Why?"}]])
def test_a_row_is_the_mean_over_principles_by_weight_and_orders(make, prompt):
    # a: heavy (0.8 + 0.6) / 2 = 0.7 with weight 3, light 0.1 with weight 1: (2.1 + 0.1) / 4 = 0.55
    judge, maker = make(both(0.8, 0.1, heavy_flipped=0.4))
    (row,) = maker.rows([item(prompt)], [sampled("a", "b")])
    assert row["probability"] == pytest.approx(0.55)
    assert "margin" not in row  # TRL's RewardTrainer would use it unasked.
    texts = [row[c] if isinstance(prompt, str) else row[c][0]["content"] for c in ("chosen", "rejected")]
    assert texts == ["a", "b"] and row["prompt"] == prompt
    assert len(judge.asked) == 4
    assert maker.counts["labelled"] == maker.counts["pairs"] == 1


def test_a_pair_with_one_question_unanswered_is_unjudged_and_one_without_an_opinion_abstained(make):
    _, maker = make(both(0.9, 0.9, heavy_flipped="timeout"))
    assert maker.rows([item()], [sampled("a", "b")]) == []
    _, none = make({key: None for key in both(0.9, 0.9)})
    assert none.rows([item("other")], [sampled("a", "b")]) == []
    assert (maker.counts["unjudged"], none.counts["abstained"]) == (1, 1)


def test_best_and_worst_are_found_by_the_mean_rating_and_alike_texts_are_rated_once(make):
    ratings = {
        ("heavy", "a"): 0.2, ("light", "a"): 1.0,  # (0.6 + 1) / 4 = 0.4
        ("heavy", "b"): 0.9, ("light", "b"): None,  # 0.9
        ("heavy", "c"): 0.1, ("light", "c"): 0.1,  # 0.1
    }  # fmt: skip
    orders = [("b", "c"), ("c", "b")]
    verdicts = {(p, x, y): 0.7 if x == "b" else 0.3 for p in ("heavy", "light") for x, y in orders}
    judge, maker = make({**ratings, **verdicts}, pairing="best_worst")
    (row,) = maker.rows([item()], [sampled("a", "b", "c", "a")])
    assert (row["chosen"], row["rejected"], row["probability"]) == ("b", "c", pytest.approx(0.7))
    assert len(judge.asked) == 6 + 4
    assert maker.counts["repeated_completions"] == 1


@pytest.mark.parametrize("prompt", ["Why?", [{"role": "user", "content": "Why?"}]])
def test_every_row_that_is_written_is_one_that_reward_takes(make, prompt):
    texts = ["a", "b\0", "\0", " ", "", "a ", "b", "\u00a0"]
    answers = {(p, x, y): 0.9 if x == "a" else 0.1 for p in ("heavy", "light") for x, y in (("a", "b"), ("b", "a"))}
    _, maker = make(answers)
    rows = maker.rows([item(prompt)], [sampled(*texts)])
    assert len(rows) == 1 and maker.counts["blank_completions"] == 5 and maker.counts["repeated_completions"] == 1
    assert len(check_preferences(Dataset.from_list(rows))) == 1


def test_statistics_of_rows():
    statistics = PreferenceStatistics()
    chosen = ["long", [{"role": "assistant", "content": "longer"}], "s", "same"]
    rows = [
        {"chosen": text, "rejected": "sam" if i == 0 else "same", "probability": p, "consistent": i < 3}
        for i, (text, p) in enumerate(zip(chosen, [0.5, 0.55, 0.95, 1.0], strict=True))
    ]
    statistics.add(rows[:1])
    statistics.add(rows[1:])
    found = statistics.as_dict()
    assert found["rows"] == 4 and found["mean_probability"] == 0.75 and found["consistent_fraction"] == 0.75
    assert {k: v for k, v in found["label_histogram"].items() if v} == {"0.50-0.55": 1, "0.55-0.60": 1, "0.95-1.00": 2}
    # Lengths 4, 6, 1, 4 against 3, 4, 4, 4: of three that differ two are longer
    assert found["length"]["longer_is_chosen_fraction"] == pytest.approx(2 / 3, abs=1e-6)
    assert found["length"]["mean_chosen_characters"] == 3.75
    assert PreferenceStatistics().as_dict()["mean_probability"] is None


def test_a_length_is_called_favoured_only_beyond_chance():
    def warnings(longer, pairs):
        statistics = PreferenceStatistics()
        sides = [("xx", "x") if i < longer else ("x", "xx") for i in range(pairs)]
        statistics.add({"chosen": a, "rejected": b, "probability": 1.0, "consistent": True} for a, b in sides)
        return statistics_warnings({"rows": statistics.as_dict(), "counts": {}})

    # Wilson's intervals: .38 to .96, and .65 to .90.
    assert warnings(4, 5) == []
    assert warnings(32, 40) == ["the longer completion is chosen in 80% of the pairs, which a reward model may learn"]


@pytest.mark.parametrize(("limit", "outcomes", "stops_at"), [
    (0.1, "f" * 10, 6),  # more than a tenth of 50
    (0.0, "aaaaaf", 6),
    (0.1, "a" * 100 + "f" * 20, 112),  # 12 of 112
    (0.5, "a" * 1000 + "f" * 60, 1050),  # 50 in a row
    (1.0, "f" * 500, None),
])  # fmt: skip
def test_the_limit_stops_at_a_share_or_at_fifty_in_a_row(limit, outcomes, stops_at):
    failures = FailureLimit(limit, "j")
    for number, outcome in enumerate(outcomes, start=1):
        if number == stops_at:
            with pytest.raises(RuntimeError, match="all answers are kept"):
                failures.note("down")
            return
        failures.note("down" if outcome == "f" else None)
    assert stops_at is None


def test_all_questions_on_a_few_prompts_may_be_refused_or_unread_and_on_several_they_stop_the_run():
    failures = FailureLimit(0.1, "j")
    for number in range(400):
        failures.note("HTTP 400: blocked", "refused", prompt=f"prompt {number % 4}")
    assert (failures.asked, failures.failed, failures.refused) == (400, 0, 400)
    failures = FailureLimit(0.1, "j")
    for number in range(100):
        failures.note(None)
        if number % 12 == 0:
            failures.note("no label", "unread", prompt=f"prompt {number}")
    # 9 of 109 so far; 11 of 111 are below a tenth, 12 of 112 are not.
    failures.note("no label", "unread", prompt="p")
    failures.note("no label", "unread", prompt="q")
    message = "refused 1 of 112 questions, and gave 11 of them a reply without a verdict"
    with pytest.raises(RuntimeError, match=message):
        failures.note("HTTP 400: blocked", "refused", prompt=[{"role": "user", "content": "p"}])


texts = st.lists(st.sampled_from(["a", "b", " a ", "c", "", "  ", "d"]), max_size=7)
words = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


@given(texts, words, st.integers(1, 10))
def test_all_pairs_cover_each_pair_of_different_texts_once_and_random_pairs_are_some_of_them(
    completions, words, count
):
    every, some = all_pairs(completions, words), all_pairs(completions, words, count)
    found = [frozenset((completions[i].strip(), completions[j].strip())) for i, j in every]
    different = {text.strip() for text in completions if text.strip()}
    assert sorted(map(sorted, found)) == sorted(map(sorted, combinations(different, 2)))
    assert len({frozenset(pair) for pair in some}) == len(some) == min(count, len(every))
    assert set(map(frozenset, some)) <= set(map(frozenset, every))
    assert (every, some) == (all_pairs(completions, words), all_pairs(completions, words, count))


def test_random_pairs_and_their_order_differ_between_seeds_and_prompts():
    completions = [f"text {i}" for i in range(10)]
    assert len({tuple(all_pairs(completions, (seed, 5), 3)) for seed in range(20)}) > 15
    # Either of two comes first about as often: 500 coins, 6 standard deviations
    first = sum(all_pairs(["a", "b"], (0, prompt)) == [(0, 1)] for prompt in range(500))
    assert 180 < first < 320


@given(texts, st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=7, max_size=7), words)
def test_best_and_worst_are_the_extremes_among_the_rated(completions, ratings, words):
    pairs = best_worst_pair(completions, ratings, words)
    rated = [ratings[i] for i in distinct(completions) if ratings[i] is not None]
    if len(set(rated)) < 2:
        assert pairs == []
        return
    (pair,) = pairs
    assert sorted(ratings[i] for i in pair) == [min(rated), max(rated)]
    assert completions[pair[0]].strip() != completions[pair[1]].strip()


@pytest.mark.parametrize(
    ("pairing", "num", "per_prompt", "message"),
    [
        ("some", 2, None, "all, best_worst, random"),
        ("all", 1, None, "set 2 or more"),
        ("best_worst", 1, None, "set 2 or more"),
        ("random", 4, None, "set pairs_per_prompt"),
        ("all", 4, 2, "only there"),
        ("random", 4, 0, "1 or more"),
    ],
)
def test_settings_without_a_pair_are_refused(pairing, num, per_prompt, message):
    with pytest.raises(ValueError, match=message):
        check_pairing(pairing, num, per_prompt)
