"""What users of TRL's GRPOTrainer bring: a script in which two names change, and dashboards with its metric names."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onetrunk.ppo.trl_names import with_trl_names
from tests.ppo.support import base_model, prompts, trained
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
REWARD = """
def even_share(completion_ids, **kwargs):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


def test_the_names_of_trl_by_hand():
    logs = {"loss": 1.0, "score/mean": 0.5, "score/std": 0.1, "score/polite": 0.25, "completion/length": 20.0}
    logs |= {"kl/ref": 5.0, "completion/stopped_fraction": 0.75, "policy/entropy": 2.0, "policy/clip_fraction": 0.125}
    logs |= {"eval_score/mean": 0.75, "eval_completion/length": 10.0, "eval_kl/ref": 4.0, "eval_hard_score/mean": 0.2}
    expected = {"reward": 0.5, "reward_std": 0.1, "rewards/polite/mean": 0.25, "completions/mean_length": 20.0}
    expected |= {"kl": 0.25, "completions/clipped_ratio": 0.25, "entropy": 2.0, "clip_ratio/region_mean": 0.125}
    expected |= {"eval_reward": 0.75, "eval_completions/mean_length": 10.0, "eval_kl": 0.4, "eval_hard_reward": 0.2}
    assert with_trl_names(logs) == {**logs, **expected}


def test_every_name_of_trl_is_one_that_its_trainer_logs():
    path = importlib.util.find_spec("trl").submodule_search_locations[0]
    source = (Path(path) / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8")
    logs = {"score/mean": 1.0, "score/std": 1.0, "completion/length": 1.0, "kl/ref": 1.0, "policy/entropy": 1.0}
    logs |= {"policy/loss": 1.0, "policy/clip_fraction": 1.0, "completion/stopped_fraction": 1.0}
    logs |= {"sampling/logprob_gap_mean": 1.0, "sampling/logprob_gap_max": 1.0}
    for name in with_trl_names(logs).keys() - logs.keys():
        assert f'"{name}"' in source, name


@pytest.mark.parametrize("switch", [False, True])
def test_one_switch_logs_the_names_of_trl_too(tmp_path, switch):
    rows = {"eval_dataset": prompts(2), "eval_strategy": "epoch"}
    history = trained(tmp_path, num_train_epochs=1, log_trl_names=switch, **rows).state.log_history
    for name, ours in (("reward", "score/mean"), ("eval_reward", "eval_score/mean")):
        entries = [entry for entry in history if ours in entry]
        assert entries and all((name in entry) is switch for entry in entries)
        assert not switch or all(entry[name] == entry[ours] for entry in entries)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_of_trl_runs_with_two_names_changed(tmp_path):
    """TRL ships its GRPO script in the package."""
    path = importlib.util.find_spec("trl").submodule_search_locations[0]
    script = (Path(path) / "scripts" / "grpo.py").read_text(encoding="utf-8")
    changes = {
        "from trl import GRPOTrainer, get_dataset": "from onetrunk import PPOTrainer\n    from trl import get_dataset",
        "from trl import DatasetMixtureConfig, GRPOConfig, ": "from onetrunk import PPOConfig\n"
        "    from trl import DatasetMixtureConfig, ",
    }
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    script = script.replace("GRPOTrainer(", "PPOTrainer(").replace("GRPOConfig,", "PPOConfig,")
    (tmp_path / "ppo.py").write_text(script)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    (tmp_path / "data").mkdir()
    prompts(8).to_json(tmp_path / "data" / "train.jsonl")
    base_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    words = "--model_name_or_path base --dataset_name data --reward_funcs my_rewards.even_share --output_dir out"
    words += " --learning_rate 1e-3 --num_generations 2 --max_completion_length 4 --per_device_train_batch_size 2"
    words += " --beta 0.1 --epsilon 0.2 --use_peft --lora_target_modules q_proj v_proj --log_completions"
    words += " --max_steps 4 --rollout_batch_size 4 --use_cpu true --report_to none --log_trl_names true"
    words += " --save_strategy steps --save_steps 4"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    run = subprocess.run(
        [sys.executable, "ppo.py", *words.split()], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["target_modules"]
    history = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())["log_history"]
    assert {"reward", "completions/mean_length", "kl"} <= history[0].keys()
