"""What credit over compacted contexts is worth on SmolLM2-135M: the recipe `remember`, with the arms of compaction.py.

    python scripts/bench/compaction_text.py --arms "inside segments" "summaries masked" --rollouts 8

Needs what recipes/remember makes before PPO (runs/remember), and the root of the repository in PYTHONPATH. The
learning rate follows the recipe's 20 rollouts, of which the first `--rollouts` run, about 70 CPU seconds each on a
quiet machine. Results: learning/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
import yaml
from compaction import ARMS
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback

from onetrunk import PPOConfig, PPOTrainer
from onetrunk.data.files import load_rows
from onetrunk.utils.import_path import find_object

RECIPE = Path(__file__).parents[2] / "recipes" / "remember" / "ppo.yaml"
# What the command makes of these keys, this script makes itself.
OF_COMMAND = (
    "model_name_or_path",
    "dtype",
    "lora_r",
    "lora_alpha",
    "dataset_name",
    "eval_dataset_name",
    "environment",
)


class Watch(TrainerCallback):
    """Prints the score of each rollout, and ends the run after `rollouts` of them."""

    def __init__(self, arm: str, rollouts: int):
        self.arm, self.rollouts, self.scores, self.start = arm, rollouts, [], time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "score/mean" not in logs:
            return
        self.scores.append(logs["score/mean"])
        tokens = logs.get("episode/summary_tokens", float("nan"))
        seconds = time.process_time() - self.start
        print(
            f"| {self.arm} | {len(self.scores)} | {self.scores[-1]:.3f} | {tokens:.1f} | {seconds:.0f} |", flush=True
        )
        control.should_training_stop = len(self.scores) == self.rollouts


def run(arm: str, recipe: dict[str, Any], rollouts: int, folder: str) -> None:
    """Train once, and print a line per rollout."""
    stream, settings = ARMS[arm]
    given = {name: value for name, value in recipe.items() if name not in OF_COMMAND}
    given |= {"output_dir": folder, "report_to": "none", "logging_steps": 1, "disable_tqdm": True, **settings}
    given["model_init_kwargs"] = {"dtype": recipe["dtype"]}
    trainer = PPOTrainer(
        recipe["model_name_or_path"],
        None,
        PPOConfig(**given),
        load_rows(recipe["dataset_name"]),
        peft_config=LoraConfig(r=recipe["lora_r"], lora_alpha=recipe["lora_alpha"]),
        environment_factory=find_object(recipe["environment"], "environment"),
    )
    start = trainer.processing_class("<|im_start|>system", add_special_tokens=False)["input_ids"]
    trainer.stream_class = type(stream.__name__, (stream,), {"start": tuple(start)})
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watch(arm, rollouts))
    trainer.train()


def main(arguments: list[str] | None = None) -> int:
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["chain", "inside segments", "summaries masked"])
    parser.add_argument("--rollouts", type=int, default=8)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    recipe = yaml.safe_load(RECIPE.read_text())
    print("| credit | rollout | score | tokens of a summary | CPU s so far |\n|---|---|---|---|---|", flush=True)
    for arm in given.arms:
        with tempfile.TemporaryDirectory() as folder:
            run(arm, recipe, given.rollouts, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
