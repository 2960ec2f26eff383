"""reasoning-gym: the rows, the reward by the package, and the chain on the pretrained model."""

import json

import pytest

from onetrunk import cli
from tests.recipes.pretrained import link_recipes, make_base_of_wheel
from tests.stages.recipes import ROOT, load_recipe_module

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


def test_the_readme_shows_the_glue():
    folder = ROOT / "recipes" / NAME
    assert (folder / "rewards.py").read_text() in (folder / "README.md").read_text()


# Of each stage: enough to run through all of it.
SIZES = {
    "sft": "--max_steps 1 --per_device_train_batch_size 2 --eval_size 2",
    "ppo": "--num_rollouts 2 --rollout_batch_size 4 --eval_dataset_split train[:4]",
    "eval": "--dataset_split train[:4]",
}


@pytest.mark.slow
def test_the_chain_runs_on_the_pretrained_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    link_recipes(tmp_path)
    make_base_of_wheel(monkeypatch, capsys)
    monkeypatch.setattr("sys.argv", ["prepare.py"])
    assert prepare.main() == 0
    for verb, options in SIZES.items():
        assert cli.main([verb, "--config", f"recipes/{NAME}/{verb}.yaml", *options.split()]) == 0, verb
    metrics = json.loads((tmp_path / "runs" / NAME / "eval/metrics.json").read_text())
    assert 0 <= metrics["policy"]["score/right"] <= 1
