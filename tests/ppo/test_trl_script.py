"""What users of TRL's GRPOTrainer bring: a script in which two names change."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.ppo.support import base_model, prompts
from tests.processes import python
from tests.tiny import tiny_tokenizer

# In the manner of TRL's examples; only where the two names come from differs.
EXAMPLE = """
from datasets import Dataset
from onetrunk import PPOConfig as GRPOConfig, PPOTrainer as GRPOTrainer
from trl import ModelConfig, TrlParser, get_peft_config

if __name__ == "__main__":
    args, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
    args.model_init_kwargs = {
        "revision": model_args.model_revision, "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype, "trust_remote_code": args.trust_remote_code,
    }
    args.use_transformers_continuous_batching = True
    if args.transformers_continuous_batching_config is None:
        args.transformers_continuous_batching_config = {"use_cuda_graph": False}
    rows = Dataset.from_dict({"prompt": ["the cat", "a dog"], "wanted": [3, 5]})

    def length(completion_ids, wanted, **kwargs):
        return [-abs(len(ids) - number) for ids, number in zip(completion_ids, wanted)]

    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=length, args=args, train_dataset=rows,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(args.output_dir)
"""


def test_a_script_with_two_names_changed_runs_with_the_settings_that_trl_publishes(tmp_path, monkeypatch, capsys):
    base_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "grpo.py").write_text(EXAMPLE)
    # The command in the head of TRL's gspo.py, with a small generation_batch_size.
    words = "--model_name_or_path base --output_dir out --learning_rate 1e-5 --dtype float32 --use_peft"
    words += " --max_completion_length 8 --lora_target_modules q_proj v_proj --per_device_train_batch_size 8"
    words += " --num_generations 8 --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.0"
    words += " --loss_type grpo --gradient_accumulation_steps 2 --steps_per_generation 8 --generation_batch_size 16"
    words += " --max_steps 1 --use_cpu --report_to none"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo.py", *words.split()])
    runpy.run_path("grpo.py", run_name="__main__")
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    assert "rollout: 16 completions (2 prompts x 8), then 16 steps of 4 completions" in capsys.readouterr().err


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
    (tmp_path / "data").mkdir()
    prompts(8).to_json(tmp_path / "data" / "train.jsonl")
    base_model().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    words = (
        "--model_name_or_path base --dataset_name data --reward_funcs tests.ppo.support.even_share --output_dir out"
    )
    words += " --learning_rate 1e-3 --num_generations 2 --max_completion_length 4 --per_device_train_batch_size 2"
    words += " --gradient_accumulation_steps 2 --use_liger_kernel --num_iterations 2 --loss_type grpo"
    words += " --beta 0.1 --epsilon 0.2 --use_peft --lora_target_modules q_proj v_proj --log_completions"
    words += " --max_steps 4 --rollout_batch_size 4 --use_cpu true --report_to none"
    words += " --save_strategy steps --save_steps 4"
    python("ppo.py", *words.split(), cwd=tmp_path)
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["target_modules"]
    history = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())["log_history"]
    assert {"score/mean", "completion/length", "kl/ref"} <= history[0].keys()
