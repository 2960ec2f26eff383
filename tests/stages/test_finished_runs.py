"""A finished run is finished: its command repeated with `--resume auto` changes no byte, and what is missing of its
result is written again."""

import json
from pathlib import Path

import pytest

from onetrunk.checkpoints.folders import FINISHED, checkpoint_folders
from tests.stages.small_runs import metrics, run

SAVES = "--save_strategy steps --save_steps 1 --eval_strategy steps --eval_steps 1 --eval_size 2".split()
# The first evaluation is the best one.
BEST = "--load_best_model_at_end true --greater_is_better true".split()
TRAINED = [*SAVES, *BEST, *"--metric_for_best_model loss --max_steps 3 --learning_rate 0.01".split()]
OPTIONS = {
    "sft": TRAINED,
    "distill": TRAINED,
    "ppo": [
        *SAVES, *BEST, "--metric_for_best_model", "eval_completion/stopped_fraction", "--num_rollouts", "3",
        "--num_ppo_epochs", "1", "--monitor_judge", "rubric", "--monitor_constitution", "principles.yaml",
        "--monitor_rubric", '{"short": "brief.py:brief"}', "--monitor_rows", "2",
    ],
}  # fmt: skip
BRIEF = "def brief(completions, **kwargs):\n    return [1 / (1 + len(c)) for c in completions]\n"
# What a run is called, who held its folder, and how long an evaluation took, differ from run to run.
APART = {"manifest.json", "_run.lock", "eval_results.json", "all_results.json"}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def there(own_material):
    (own_material / "brief.py").write_text(BRIEF)
    return own_material


@pytest.mark.parametrize("verb", ["ppo", pytest.param("distill", marks=pytest.mark.slow)])
def test_a_finished_run_that_is_repeated_changes_no_byte(there, capsys, verb):
    assert run(verb, *OPTIONS[verb]) == 0
    folder = there / f"out-{verb}"
    before = bytes_of(folder)
    best = json.loads((folder / "checkpoint-3/trainer_state.json").read_text())["best_global_step"]
    assert FINISHED in before and best is not None
    capsys.readouterr()
    assert run(verb, *OPTIONS[verb], "--resume", "auto") == 0
    assert bytes_of(folder) == before
    said = f"{verb}: nothing is left to train: the run in out-{verb} is finished at step 3, its planned end; raise"
    assert said in capsys.readouterr().out


def result_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in APART}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sft", "ppo"])
def test_a_run_that_has_its_last_checkpoint_and_not_all_of_its_result_writes_the_same_result(there, verb):
    """The weights are gone, or all that is written after the last checkpoint, as where the run died right after it."""
    resumed = [*OPTIONS[verb], "--resume", "auto"]
    assert run(verb, *resumed) == 0
    folder = there / f"out-{verb}"
    expected = result_of(folder)
    later = [path.name for path in folder.iterdir() if path.is_file() and path.name != "README.md"]
    for gone in (["adapter_model.safetensors"], later):
        for name in gone:
            (folder / name).unlink()
        assert run(verb, *resumed) == 0
        found = result_of(folder)
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []


def test_a_finished_run_without_checkpoints_is_finished_too(there, capsys):
    assert run("sft") == 0
    before = bytes_of(there / "out-sft")
    assert not list((there / "out-sft").glob("checkpoint-*"))
    assert run("sft", "--resume", "auto") == 0
    assert bytes_of(there / "out-sft") == before and "is finished at step 2" in capsys.readouterr().out
    assert run("sft") == 1
    assert "holds a run already" in capsys.readouterr().err


def test_a_finished_run_whose_last_upload_was_killed_is_mirrored_by_the_same_command(there):
    mirrored = ["--checkpoint_mirror", "mirror"]
    assert run("sft", *mirrored) == 0
    (there / "mirror/manifest.json").unlink()
    assert run("sft", *mirrored, "--resume", "auto") == 0
    assert (there / "mirror/manifest.json").read_bytes() == (there / "out-sft/manifest.json").read_bytes()


@pytest.mark.slow
def test_an_alarm_of_the_yaml_file_ends_a_run_for_good_and_is_its_last_word(there, capsys):
    # No policy over fewer than 22,026 words has 10 nats of entropy: the alarm comes with the second rollout.
    limits = "alarm_limits: {entropy: 10.0, kl: null, cut_off: null}\nalarm_patience: 2\n"
    limits += "stop_on_alarm: [entropy, negative_kl]\n"
    (there / "ppo.yaml").write_text(limits)
    assert run("ppo", "--config", "ppo.yaml", "--num_rollouts", 3) == 0
    (folder,) = checkpoint_folders("out-ppo")
    assert folder.name == "checkpoint-8" and (there / "out-ppo/adapter_model.safetensors").is_file()
    out = capsys.readouterr().out
    assert "ppo: saved the adapter in out-ppo; alarms: 1\n  alarm entropy at step 8: the policy's entropy" in out
    again = ["--num_rollouts", 3, "--stop_on_alarm", "null", "--resume", "auto"]
    assert run("ppo", "--config", "ppo.yaml", *again) == 0
    assert "finished at step 8, where it was ended (alarm entropy at step 8); set continue" in capsys.readouterr().out
    assert run("ppo", "--config", "ppo.yaml", *again, *SAVES[:2], "--continue_ended_run", "true") == 0
    assert checkpoint_folders("out-ppo")[-1].name == "checkpoint-12"


def test_a_resumed_run_is_checked_first_and_does_not_evaluate_the_untrained_model_again(there, capsys):
    counting = "def short(completions, **kwargs):\n    open('calls.txt', 'a').write(f'{len(completions)} ')\n"
    (there / "reward.py").write_text(counting + "    return [-float(len(c)) for c in completions]\n")
    calls, options = there / "calls.txt", [*SAVES, "--num_rollouts", "2", "--num_ppo_epochs", "1"]
    assert run("ppo", *options) == 0
    assert calls.read_text() == "2 4 2 4 2 "  # Before, then a rollout and an evaluation each.
    before = metrics("out-ppo")["reference"]
    calls.unlink()
    longer = [*options, "--resume", "auto", "--num_rollouts", "3"]
    assert run("ppo", *longer, "--epsilon", "0.1") == 1
    assert "settings have changed since: epsilon: 0.2 -> 0.1" in capsys.readouterr().err
    assert not calls.exists()
    assert run("ppo", *longer) == 0
    assert calls.read_text() == "4 2 "
    assert metrics("out-ppo")["reference"] == before
    # Other sampling gives another evaluation.
    calls.unlink()
    longer[-1] = "4"
    assert run("ppo", *longer, "--top_k", "2", "--allow_config_change", "true") == 0
    assert calls.read_text() == "2 4 2 "
