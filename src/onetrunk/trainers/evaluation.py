"""Held-out evaluation: sample, score, and measure the KL of a policy to its reference.

The same prompts get the same random numbers at every evaluation, so that differences are the policy's. Knows the sampler
and the model's roles; no optimizer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset

from onetrunk.models.trunk_model import TrunkModel
from onetrunk.ops.packing import make_pack, plan_packs
from onetrunk.trainers.rollout_figures import rollout_figures
from onetrunk.trainers.sampling import EVALUATION_STREAM, Sampler, ScoredRollout, prompt_batch
from onetrunk.types import Pack, to_device


def evaluate_prompts(
    model: TrunkModel,
    sampler: Sampler,
    dataset: Dataset,
    accelerator: Accelerator,
    *,
    seed: int,
    rows_per_pack: int,
    role: str = "policy",
    extras: dict[str, Any] | None = None,
) -> tuple[dict[str, float], ScoredRollout]:
    """Return the figures of one completion per prompt, and this process's scored rollout.

    Args:
        model: the trunk; `role` samples.
        sampler: backend, reward functions, tokenizer, sampling parameters.
        dataset: rows with `prompt` and `prompt_ids`, dealt to the processes in turn.
        accelerator: processes, device and autocast.
        seed: of the completions.
        rows_per_pack: most rows in one scoring forward.
        role: "policy", or "reference" for the figures before training (its KL to itself is not reported).
        extras: keywords for the reward functions.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    share = math.ceil(len(dataset) / world)
    # Every process has as many rows, for the figures are gathered; surplus rows come again from the start.
    rows = [(rank + i * world) % len(dataset) for i in range(share)]
    batch = prompt_batch(dataset, rows, [(seed, EVALUATION_STREAM, row) for row in rows])
    with torch.no_grad(), accelerator.autocast(), model.as_role(role):
        sampler.backend.sync(model, 0)
        rollout = sampler.generate(batch)
    scored = sampler.score(batch, rollout, **(extras or {}))
    packs = _packs(scored, rows_per_pack, sampler.params.pad_token_id) if role == "policy" else []
    packs = [to_device(pack, accelerator.device) for pack in packs]
    temperature = sampler.params.temperature or 1.0
    was_training = model.training
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        outputs = [model(pack=pack, roles=("policy", "reference"), temperature=temperature) for pack in packs]
    model.train(was_training)
    figures = rollout_figures(scored, packs, outputs, accelerator)
    del figures["num_tokens"]
    return figures, scored


def _packs(scored: ScoredRollout, rows_per_pack: int, pad_id: int) -> list[Pack]:
    rollout = scored.rollout
    lengths = [len(p) + len(c) for p, c in zip(rollout.prompt_ids, rollout.completion_ids, strict=True)]
    return [
        make_pack([rollout.prompt_ids[i] for i in rows], [rollout.completion_ids[i] for i in rows], pad_id)
        for rows in plan_packs(lengths, rows_per_pack, None)
    ]
