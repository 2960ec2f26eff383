"""Counts the operations of a decoded token and of a pack by model: on a GPU each is at least one launch.

    python scripts/bench/launches.py

They do not depend on widths, so the models are narrow, and PPOTrainer trains them on the CPU.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from decode_profile import FEW, Operations, count_operations, sampler
from transformers import AutoConfig, AutoModelForCausalLM
from workload import BOS, EOS, PAD, SHAPES, Workload

from onetrunk import PPOConfig, PPOTrainer
from onetrunk.models.speedups.fused_lora import casting_once
from onetrunk.types import to_device

# Family and layers; the rest of a shape changes no number.
MODELS = {
    "Qwen2.5-0.5B": ("qwen2", 24),
    "Qwen2.5-1.5B": ("qwen2", 28),
    "Llama-3.1-8B": ("llama", 32),
    "Qwen3-8B": ("qwen3", 36),
}
PACK_ROLES = ("policy", "value", "reference")


class CountingTrainer(PPOTrainer):
    """Counts the operations of a step, which has one pack: of scoring it, and of its forward and backward."""

    counted: dict[str, int]

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        """Score the pack and train on it."""
        experience = to_device(inputs["minibatch"].experiences[0], self.accelerator.device)
        roles = (*PACK_ROLES, "trunk") if self.model.cut else PACK_ROLES
        # The first pack casts the adapters for all that follow. A copy, because a pack keeps what is computed of it.
        with casting_once(model), torch.no_grad():
            model(pack=replace(experience.pack, places=None), roles=roles)
            with Operations() as score:
                model(pack=experience.pack, roles=roles)
        with Operations() as update:
            loss = super().training_step(model, inputs, *rest)
        self.counted = {"score": score.counts.total(), "update": update.counts.total()}
        return loss


def launches(
    family: str, layers: int, adapter_layers: str = "all", dtype: str = "bfloat16", **settings: Any
) -> dict[str, int]:
    """Return the operations of a decoded token ("decode") and of a pack ("score", "update") of a narrow model.

    Args:
        family: llama, qwen2 or qwen3.
        layers: of the model.
        adapter_layers: all, or top-k.
        dtype: of the base; bfloat16 runs under autocast.
        settings: of PPOConfig.
    """
    shape = {**SHAPES["tiny"], "num_hidden_layers": layers, "head_dim": 8}
    config = AutoConfig.for_model(family, **shape, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=BOS)
    settings |= {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    settings |= {"rollout_batch_size": 2, "num_rollouts": 1, "num_ppo_epochs": 1, "max_completion_length": 2}
    with tempfile.TemporaryDirectory() as folder:
        trainer = CountingTrainer(
            AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)),
            lambda completions, **_: [float(len(text)) for text in completions],
            PPOConfig(folder, bf16=dtype == "bfloat16", adapter_layers=adapter_layers, **settings),
            Dataset.from_dict({"prompt": ["w4 w5", "w6 w7 w8"]}),
            processing_class=Workload(shape="tiny").tokenizer(),
        )
        trainer.train()
    sample = sampler(trainer.sampler.backend, [[4, 5], [6, 7, 8]])
    few, many = (count_operations(lambda length=length: sample(length)).total() for length in (FEW, FEW + 4))
    return {"decode": (many - few) // 4, **trainer.counted}


def table() -> str:
    """Return the operations by model: in bfloat16 with all layers adapted and with a quarter, and in float32."""
    lines = ["| model, layers | decoded token | scored pack | trained pack |", "|---|---|---|---|"]
    for name, (family, layers) in MODELS.items():
        runs = (("all", "bfloat16"), (f"top-{layers // 4}", "bfloat16"), ("all", "float32"))
        counted = [launches(family, layers, *run) for run in runs]
        cells = (", ".join(str(counts[phase]) for counts in counted) for phase in counted[0])
        lines.append(f"| {name}, {layers} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
