"""Decides where a run keeps its trunk states, and says at the start what the cut saves and costs.

Knows the settings, the trunk's shape and the memory of the machine; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from onetrunk.costs import ModelShape, reuse_saving, trunk_states_bytes
from onetrunk.models.backbone import decoder_layers
from onetrunk.models.trunk_cache import TrunkCache, choose_place
from onetrunk.models.trunk_model import TrunkModel
from onetrunk.trainers.batch_plan import plan_batches
from onetrunk.trainers.ppo_config import PPOConfig


@dataclass(frozen=True)
class TrunkPlan:
    """What becomes of the states at the cut.

    Args:
        cache: where they stay; None: they are made in every forward, or there is no cut.
        report: one line for a person.
    """

    cache: TrunkCache | None
    report: str


def plan_trunk(trunk: TrunkModel, args: PPOConfig, longest_prompt: int) -> TrunkPlan:
    """Return the TrunkPlan of a run.

    Args:
        trunk: the model, with `cut`.
        args: the settings.
        longest_prompt: tokens.

    Raises:
        ValueError: a place was asked for, and there is nothing to keep.
    """
    base = trunk.get_base_model()
    num_layers = len(decoder_layers(base))
    if not trunk.cut:
        if args.trunk_cache in ("device", "cpu", "disk"):
            raise ValueError(
                f"trunk_cache {args.trunk_cache!r} has nothing to keep: layer 0 carries an adapter that trains; set"
                " adapter_layers to top-k with k below the number of layers, or trunk_cache to 'auto'"
            )
        return TrunkPlan(None, f"trunk: adapters train on all {num_layers} layers, nothing to reuse")
    lower = f"trunk: the lower {trunk.cut} of {num_layers} layers are frozen and alike for every role"
    if args.trunk_cache == "off":
        return TrunkPlan(None, f"{lower}; trunk_cache is off: they run in every forward")
    shape = ModelShape.from_config(base.config.get_text_config())
    row_tokens = longest_prompt + args.max_completion_length
    rows = plan_batches(args, args.world_size).rows_per_rank
    num_bytes = trunk_states_bytes(shape, rows * row_tokens, base.dtype.itemsize)
    place = choose_place(args.trunk_cache, num_bytes, args.device)
    saving = reuse_saving(shape, trunk.cut, args.num_ppo_epochs, args.max_completion_length / row_tokens)
    where = {"device": f"on {args.device}", "cpu": "in this machine's memory", "disk": f"on disk ({args.output_dir})"}
    report = (
        f"{lower} and run once a rollout: {saving:.0%} less work in scoring and update, for at most"
        f" {num_bytes / 2**20:,.1f} MiB of states {where[place]}"
    )
    return TrunkPlan(TrunkCache(place, Path(args.output_dir)), report)
