"""reasoning-gym: the rows, the reward by the package, and the chain on the pretrained model."""

import json

import pytest

from tests.recipes.pretrained import run_chain
from tests.stages.recipes import load_recipe_module

# Not a dev dependency: it pins seven packages to one version each, and pip builds one of them (pycosat) in C.
pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")

NAME = "reasoning-gym"
prepare = load_recipe_module(NAME, "prepare")
rewards = load_recipe_module(NAME, "rewards")


def test_the_reward_is_the_packages_own():
    rows = prepare.make_rows()["held_out"][:2]
    answers = [json.loads(row["entry"])["answer"] for row in rows]
    completions = [[{"role": "assistant", "content": text}] for text in (f" {answers[0]}\n", "a number")]
    assert rewards.right(completions, [row["entry"] for row in rows]) == [1.0, 0.0]


def test_no_question_is_in_two_files():
    rows = prepare.make_rows()
    questions = [row["prompt"][0]["content"] for made in rows.values() for row in made]
    assert len(questions) == len(set(questions)) == sum(prepare.SIZES.values())


# Of each stage: enough to run through all of it.
SIZES = {
    "sft": "--max_steps 1 --per_device_train_batch_size 2 --eval_size 2",
    "ppo": "--num_rollouts 2 --rollout_batch_size 4 --eval_dataset_split train[:4]",
    "eval": "--dataset_split train[:4]",
}


@pytest.mark.slow
@pytest.mark.usefixtures("workplace")
def test_the_chain_runs_on_the_pretrained_model(monkeypatch, capsys):
    assert 0 <= run_chain(NAME, SIZES, monkeypatch, capsys)["policy"]["score/right"] <= 1
