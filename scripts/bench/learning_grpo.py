"""TRL 1.16's GRPOTrainer on the study of learning: LoRA, groups of 8, the same completions and objective.

    python scripts/bench/learning_grpo.py --task four_tokens

Needs no other environment: TRL 1.16 is a dependency. The advantages are not divided by a group's standard deviation
(`scale_rewards`), so that `beta` weighs the KL against the score as it does in PPO. On `chain` and `dialogue` a
`rollout_func` with `env_mask` samples, because TRL's tools and environments need a chat template that shows tools; the
reward is the sum.
"""

from __future__ import annotations

import os

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import tempfile
import time
from typing import Any

import datasets
import torch
from datasets import Dataset
from learning_study import FOUR_RATES, Arm, Curve, Rule, parse, study
from learning_tasks import TINY_TASKS, TURN_TASKS
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUP = 8
# The best rate is lower than that of PPO.
RATES = {task: [{"learning_rate": rate} for rate in (1.25e-4, 2.5e-4, *FOUR_RATES)] for task in TINY_TASKS}
RATES |= {task: [{"learning_rate": rate} for rate in (5e-4, 1e-3, 2e-3)] for task in TURN_TASKS}
RATES["replies"] = [{"learning_rate": rate} for rate in (2.5e-4, 5e-4, 1e-3)]
RATES["rules"] = RATES["dialogue"] = [{"learning_rate": rate} for rate in (2.5e-4, 5e-4)]
ARMS = [Arm("grpo", {"scale_rewards": "none"}, RATES)]


class Recorder(TrainerCallback):
    """Keeps score, KL and CPU seconds of every rollout."""

    def __init__(self, rule: Rule, steps_per_rollout: int) -> None:
        self.curve, self.rule, self.steps = Curve(), rule, steps_per_rollout
        self.start = self.score = self.kl = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "kl" not in logs:
            return
        place = (state.global_step - 1) % self.steps
        if place == 0:
            # The first step of a rollout is on policy: its mean KL per token estimates that of its completions.
            self.score, self.kl = self.rule.taken(), logs["kl"] * logs["completions/mean_length"]
        if place == self.steps - 1:
            self.curve.add(self.score, self.kl, time.process_time() - self.start)


def rollout_func(task: Any, tokenizer: Any) -> Any:
    """Return TRL's rollout function for the episodes of a task."""

    def play(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids = torch.tensor(tokenizer(prompts)["input_ids"])
        episodes = task.play(trainer.model, prompt_ids)
        return {
            "prompt_ids": prompt_ids.tolist(),
            "completion_ids": [episode.ids for episode in episodes],
            "logprobs": [episode.logprobs for episode in episodes],
            "env_mask": [[int(turn >= 0) for turn in episode.turns] for episode in episodes],
        }

    return play


def make_trainer(
    task: Any, rule: Rule, settings: dict[str, Any], seed: int, rollouts: int, folder: str
) -> GRPOTrainer:
    """Return TRL's trainer of a task, with the settings of the learning tests under TRL's names."""
    given = task.settings
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        seed=seed,
        num_generations=GROUP,
        per_device_train_batch_size=given["rollout_batch_size"],
        num_iterations=given["num_ppo_epochs"],
        steps_per_generation=1,
        max_steps=rollouts * given["num_ppo_epochs"],
        max_completion_length=task.length,
        beta=task.beta,
        epsilon=given["epsilon"],
        lr_scheduler_type=given["lr_scheduler_type"],
        weight_decay=given["weight_decay"],
        max_grad_norm=given["max_grad_norm"],
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    model = task.model(seed)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = task.pad_id, task.eos_id
    trainer = GRPOTrainer(
        model,
        rule.function(),
        config,
        Dataset.from_dict({"prompt": [task.text(row) for row in task.prompts(seed).tolist()]}),
        processing_class=rule.tokenizer,
        peft_config=LoraConfig(**task.lora, task_type="CAUSAL_LM"),
        rollout_func=rollout_func(task, rule.tokenizer) if hasattr(task, "play") else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(task: Any, settings: dict[str, Any], seed: int, rollouts: int) -> tuple[Curve, dict[str, Any]]:
    """Train once."""
    with tempfile.TemporaryDirectory() as folder:
        rule = Rule(task, task.tokenizer())
        trainer = make_trainer(task, rule, settings, seed, rollouts, folder)
        recorder = Recorder(rule, task.settings["num_ppo_epochs"])
        trainer.add_callback(recorder)
        trainer.train()
    return recorder.curve, task.held_out(trainer.model)


def main(arguments: list[str] | None = None) -> None:
    datasets.disable_progress_bars()
    study(parse(__doc__.split("\n\n")[0], ARMS, arguments), ARMS, run)


if __name__ == "__main__":
    main()
