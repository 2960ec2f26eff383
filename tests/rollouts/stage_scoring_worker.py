"""What each process does in test_stage_scoring.py: it scores packs in its stage while rows are sampled, and after."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onetrunk.models.base import decoder_layers
from onetrunk.models.pipeline import LayerSplit
from onetrunk.models.staged import keep_stage, staged
from onetrunk.ops.packing import PackLimits
from onetrunk.ppo.sampling import rollout_packs
from onetrunk.rollouts import SamplingParams
from onetrunk.rollouts.pipelined import PipelinedBackend
from onetrunk.rollouts.stage_scoring import StageScoring
from onetrunk.types import PackOutput
from tests.models.branches import a_trunk
from tests.models.sharding_worker import continued, packed
from tests.places import CPU, join_group
from tests.rollouts.small import PROMPTS

ROWS, MINIBATCHES, PAD_ID = 12, 4, 0
TEMPERATURE = 0.9
ROLES = ("policy", "value", "reference")
PARAMS = SamplingParams(max_completion_length=24, temperature=TEMPERATURE, stop_token_ids=tuple(range(4, 10)))
# name: (what builds the trunk, settings of the backend, tokens of a pack)
CASES: dict[str, tuple[Any, dict[str, Any], int | None]] = {
    "llama": (a_trunk, {}, None),
    "few at once": (a_trunk, {"rows_per_batch": 1}, None),
    "cut, value adapter": (partial(a_trunk, value_head="adapter", adapter_layers="top-2"), {}, 64),
    "gemma2, detached": (partial(a_trunk, "gemma2", value_head="detached"), {"batches": 3}, 64),
    "padding-free": (partial(packed, "mistral", value_head="adapter", adapter_layers="top-2"), {}, 64),
    "continued": (continued, {"rows_per_batch": 1}, None),
}
PADDING_FREE = ("padding-free",)


def equal(ours: Sequence[PackOutput], theirs: Sequence[PackOutput]) -> bool:
    """Return whether outputs have the same bits."""

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b if a is None or b is None else torch.equal(a, b)

    pairs = list(zip(ours, theirs, strict=True))
    return bool(pairs) and all(same(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def compare(name: str, stages: int, device: torch.device) -> dict[str, Any]:
    """Sample with scoring and without, twice each; return what differs."""
    build, settings, tokens = CASES[name]
    trunk = build()
    keep_stage(trunk, LayerSplit((len(decoder_layers(trunk)) // stages,) * stages), device)
    stage = staged(trunk)
    backend = PipelinedBackend(trunk, stages=stages, shares_rows=True, **settings)
    prompts, keys = [PROMPTS[i % len(PROMPTS)] for i in range(ROWS)], [(7, 0, i) for i in range(ROWS)]
    minibatches = torch.arange(ROWS).view(-1, MINIBATCHES).T.tolist()
    limits = PackLimits(2, tokens, name in PADDING_FREE)

    def scoring() -> StageScoring:
        return StageScoring(stage, prompts, minibatches, limits, PAD_ID, ROLES, TEMPERATURE)

    plain = backend.generate(prompts, PARAMS, keys)
    first, again = scoring(), scoring()
    rollout = backend.generate(prompts, PARAMS, keys, scoring=first)
    backend.generate(prompts, PARAMS, keys, scoring=again)
    packs = {tuple(item.rows): item.pack for item in rollout_packs(rollout, minibatches, limits, PAD_ID, device)}
    early = [packs[rows] for rows in first.outputs]
    after = stage.outputs(early, ROLES, TEMPERATURE)
    # Rows that were sampled ahead are finished before the call begins; some calls decode nothing else of a minibatch.
    ahead = backend.generate(prompts, PARAMS, keys, ahead=(prompts, [(7, 1, i) for i in range(ROWS)]))
    late = scoring()
    later = backend.generate(prompts, PARAMS, [(7, 1, i) for i in range(ROWS)], scoring=late)
    found = {tuple(x.rows): x.pack for x in rollout_packs(later, minibatches, limits, PAD_ID, device)}
    late_packs = [found[rows] for rows in late.outputs]
    return {
        "same_rows": rollout.completion_ids == plain.completion_ids == ahead.completion_ids,
        "lengths": [len(ids) for ids in rollout.completion_ids],
        "early": [list(rows) for rows in first.outputs],
        "share": first.scored_share,
        "has_outputs": [output is not None for output in first.outputs.values()],
        "known": equal(stage.known_outputs(early, ROLES, list(first.outputs.values())), after),
        "repeats": list(first.outputs) == list(again.outputs),
        "packs": len(packs),
        "late": equal(
            stage.known_outputs(late_packs, ROLES, list(late.outputs.values())),
            stage.outputs(late_packs, ROLES, TEMPERATURE),
        )
        if late_packs
        else None,
    }


def work(rank: int, folder: str, stages: int, names: list[str], place: str = CPU) -> None:
    """Write the facts of every case into `folder`."""
    device = join_group(place, folder, rank, stages)
    results = {name: compare(name, stages, device) for name in names}
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
