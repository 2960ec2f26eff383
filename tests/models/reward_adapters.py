"""Reward adapters as PEFT saves them beside a tiny base, and what transformers and PEFT say with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from onetrunk.models.build import attach_score_adapter
from onetrunk.models.reward_model import ScoreAdapter, read_score_adapter
from onetrunk.models.trunk import TrunkModel
from onetrunk.types import Pack
from tests.models.branches import a_trunk
from tests.tiny import tiny_model, tiny_tokenizer

TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "phi3": ["qkv_proj", "down_proj"]}


def scorer_config(**overrides: Any) -> LlamaConfig:
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(initializer_range=0.25, **{"vocab_size": 64, "num_labels": 1, **fields, **overrides})


def a_scorer(**overrides: Any) -> LlamaForSequenceClassification:
    """Return a reward model with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForSequenceClassification(scorer_config(**overrides)).eval()


def saved_base(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Write a tiny base and its tokenizer into a folder, and return it."""
    tiny_model(family, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def saved_reward_adapter(
    folder: Path,
    base: Path,
    *,
    layers: list[int] | None = None,
    num_labels: int = 1,
    tokenizer: Any = None,
    seed: int = 5,
    **settings: Any,
) -> Path:
    """Write a reward adapter with weights away from 0 into a folder, as TRL's RewardTrainer leaves it; return it.

    Args:
        layers: that it changes; None: all.
        tokenizer: saved beside it; None: none is.
    """
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels)
    targets = TARGETS.get(model.config.model_type, ["q_proj", "v_proj", "up_proj", "down_proj"])
    config = {"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "SEQ_CLS"}
    peft = get_peft_model(model, LoraConfig(**config, layers_to_transform=layers, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in peft.parameters() if p.requires_grad):
            drawn = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn if parameter.dim() > 1 else parameter + drawn)
    peft.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def scores_of_a_separate_model(folder: Path, base: Path, pack: Pack, pad_token_id: int | None = 0) -> Tensor:
    """Return the scores [R] that PEFT gives on a sequence-classification model of its own."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.config.pad_token_id = pad_token_id
    model = PeftModel.from_pretrained(model, folder).eval()
    rows = [row[mask.bool()][None] for row, mask in zip(pack.input_ids, pack.attention_mask, strict=True)]
    return torch.cat([model(input_ids=row).logits[:, 0] for row in rows])


def a_reward_trunk(family: str, base: Path, folder: Path, pad_token_id: int | None = 0, **settings: Any) -> TrunkModel:
    """Return a trunk on a saved family's base with moved branches and a reward adapter."""
    trunk = a_trunk(family, **settings)
    adapter = read_score_adapter(str(folder))
    attach_score_adapter(trunk, ScoreAdapter(**vars(adapter) | {"pad_token_id": pad_token_id}))
    return trunk
