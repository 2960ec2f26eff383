"""gsm8k-0.5b: answers read by hand, and the split."""

import json

import pytest

from tests.stages.recipes import load_recipe_module
from tests.stages.test_gsm8k_recipe import write_problems

prepare = load_recipe_module("gsm8k-0.5b", "prepare")
rewards = load_recipe_module("gsm8k-0.5b", "rewards")


@pytest.mark.parametrize(
    ("text", "answer", "correct", "right_number", "marked"),
    [
        ("so 48 + 24.\n#### 72", "72", 1, 1, 1),
        ("#### $1,080.00.", "1080", 1, 1, 1),
        ("The answer is 72.", "72", 0, 1, 0),
        ("#### 71\n#### 72", "72", 1, 1, 1),  # the last mark counts
        ("#### 72\n#### 71", "72", 0, 0, 1),
        ("#### 72 apples and 3 pears", "72", 1, 0, 1),
        ("#### -5", "-5", 1, 1, 1),
        ("#### .5", "0.5", 1, 1, 1),
        ("72 ####", "72", 0, 1, 0),
        ("", "72", 0, 0, 0),
        ("####" * 50, "72", 0, 0, 0),
    ],
)
def test_the_rewards_by_hand(text, answer, correct, right_number, marked):
    completions = [[{"role": "assistant", "content": text}]]
    assert rewards.correct(None, completions, answer=[answer]) == [correct]
    assert rewards.right_number(None, completions, answer=[answer]) == [right_number]
    assert rewards.marked(None, completions) == [marked]


def test_the_last_training_questions_validate(tmp_path):
    write_problems(tmp_path / "train.jsonl", 510)
    write_problems(tmp_path / "test.jsonl", 3)
    out = tmp_path / "out"
    counts = prepare.prepare(str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl"), str(out))
    assert counts == {"train": 10, "validation": 500, "test": 3}
    first = json.loads((out / "validation.jsonl").read_text().splitlines()[0])
    assert first["answer"] == "20" and first["prompt"][0]["content"].startswith("What is 10 + 10?\n\nReason")
