"""Memory of a device by part, for a training and for a server, and of the layouts of the roles side by side.

The formulas are those of `costs.py`. What no formula gives (the working set of a layer, copies of tokens for experts,
what sharding gathers) has constants that were fitted to measured peaks, by `scripts/plan/measurements.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from onetrunk.costs import SAMPLER_COPIES, ModelShape, kept_activations_bytes, kv_cache_bytes
from onetrunk.plan.hardware import GIB

# Without a fused head, per logit: itself, its logprob and its gradient in float32, and two copies in bfloat16.
LOGIT_BYTES = 3 * 4 + 2 * 2
# A trained float32 weight, its gradient, and two numbers of Adam; the last two in 8 bits.
ADAM_BYTES, ADAM_8BIT_BYTES = 8, 2
FP32 = 4
# A weight in 4 bits with the constants of its block, and in 8; embedding and head of such a base stay in 16 bits.
NF4_BYTES, INT8_BYTES, HALF_BYTES = 0.516, 1.0, 2.0
# Captured graphs and buffers of a vLLM server.
SERVER_GIB = 2.0
# Tokens and columns of a tile of logits, and the bytes of its float32 buffers per entry.
TILE, TILE_BYTES = (1024, 8192), 12


@dataclass(frozen=True)
class Constants:
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


@dataclass(frozen=True)
class Training:
    """A training of one model on one device, as memory sees it.

    Args:
        shape: of the model.
        tokens: of a forward.
        base_bytes: bytes of a weight of the base.
        trained: weights that train on the device, and their gradients and moments; all of them where `is_full`.
        optimizer_bytes: per trained weight.
        shards: devices that share base (and, where `shares_trained`, what trains).
        tensor: devices that divide every matrix.
        layers: that train; None: all.
        itemsize: bytes of an activation.
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
    is_full: bool = False
    shares_trained: bool = False
    is_checkpointed: bool = True
    is_offloaded: bool = False
    keeps_logits: bool = False
    gathers: bool = True


def base_weights_bytes(shape: ModelShape, base_bytes: float) -> float:
    """Return the bytes of a whole base whose layers have `base_bytes` per weight."""
    outer = HALF_BYTES if base_bytes <= INT8_BYTES else base_bytes
    return (shape.parameters - shape.outer_parameters) * base_bytes + shape.outer_parameters * outer


def fixed_parts(training: Training) -> dict[str, float]:
    """Return the bytes that need no fitted constant, by part."""
    shape, layers = training.shape, training.layers if training.layers is not None else training.shape.num_layers
    shared = training.shards if training.shares_trained else 1
    whole = 0.0 if training.is_full else base_weights_bytes(shape, training.base_bytes)
    base = whole / training.shards / training.tensor
    trained = training.trained / shared
    kept = kept_activations_bytes(shape, training.tokens, layers, training.itemsize, training.is_checkpointed)
    logits = TILE_BYTES * min(TILE[0], training.tokens) * min(TILE[1], shape.vocab_size)
    if training.keeps_logits:
        logits = LOGIT_BYTES * training.tokens * shape.vocab_size / training.tensor
    return {
        "weights": base + (FP32 * trained if training.is_full else 0.0),
        "adapters": 0.0 if training.is_full else FP32 * trained,
        "gradients": FP32 * trained,
        "optimizer": training.optimizer_bytes * trained,
        "activations": 0.0 if training.is_offloaded else kept / training.tensor,
        "logits": logits,
        # The float32 gradient of the embedding before it is shared out.
        "transient": FP32 * shape.head_parameters if training.is_full and training.gathers else 0.0,
    }


def features(training: Training) -> list[float]:
    """Return what the fitted constants are multiplied with, in their order; bytes."""
    shape, tokens = training.shape, training.tokens / training.tensor
    copies = shape.experts_per_token * shape.hidden_size
    gathered = 2 * (shape.head_parameters + 2 * shape.layer_parameters) if training.gathers else 0
    size = training.itemsize / 2
    return [
        GIB,
        tokens * shape.hidden_size * size,
        tokens * shape.active_width * size,
        tokens * copies * size,
        gathered / training.tensor,
    ]


def training_parts(training: Training, constants: Constants | None = None) -> dict[str, float]:
    """Return the bytes of a device at the peak of an update, by part."""
    known = constants or fitted_constants()
    parts = fixed_parts(training)
    runtime, hidden, width, copies, gathered = features(training)
    parts["activations"] += known.per_hidden * hidden + known.per_width * width + known.per_copy * copies
    parts["transient"] += known.gathered * gathered
    parts["runtime"] = known.runtime_gib * runtime
    return parts


def decode_parts(shape: ModelShape, rows: float, width: float, itemsize: float, tensor: int = 1) -> dict[str, float]:
    """Return the bytes that sampling in the trainer's process adds, by part: cache and logits of `rows` rows."""
    return {
        "kv_cache": kv_cache_bytes(shape, int(rows * width), 1) * itemsize / tensor,
        "logits": rows * shape.vocab_size * FP32 * SAMPLER_COPIES / tensor,
    }


def server_parts(
    shape: ModelShape, rows: float, width: float, base_bytes: float, adapters: float, tensor: int, stages: int
) -> dict[str, float]:
    """Return the bytes of a device of a vLLM server, by part.

    Args:
        shape: of the base.
        rows: that decode at the same time, of all the server's devices together.
        width: tokens of a row at its end.
        base_bytes: bytes of a weight.
        adapters: weights of the adapters that it holds.
        tensor, stages: devices that divide each matrix, and stages of a pipeline.
    """
    devices = tensor * stages
    return {
        "weights": base_weights_bytes(shape, base_bytes) / devices,
        "adapters": 2.0 * adapters / devices,
        "kv_cache": kv_cache_bytes(shape, int(rows * width), 2) / devices,
        "runtime": SERVER_GIB * GIB,
    }


# What scripts/plan/measurements.py fits to all measured rows; tests/plan/test_memory.py holds them equal.
FITTED = Constants(runtime_gib=0.0784, per_hidden=34.19, per_width=13.98, per_copy=21.24, gathered=1.675)


def fitted_constants() -> Constants:
    """Return the constants fitted to all measured rows."""
    return FITTED


def role_layouts(shape: ModelShape, rank: int, reward: ModelShape, rows: int, width: int) -> dict[str, float]:
    """Return the bytes of weights, gradients, optimizer and key-value cache, by layout of the roles.

    Args:
        shape: of policy, value and reference.
        rank: of LoRA adapters.
        reward: the reward model where it is a model of its own.
        rows, width: of a rollout on one device.
    """
    cache = kv_cache_bytes(shape, rows * width, 2)
    adapter, full = shape.lora_parameters(rank), shape.parameters
    state = FP32 * 2 + ADAM_BYTES
    four = "four models (policy, reference, value, reward: TRL 1.12)"
    return {
        f"{four}, policy and value trained in full": 2 * state * full + 2 * (full + reward.parameters) + cache,
        f"{four}, LoRA on policy and value": 2 * (3 * full + reward.parameters) + 2 * state * adapter + cache,
        "one trunk, LoRA, value head; a reward model of its own": (
            2 * (full + reward.parameters) + state * adapter + cache
        ),
        "one trunk, LoRA, value adapter, reward adapter": 2 * full + 2 * state * adapter + FP32 * adapter + cache,
        "one trunk in NF4, LoRA, value head, reward adapter": (
            base_weights_bytes(shape, NF4_BYTES) + (state + FP32) * adapter + cache
        ),
    }
