"""The tiny recipe's grammar and rubric, by hand; and `make demo` as a whole (slow)."""

import pytest
from transformers import AutoTokenizer

from tests.processes import python
from tests.stages.recipes import ROOT, load_recipe_module
from tests.stages.small_runs import read_rows

grammar = load_recipe_module("tiny", "make_data")
rewards = load_recipe_module("tiny", "rewards")

TASK = {"action": ["find"], "thing": ["lamp"], "place": ["attic"]}


def scores(text):
    """Return on_task, polite, concise, finished of one reply to TASK."""
    completions = [[{"role": "assistant", "content": text}]]
    rubric = (rewards.on_task, rewards.polite, rewards.concise, rewards.finished)
    return [function(completions=completions, prompts=None, completion_ids=None, **TASK)[0] for function in rubric]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Gladly, I will find the lamp in the attic.", [1, 1, 1, 1]),
        ("Yes, I will find the lamp in the hall", [2 / 3, 0.5, 1, 0]),
        # 17 words: (24 - 17) / (24 - 12); what comes after the first promise does not count as on task.
        ("Why me, I will move the cup in the hall and then I will find the lamp", [0, 0, 7 / 12, 0]),
        ("Of course. I find. The lamp.", [2 / 3, 1, 1, 0]),
        ("", [0, 0, 1, 0]),
    ],
)
def test_the_rubric_scores_by_hand(text, expected):
    assert scores(text) == pytest.approx(expected)


def test_the_same_seed_gives_the_same_files_and_another_seed_others(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        grammar.make_all(tmp_path / name, seed=seed, num_sft_rows=50)
    files = ["sft.jsonl", "prompts.jsonl", "held_out.jsonl", "base/model.safetensors", "base/tokenizer.json"]
    read = {name: [(tmp_path / name / file).read_bytes() for file in files] for name in "abc"}
    assert read["a"] == read["b"]
    assert all(a != c for a, c in zip(read["a"], read["c"], strict=True))


def test_every_word_is_one_token_so_that_reply_and_request_can_be_compared(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(grammar.make_all(tmp_path, num_sft_rows=500) / "base")
    words = (*grammar.ACTIONS, *grammar.THINGS, *grammar.PLACES)
    assert {word: len(tokenizer(f" {word}")["input_ids"]) for word in words} == dict.fromkeys(words, 1)


def test_held_out_requests_share_no_task_with_the_training_prompts(tmp_path):
    grammar.make_all(tmp_path, num_sft_rows=500)

    def tasks(name):
        return {(row["action"], row["thing"], row["place"]) for row in read_rows(tmp_path / name)}

    train, held_out = tasks("prompts.jsonl"), tasks("held_out.jsonl")
    assert len(held_out) == 112 and not train & held_out
    contents = {" ".join(task) for task in held_out}
    for row in read_rows(tmp_path / "sft.jsonl"):
        words = row["prompt"][0]["content"].strip(".?").split()
        named = [w for w in words if w in (*grammar.ACTIONS, *grammar.THINGS, *grammar.PLACES)]
        assert " ".join(named) not in contents


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_wins_over_its_start_and_says_so(tmp_path):
    said = python(ROOT / "recipes/tiny/demo.py", cwd=tmp_path).stdout
    assert "what the chain reached" in said and "demo: report: runs/tiny/pipeline" in said
