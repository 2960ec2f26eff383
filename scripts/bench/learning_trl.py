"""TRL 1.12.0's PPOTrainer on the study of learning, with its full critic: LoRA policy, and full fine-tuning.

    python scripts/bench/learning_trl.py --task four_tokens

Needs the environment of trl_baseline.txt, and the repository's root and src in PYTHONPATH for the tasks. The score is
a rule, and TRL wants a reward model: the rule is wrapped as a module with the interface that TRL calls.
"""

from __future__ import annotations

import os

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import contextlib
import io
import tempfile
import time
from typing import Any

import torch
import trl.experimental.ppo.ppo_trainer as ppo
from datasets import Dataset
from learning_study import Arm, Curve, parse, study
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2ForSequenceClassification, set_seed
from transformers.modeling_outputs import BaseModelOutput

from tests import learning

LORA_RATES = {"four_tokens": (1e-3, 3e-3, 1e-2), "sums": (5e-4, 1e-3, 2e-3, 4e-3)}
FULL_RATES = {"four_tokens": (3e-4, 1e-3, 3e-3), "sums": (5e-5, 1e-4, 3e-4, 1e-3)}
ARMS = [
    Arm(name, {"lora": name == "trl-lora"}, {t: [{"learning_rate": rate} for rate in rates[t]] for t in rates})
    for name, rates in (("trl-lora", LORA_RATES), ("trl-full", FULL_RATES))
]


class RuleBackbone(nn.Module):
    """Gives every position of a row the score of its completion as the hidden state.

    Args:
        task: knows the score.
        prompt_length: tokens of every prompt.
    """

    def __init__(self, task: Any, prompt_length: int):
        super().__init__()
        self.task = task
        self.prompt_length = prompt_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> BaseModelOutput:
        """Return hidden states [rows, tokens, 1]."""
        rows = [ids[mask].tolist() for ids, mask in zip(input_ids, attention_mask.bool(), strict=True)]
        cut = self.prompt_length
        scores = torch.tensor([self.task.score(row[:cut], row[cut:]) for row in rows])
        hidden = scores[:, None, None].expand(*input_ids.shape, 1)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden,))


class RuleAsModel(nn.Module):
    """What TRL's get_reward reads of a sequence-classification model: a backbone and a score head."""

    base_model_prefix = "backbone"

    def __init__(self, task: Any, prompt_length: int):
        super().__init__()
        self.backbone = RuleBackbone(task, prompt_length)
        self.score = nn.Identity()


def critic(policy: PreTrainedModel) -> PreTrainedModel:
    """Return TRL's full value model: the policy's own weights at the start, and a head at zero as ours."""
    config = type(policy.config).from_dict({**policy.config.to_dict(), "num_labels": 1})
    model = Qwen2ForSequenceClassification(config)
    model.model.load_state_dict(policy.model.state_dict())
    nn.init.zeros_(model.score.weight)
    return model


def ppo_config(task: Any, settings: dict[str, Any], seed: int, rollouts: int, folder: str) -> ppo.PPOConfig:
    """Return TRL's settings: those of the learning tests under TRL's names."""
    given, rows = learning.SETTINGS, learning.SETTINGS["rollout_batch_size"]
    return ppo.PPOConfig(
        output_dir=folder,
        seed=seed,
        per_device_train_batch_size=rows,
        local_rollout_forward_batch_size=rows,
        num_mini_batches=given["num_minibatches"],
        num_ppo_epochs=given["num_ppo_epochs"],
        total_episodes=rows * rollouts,
        response_length=task.length,
        stop_token="eos",
        temperature=1.0,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=given["lr_scheduler_type"],
        weight_decay=given["weight_decay"],
        kl_coef=task.beta,
        kl_estimator=given["kl_estimator"],
        vf_coef=0.1,
        cliprange=given["epsilon"],
        cliprange_value=0.2,
        gamma=given["gamma"],
        lam=given["lam"],
        missing_eos_penalty=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        num_sample_generations=0,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )


def make_trainer(task: Any, settings: dict[str, Any], seed: int, rollouts: int, folder: str) -> ppo.PPOTrainer:
    """Return TRL's trainer of a task."""
    set_seed(seed)
    policy, prompts = task.model(seed), task.prompts(seed)
    data = Dataset.from_dict({"input_ids": prompts.tolist(), "attention_mask": torch.ones_like(prompts).tolist()})
    return ppo.PPOTrainer(
        ppo_config(task, settings, seed, rollouts, folder),
        task.tokenizer(),
        policy,
        None,
        RuleAsModel(task, prompts.shape[1]),
        data,
        critic(policy),
        peft_config=LoraConfig(**learning.LORA, task_type="CAUSAL_LM") if settings["lora"] else None,
    )


def run(task: Any, settings: dict[str, Any], seed: int, rollouts: int) -> tuple[Curve, dict[str, Any]]:
    """Train once."""
    before = {f"{name}_before": value for name, value in task.held_out(task.model(seed)).items()}
    curve = Curve()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(task, settings, seed, rollouts, folder)
        start = time.process_time()

        def record(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            curve.add(logs["objective/scores"], logs["objective/kl"], time.process_time() - start)

        trainer.log = record
        trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return curve, {"trained": trained, **before, **task.held_out(trainer.model.policy)}


def main(arguments: list[str] | None = None) -> None:
    study(parse(__doc__.split("\n\n")[0], ARMS, arguments), ARMS, run)


if __name__ == "__main__":
    main()
