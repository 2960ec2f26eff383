"""remember: a conversation by hand, the rows, and the chain on the pretrained model."""

import json
import random

import pytest
from transformers import AutoTokenizer

from onetrunk.rollouts.episodes.compaction import SUMMARY
from tests.recipes.pretrained import run_chain
from tests.stages.recipes import load_recipe_module

NAME = "remember"
talk = load_recipe_module(NAME, "talk")
prepare = load_recipe_module(NAME, "prepare")


def test_a_conversation_by_hand():
    table = talk.Talk()
    assert table.reset(options={"seed": 3}) == ("", {})
    said = [table.step("Hello! How are you?") for _ in range(talk.TURNS)]
    assert table.name in said[0][0] and table.number in said[0][0] and said[-1][0] == talk.QUESTION
    assert {step[1:] for step in [(text, *rest[:3]) for text, *rest in said]} == {(0.0, False, False)}
    assert table.step(f"{table.name}, and it is {table.number}.")[1:4] == (1.0, True, False)


@pytest.mark.parametrize(("answer", "reward"), [("I do not know.", 0.0), ("{name}", 0.5), ("It is {number}", 0.5)])
def test_half_a_point_for_each(answer, reward):
    table = talk.Talk()
    table.reset(options={"seed": 3})
    table.says = []
    assert table.step(answer.format(name=table.name, number=table.number))[1] == reward


def test_rows_are_contexts_and_a_fact_that_a_summary_forgets_stays_forgotten():
    rng, remembered = random.Random(0), []
    for seed in range(40):
        rows = prepare.contexts(seed, rng)
        table = talk.Talk()
        table.reset(options={"seed": seed})
        for earlier, later in zip(rows, rows[1:], strict=False):
            summary = earlier[-1]["content"]
            assert earlier[-2] == {"role": "user", "content": prepare.REQUEST}
            assert later[1]["content"] == "Hello!" + SUMMARY + summary
            assert all(fact in summary or fact not in later[-1]["content"] for fact in (table.name, table.number))
        assert rows[-1][-2]["content"] == talk.QUESTION
        remembered.append((table.name in rows[-1][-1]["content"]) + (table.number in rows[-1][-1]["content"]))
    assert 0.3 < sum(remembered) / 80 < 0.7


# Of each stage: enough to run through all of it.
SIZES = {
    "sft": "--max_steps 1 --per_device_train_batch_size 2",
    "ppo": "--num_rollouts 1 --rollout_batch_size 2 --eval_dataset_split train[:2]",
    "eval": "--dataset_split train[:2]",
}


@pytest.mark.slow
def test_the_chain_runs_on_the_pretrained_model(workplace, monkeypatch, capsys):
    metrics = run_chain(NAME, SIZES, monkeypatch, capsys)
    assert metrics["policy"]["episode/compactions"] >= 2
    runs = workplace / "runs"
    rows = [json.loads(line) for line in (runs / NAME / "sft.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(runs / "smollm2-135m-cpu/base")
    lengths = [len(tokenizer.apply_chat_template(row["messages"])["input_ids"]) for row in rows]
    assert max(lengths) <= 320
