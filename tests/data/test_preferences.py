"""Preference rows: what is refused and how it is said, and a split in which no prompt stands on both sides."""

import pytest
from datasets import Dataset

from onetrunk.data.preferences import split_by_prompt, validate_preferences

GOOD = {"prompt": "a cat", "chosen": "runs fast", "rejected": "no"}
USER = [{"role": "user", "content": "a cat"}]


def said(text):
    return [{"role": "assistant", "content": text}]


def rows(*changes, **columns):
    return Dataset.from_list([{**GOOD, **columns, **change} for change in changes or ({},)])


def test_good_rows_pass_and_say_whether_they_are_conversations():
    assert validate_preferences(rows()) is False
    assert validate_preferences(rows({"probability": 0.0}, {"probability": 1.0}, margin=-0.5)) is False
    assert validate_preferences(rows({"prompt": USER, "chosen": said("yes"), "rejected": said("no")})) is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt": " "}, "prompt is empty or white space only"),
        ({"chosen": ""}, "chosen is empty or white space only"),
        ({"rejected": None}, "rejected is missing"),
        ({"rejected": "runs fast"}, "chosen and rejected are identical"),
        ({"probability": 1.2}, "probability is 1.2, expected a number from 0 to 1"),
        ({"probability": -0.1}, "probability is -0.1"),
        ({"probability": float("nan")}, "probability is nan"),
        ({"probability": None}, "probability is missing"),
        ({"margin": float("inf")}, "margin is inf"),
        ({"probability": True}, "probability is of type bool"),
        ({"chosen_stopped": None}, "chosen_stopped is None, expected true or false"),
    ],
)
def test_a_bad_row_is_named_with_its_index_and_reason(change, reason):
    good = {**GOOD, **{name: True if "stopped" in name else 0.5 for name in change if name not in GOOD}}
    if change.get("probability") is True:
        dataset = Dataset.from_list([{**GOOD, **change}])
        with pytest.raises(ValueError, match=reason):
            validate_preferences(dataset)
        return
    with pytest.raises(ValueError, match=f"1 of 3 rows cannot be used(.|\n)*row 1: {reason}"):
        validate_preferences(Dataset.from_list([good, {**good, **change}, good]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chosen": USER}, "chosen ends with a user message, expected the assistant's"),
        ({"rejected": []}, "rejected is a conversation without messages"),
        ({"chosen": said(" ")}, "chosen has a message 0 .assistant. whose content is empty"),
        ({"prompt": [*USER, {"role": "system", "content": "x"}]}, "prompt ends with a system message"),
        ({"chosen": said("no")}, "chosen and rejected are identical"),
    ],
)
def test_a_bad_conversation_is_named_with_its_reason(change, reason):
    good = {"prompt": USER, "chosen": said("yes"), "rejected": said("no")}
    with pytest.raises(ValueError, match=f"row 1: {reason}"):
        validate_preferences(Dataset.from_list([good, {**good, **change}]))


def test_every_row_is_looked_at_and_twenty_are_listed():
    dataset = rows(*[{"chosen": "no"}] * 25, {})
    with pytest.raises(ValueError, match="25 of 26 rows") as error:
        validate_preferences(dataset)
    assert str(error.value).count("row ") == 20 and "and 5 more" in str(error.value)


def test_missing_columns_and_no_rows_are_refused():
    with pytest.raises(ValueError, match="columns chosen, prompt; expected.*rejected is missing: say which"):
        validate_preferences(rows().remove_columns("rejected"))
    with pytest.raises(ValueError, match="holds no rows"):
        validate_preferences(rows().select([]))


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
