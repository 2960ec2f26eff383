"""Preference rows: what is rejected, and with which message; and splits, in which no prompt is on both sides."""

import pytest
from datasets import Dataset

from onetrunk.data.rows import check_preferences, split_by_prompt, split_rows

GOOD = {"prompt": "a cat", "chosen": "runs fast", "rejected": "no"}
USER = [{"role": "user", "content": "a cat"}]


def said(text):
    return [{"role": "assistant", "content": text}]


def rows(*changes, **columns):
    return Dataset.from_list([{**GOOD, **columns, **change} for change in changes or ({},)])


def test_good_rows_pass():
    for good in (
        rows(),
        rows({"probability": 0.0}, {"probability": 1.0}, margin=-0.5),
        rows({"prompt": USER, "chosen": said("yes"), "rejected": said("no")}),
    ):
        assert check_preferences(good) is good


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": " "}, "prompt is empty or white space only"),
        ({"chosen": ""}, "chosen is empty or white space only"),
        ({"rejected": None}, "rejected is missing"),
        ({"rejected": "runs fast"}, "chosen and rejected are identical"),
        ({"probability": 1.2}, "probability is 1.2, expected a number from 0 to 1"),
        ({"margin": float("inf")}, "margin is inf"),
        ({"chosen_stopped": None}, "chosen_stopped is None, expected true or false"),
    ],
)
def test_a_bad_row_is_named_with_its_index_and_reason(change, reason):
    good = {**GOOD, **{name: True if "stopped" in name else 0.5 for name in change if name not in GOOD}}
    with pytest.raises(ValueError, match=f"^row 1: {reason}"):
        check_preferences(Dataset.from_list([good, {**good, **change}, good]))


def test_a_bad_conversation_is_named_with_its_reason():
    good = {"prompt": USER, "chosen": said("yes"), "rejected": said("no")}
    with pytest.raises(ValueError, match="^row 1: chosen ends with a user message, expected the assistant's"):
        check_preferences(Dataset.from_list([good, {**good, "chosen": USER}]))


def test_missing_columns_and_no_rows_are_refused():
    with pytest.raises(ValueError, match="columns chosen, prompt; expected.*rejected is missing: map yours"):
        check_preferences(rows().remove_columns("rejected"))
    with pytest.raises(ValueError, match="holds no rows"):
        check_preferences(rows().select([]))


@pytest.mark.parametrize("eval_size", [2, 0.4])
def test_no_prompt_stands_on_both_sides_of_a_split(eval_size):
    dataset = rows(*[{"prompt": f"question {i % 5}", "chosen": f"yes {i}"} for i in range(20)])
    train, held_out = split_by_prompt(dataset, eval_size, seed=3)
    assert (len(train), len(held_out)) == (12, 8)
    assert not set(train["prompt"]) & set(held_out["prompt"])
    assert split_by_prompt(dataset, eval_size, seed=3)[1]["chosen"] == held_out["chosen"]
    assert held_out["chosen"] == sorted(held_out["chosen"], key=lambda text: int(text[4:]))


def test_a_split_that_leaves_one_side_empty_is_refused():
    with pytest.raises(ValueError, match="of 1 different prompts leaves one part empty"):
        split_by_prompt(rows({}, {"chosen": "yes"}), 1, seed=0)


@pytest.mark.parametrize(("eval_size", "num_eval"), [(3, 3), (0.25, 5), (0.001, 1)])
def test_a_split_is_the_same_for_the_same_seed_and_loses_no_row(eval_size, num_eval):
    rows = Dataset.from_dict({"i": list(range(20))})
    train, evaluation = split_rows(rows, eval_size, seed=1)
    assert len(evaluation) == num_eval
    assert sorted([*train["i"], *evaluation["i"]]) == list(range(20))
    assert list(train["i"]) == sorted(train["i"])
    assert split_rows(rows, eval_size, seed=1)[1]["i"] == evaluation["i"]
    assert any(split_rows(rows, eval_size, seed=seed)[1]["i"] != evaluation["i"] for seed in (2, 3))


@pytest.mark.parametrize("eval_size", [0, 20, 1.0])
def test_a_split_that_leaves_one_part_empty_is_refused(eval_size):
    with pytest.raises(ValueError, match=f"eval_size {eval_size} of 20 rows"):
        split_rows(Dataset.from_dict({"i": list(range(20))}), eval_size, seed=1)
