"""What users of TRL's GRPOTrainer bring: a script in which two names change."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ppo.support import base_model, prompts
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
REWARD = """
def even_share(completion_ids, **kwargs):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


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
    words += " --max_steps 4 --rollout_batch_size 4 --use_cpu true --report_to none"
    words += " --save_strategy steps --save_steps 4"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path)])}
    run = subprocess.run(
        [sys.executable, "ppo.py", *words.split()], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["target_modules"]
    history = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())["log_history"]
    assert {"score/mean", "completion/length", "kl/ref"} <= history[0].keys()
