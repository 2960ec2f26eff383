"""`onetrunk recipes`, and recipes that are found by name from any folder."""

from pathlib import Path

import pytest

from onetrunk import cli
from onetrunk.stages.arguments import UsageError
from onetrunk.stages.pipeline import load_pipeline
from onetrunk.stages.ppo import parse_ppo
from onetrunk.utils.shipped import find_config, with_shipped_files
from tests.processes import ROOT

FOLDER = ROOT / "recipes/tiny"


@pytest.mark.parametrize("name", ["tiny/ppo", "recipes/tiny/ppo.yaml"])
def test_a_recipe_is_found_by_its_name_from_an_empty_folder(empty_folder, name):
    assert find_config(name) == FOLDER / "ppo.yaml"
    data, args, *_, judge_args = parse_ppo(["--config", name])
    assert args.rollout_batch_size == 128 and data.reward_funcs == ["runs/tiny/student"]
    # What the recipe reads of its own folder is found there; what a run writes stays in the working folder.
    assert judge_args.monitor_constitution == str(FOLDER / "constitution.yaml")
    assert judge_args.monitor_rubric["polite"] == f"{FOLDER}/rewards.py:polite"
    assert args.output_dir == "runs/tiny/ppo"


def test_a_file_of_the_working_folder_comes_before_a_recipe(empty_folder):
    own = Path("recipes/tiny/ppo.yaml")
    own.parent.mkdir(parents=True)
    own.write_text("beta: 0.5\n")
    assert find_config("recipes/tiny/ppo.yaml") == own
    assert with_shipped_files("recipes/tiny/ppo.yaml") == "recipes/tiny/ppo.yaml"
    assert with_shipped_files({"a": ["recipes/tiny/sft.yaml"]}) == {"a": [str(FOLDER / "sft.yaml")]}


def test_a_recipe_that_does_not_exist_is_answered_with_names_that_do(empty_folder):
    with pytest.raises(UsageError, match="the config file tiny/pppo does not exist .* nearly this name: tiny/ppo"):
        parse_ppo(["--config", "tiny/pppo"])


def test_a_pipeline_runs_by_its_name_with_the_files_of_its_recipe(empty_folder):
    pipeline = load_pipeline("tiny/pipeline")
    assert pipeline.output_dir == Path("runs/tiny/pipeline")
    assert [stage.path for stage in pipeline.stages[:2]] == [FOLDER / "make_data.py", FOLDER / "sft.yaml"]
    Path("own.yaml").write_text(
        "output_dir: out\nstages:\n  ppo: {config: tiny/ppo, launcher: a --config_file accelerate_configs/ddp.yaml}\n"
    )
    launcher = load_pipeline("own.yaml").stages[0].launcher
    assert launcher == ("a", "--config_file", str(ROOT / "accelerate_configs/ddp.yaml"))


def test_the_list_names_every_recipe_and_every_file(capsys):
    assert cli.main(["recipes", "list"]) == 0
    printed = capsys.readouterr().out
    for path in [*ROOT.glob("recipes/*/*.yaml"), *ROOT.glob("accelerate_configs/*.yaml")]:
        assert path.name in printed and path.parent.name in printed


def test_a_copied_folder_is_the_recipe_and_nothing_is_overwritten_silently(empty_folder, capsys):
    assert cli.main(["recipes", "copy", "tiny"]) == 0
    source = {p.name: p.read_bytes() for p in FOLDER.iterdir() if p.is_file()}
    assert {p.name: p.read_bytes() for p in Path("recipes/tiny").iterdir()} == source
    assert cli.main(["recipes", "copy", "recipes/tiny"]) == 1
    assert "recipes/tiny exists; delete it" in capsys.readouterr().err
