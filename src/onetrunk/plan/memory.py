"""Memory of a device by part: of a trainer's process or stage, and of a sampler.

The formulas are those of `costs.py`. What no formula gives (the working set of a layer, copies of tokens for experts,
what sharding gathers) has constants that were fitted to measured peaks, by `scripts/plan/measurements.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from onetrunk.costs import ModelShape, trunk_states_bytes
from onetrunk.plan.costs import (
    kept_activations_bytes,
    kv_cache_bytes,
    layers_above,
    packs_in_flight,
    sampling_bytes,
    stage_buffers,
    stage_weights,
)
from onetrunk.plan.hardware import GIB
from onetrunk.plan.job import ADAM_BYTES, FP32, HALF_BYTES, Job, base_weights_bytes
from onetrunk.plan.timing import (
    COLOCATED,
    PADDING,
    SERVER,
    SampleLayout,
    TrainLayout,
    engine_bytes,
    most_rows_of,
    packs_of,
    shares_base,
    split_of,
    streams_of,
)

# Captured graphs and buffers of a vLLM server.
SERVER_GIB = 2.0
# Tokens and columns of a tile of logits, and the bytes of its float32 buffers per entry.
TILE, TILE_BYTES = (1024, 8192), 12
# Rollouts that `schedule async` samples ahead.
ASYNC_STALENESS = 2
# Parts of a trainer's device that stay while it samples.
KEPT = ("weights", "adapters", "gradients", "optimizer", "states", "reward", "runtime")
Parts = dict[str, float]


class Constants(NamedTuple):
    """Fitted numbers of a training's memory.

    Args:
        runtime_gib: of a process: kernels, buffers of collectives, fragments.
        per_hidden, per_width, per_copy: bytes of a layer's working set per token and hidden size, per token and width
            of the feed-forward block, and per token, expert and hidden size.
        gathered: bytes per gathered weight (two layers and the embedding), over those of bfloat16.
    """

    runtime_gib: float
    per_hidden: float
    per_width: float
    per_copy: float
    gathered: float


# What scripts/plan/measurements.py fits to all measured rows; tests/plan/test_memory.py holds them equal.
FITTED = Constants(runtime_gib=0.0784, per_hidden=34.19, per_width=13.98, per_copy=21.24, gathered=1.675)


@dataclass(frozen=True)
class Training:
    """A training of adapters on a frozen base on one device, as memory sees it.

    Args:
        base_bytes: bytes of a weight of the base.
        trained: weights that train on the device, and their gradients and moments.
        shards: devices that share the base.
        tensor: devices that divide every matrix.
        layers: whose inputs are kept for the backward; None: all.
        itemsize: bytes of an activation.
        gathers: whether other devices have a part of the weights.
    """

    shape: ModelShape
    tokens: int
    base_bytes: float
    trained: float
    optimizer_bytes: float = ADAM_BYTES
    shards: int = 1
    tensor: int = 1
    layers: int | None = None
    itemsize: float = 2.0
    is_checkpointed: bool = True
    is_offloaded: bool = False
    gathers: bool = True


def features(training: Training) -> list[float]:
    """Return what the fitted constants are multiplied with, in their order; bytes."""
    shape, tokens = training.shape, training.tokens / training.tensor
    gathered = 2 * (shape.head_parameters + 2 * shape.layer_parameters) if training.gathers else 0
    widths = (shape.hidden_size, shape.active_width, shape.experts_per_token * shape.hidden_size)
    return [GIB, *(tokens * width * training.itemsize / 2 for width in widths), gathered / training.tensor]


def training_parts(training: Training, constants: Constants = FITTED) -> Parts:
    """Return the bytes of a device at the peak of an update, by part."""
    shape, layers = training.shape, training.layers if training.layers is not None else training.shape.num_layers
    kept = kept_activations_bytes(shape, training.tokens, layers, training.itemsize, training.is_checkpointed)
    runtime, *working, gathered = (a * b for a, b in zip(constants, features(training), strict=True))
    return {
        "weights": base_weights_bytes(shape, training.base_bytes) / training.shards / training.tensor,
        "adapters": FP32 * training.trained,
        "gradients": FP32 * training.trained,
        "optimizer": training.optimizer_bytes * training.trained,
        "activations": sum(working) + (0.0 if training.is_offloaded else kept / training.tensor),
        "logits": TILE_BYTES * min(TILE[0], training.tokens) * min(TILE[1], shape.vocab_size),
        "transient": gathered,
        "runtime": runtime,
    }


def train_memory(job: Job, train: TrainLayout) -> dict[str, Parts]:
    """Return the bytes of a trainer's device, by part, in scoring and in the update.

    Of training stages it is the one that needs most in each phase.
    """
    stages = train_memories(job, train)
    return {
        phase: max((stage[phase] for stage in stages), key=lambda parts: sum(parts.values()))
        for phase in ("score", "update")
    }


def train_memories(job: Job, train: TrainLayout) -> list[dict[str, Parts]]:
    """Return the bytes of the device of each training stage, by phase and part; without stages there is one."""
    if not train.is_staged:
        return [_process_memory(job, train, job.adapted_layers)]
    sizes, streams = split_of(train, job.shape), streams_of(job, train)
    weights, above = stage_weights(job.shape, sizes), layers_above(sizes, job.adapted_layers)
    all_packs, tokens = packs_of(job, train).number, forward_tokens(job, train)
    packs = all_packs // job.num_minibatches
    state = tokens * job.shape.hidden_size * job.itemsize
    shared, memories = _process_memory(job, train, 0), []
    for stage, layers in enumerate(above):
        flying = layers * packs_in_flight(stage, len(sizes), packs)
        kept = kept_activations_bytes(job.shape, tokens, flying, job.itemsize, train.is_checkpointed)
        own = {"weights": weights[stage] * train.base_bytes}
        score, update = (number * state for number in stage_buffers(streams, stage, packs, all_packs))
        active = {"activations": shared["update"]["activations"] + kept}
        memories.append(
            {
                "score": shared["score"] | own | {"buffers": score},
                "update": shared["update"] | own | active | {"buffers": update},
            }
        )
    return memories


def _process_memory(job: Job, train: TrainLayout, layers: int) -> dict[str, Parts]:
    """Return the bytes of a process in scoring and in the update; `layers` keep the activations of a pack."""
    training = Training(
        job.shape, forward_tokens(job, train), train.base_bytes, job.adapter_weights, job.optimizer_bytes,
        train.shards, train.tensor, layers, job.itemsize, train.is_checkpointed,
        train.is_offloaded, gathers=train.shards > 1,
    )  # fmt: skip
    update = training_parts(training)
    update["adapters"] += FP32 * job.frozen_copies * job.adapter_weights
    update["runtime"] += train.device.rates.runtime_gib * GIB
    # A sharded or divided base keeps the states on each device of a group; training stages keep none.
    if job.adapted_layers < job.shape.num_layers and job.keeps_states and not train.is_staged:
        rows = max(1, job.rows // train.data)
        kept = int(rows * job.lengths.row * (1.0 if job.is_padding_free else PADDING))
        update["states"] = trunk_states_bytes(job.shape, kept, int(job.itemsize))
    if job.reward is not None and not train.serves_reward:
        update["reward"] = job.reward.parameters * job.reward_bytes
    # Without gradients the working set of one layer is in memory at a time.
    alone = training_parts(replace(training, is_checkpointed=True, layers=1))
    return {"score": update | {"activations": alone["activations"], "gradients": 0.0}, "update": update}


def forward_tokens(job: Job, train: TrainLayout) -> int:
    """Return the most tokens of a forward of a layout."""
    rows = max(1, job.rows // train.data // job.num_minibatches)
    return int(min(min(rows, train.rows) * job.lengths.width, max(train.tokens, job.lengths.width)))


def sample_memory(
    job: Job, train: TrainLayout, sample: SampleLayout, trainer: Mapping[str, float]
) -> dict[str, Parts]:
    """Return the bytes of a device while it samples; "server" where the sampler has devices of its own.

    Of a pipeline of the trainer's processes it is the stage that needs most.
    """
    if sample.engine == SERVER:
        return {"server": dict(engine_parts(job, sample))}
    if sample.engine == COLOCATED:
        added = engine_parts(replace(job, base_bytes=train.base_bytes), sample)
    else:
        added = max(stage_parts(job, train, sample), key=lambda parts: sum(parts.values()))
    # Weights of training stages are those of the stage that samples; an engine and its trainer can have one copy.
    is_one = train.is_staged or shares_base(job, train, sample)
    kept = {name: trainer[name] for name in KEPT if name in trainer and not (name == "weights" and is_one)}
    return {"generate": kept | {name: kept.get(name, 0.0) + value for name, value in added.items()}}


def stage_parts(job: Job, train: TrainLayout, sample: SampleLayout) -> list[Parts]:
    """Return the bytes that the trainer's own loop adds in each stage by part; without stages there is one.

    Stages that also train differ in their weights, which are among the parts then.
    """
    sizes, rows = split_of(sample, job.shape), _decoding_rows(job, sample)
    gathered = train.base_bytes if train.shards > 1 else 0.0
    stages = sampling_bytes(
        job.shape, sizes, rows, job.lengths.width, job.itemsize, batches=sample.stages, gathered=gathered
    )
    if train.is_staged:
        weights = stage_weights(job.shape, sizes)
        return [parts | {"weights": n * train.base_bytes} for parts, n in zip(stages, weights, strict=True)]
    return [{name: value / sample.tensor for name, value in parts.items()} for parts in stages]


@functools.lru_cache(maxsize=4096)
def engine_parts(job: Job, sample: SampleLayout) -> Mapping[str, float]:
    """Return the bytes of a device that a vLLM engine takes, by part; of rows of mean length, because it has pages."""
    adapters = job.adapter_weights * (2 + (1 if job.schedule == "sync" else ASYNC_STALENESS))
    cached, size = int(_decoding_rows(job, sample) * job.lengths.row), engine_bytes(job, sample)
    itemsize = int(max(HALF_BYTES, size))
    return {
        "weights": base_weights_bytes(job.shape, size) / sample.tensor,
        "adapters": itemsize * adapters / sample.tensor,
        "kv_cache": kv_cache_bytes(job.shape, cached, itemsize) / sample.tensor,
        "runtime": SERVER_GIB * GIB,
    }


def _decoding_rows(job: Job, sample: SampleLayout) -> float:
    return min(-(-job.rows // sample.replicas), most_rows_of(job, sample))
