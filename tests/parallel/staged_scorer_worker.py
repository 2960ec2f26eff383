"""What each process does in test_staged_scorer.py: every case in one process and in stages, compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from onetrunk.models.loading import base_fingerprint
from onetrunk.ops.losses import bradley_terry_loss
from onetrunk.parallel.groups import staged
from onetrunk.parallel.sharding import whole_size
from onetrunk.parallel.staged import keep_stage, reduce_gradients
from onetrunk.parallel.stages import LayerSplit
from onetrunk.reward_models.training import MODEL_INPUTS, PairCollator
from tests.models.branches import gradients
from tests.parallel.split_worker import relative_difference
from tests.parallel.staged_worker import noted_schedules
from tests.places import CPU, join_group
from tests.tiny import tiny_model

# Of unequal lengths: 5 pairs, one row of a single token.
CHOSEN = [[4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30], [17, 40, 41, 42, 43], [7] * 12]
REJECTED = [[4, 5, 6, 9, 1], [20, 21, 22, 25, 26, 27, 28], [31, 32], [17, 40], [9, 8, 7]]


def a_scorer(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> PeftModel:
    """Return a reward adapter on a tiny base, with weights away from their start."""
    config = tiny_model(family).config
    config.num_labels, config.pad_token_id = 1, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        base = AutoModelForSequenceClassification.from_config(config).to(dtype)
        return with_adapter(base, **settings)


def with_adapter(base: Any, **settings: Any) -> PeftModel:
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    config = LoraConfig(**{"r": 4, "target_modules": targets, "task_type": "SEQ_CLS", **settings})
    model = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(0.2 * torch.randn(parameter.shape))
    return model


def cases() -> dict[str, dict[str, Any]]:
    """Return what builds the model of each case, and what else differs from the usual."""
    return {
        "llama": {"build": a_scorer},
        "gemma2": {"build": partial(a_scorer, "gemma2")},
        "top-2": {"build": partial(a_scorer, layers_to_transform=[2, 3])},
        "uneven": {"build": partial(a_scorer, layers_to_transform=[2, 3]), "sizes": (1, 3)},
        "checkpointing": {"build": partial(a_scorer, layers_to_transform=[2, 3]), "checkpointing": True},
        "one microbatch": {"build": a_scorer, "number": 1},
    }


def a_batch() -> dict[str, Tensor]:
    """Return pairs of ragged rows with soft labels."""
    collator = PairCollator(0)
    labels = (0.9, 0.2, 0.6, 1.0, 0.7)
    rows = zip(CHOSEN, REJECTED, labels, strict=True)
    return collator([{"chosen_ids": c, "rejected_ids": r, "probability": p} for c, r, p in rows])


def loss_of(model: Callable[..., Any], batch: dict[str, Any]) -> Tensor:
    """Return the share of a part of a batch in its Bradley-Terry loss."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    chosen, rejected = logits.squeeze(-1).chunk(2)
    loss = bradley_terry_loss(chosen, rejected, batch["probability"])
    return loss * len(chosen) / PairCollator.denominators(batch)[1]


def compare(rank: int, world_size: int, stages: int, case: dict[str, Any]) -> dict[str, Any]:
    """Return what differs between a reward adapter in one process and in stages."""
    whole, divided = case["build"]().train(), case["build"]().train()
    if case.get("checkpointing"):
        # As the trainer of TRL does it.
        for model in (whole, divided):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    size, fingerprint = whole_size(divided), base_fingerprint(divided.get_base_model())
    split = LayerSplit.even(divided, stages, case.get("sizes"))
    keep_stage(divided, split, torch.device(CPU))
    own, batch = staged(divided), a_batch()
    # Each pipeline has pairs of its own; together they have those of one process.
    every = PairCollator(0).parts(batch, case.get("number", 5))
    parts = every[rank // stages :: world_size // stages]
    expected_loss = loss_of(whole, batch)
    expected_loss.backward()
    of_batch = gradients(whole)
    whole.zero_grad(set_to_none=True)
    for part in every:
        loss_of(whole, part).backward()
    losses: list[float] = []

    def noted_loss(number: int, model: Any) -> Tensor:
        loss = loss_of(model, parts[number])
        losses.append(loss.item())
        return loss

    with noted_schedules() as schedules:
        # The second step must not add what the first has left.
        for _ in range(2):
            divided.zero_grad(set_to_none=True)
            outputs = own.update([{name: part[name] for name in MODEL_INPUTS} for part in parts], noted_loss)
            reduce_gradients(divided)
    rows = {name: batch[name] for name in MODEL_INPUTS}
    with torch.no_grad():
        expected = whole.eval()(**rows).logits
        found = divided.eval()(**rows).logits
        trained = torch.cat([whole(**{name: part[name] for name in MODEL_INPUTS}).logits for part in parts])
    return {
        "losses": losses,
        "loss": expected_loss.item(),
        "schedules": schedules,
        "scores": relative_difference({"scores": found}, {"scores": expected.float()}),
        "trained scores": relative_difference(
            {"scores": torch.cat([output.logits for output in outputs])}, {"scores": trained.float()}
        ),
        "gradients": relative_difference(gradients(divided), gradients(whole)),
        "gradients of the batch": relative_difference(gradients(divided), of_batch),
        "identity": base_fingerprint(divided.get_base_model()) == fingerprint and whole_size(divided) == size,
    }


def work(rank: int, folder: str, world_size: int, stages: int, names: list[str]) -> dict[str, Any]:
    """Return the facts of every case."""
    join_group(CPU, folder, rank, world_size)
    every = cases()
    return {name: compare(rank, world_size, stages, every[name]) for name in names}
