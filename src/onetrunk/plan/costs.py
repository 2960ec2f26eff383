"""Bytes, FLOPs and operations that a plan counts; what the trainer itself asks for is in `onetrunk.costs`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onetrunk.costs import SCORED_AT_ONCE, ModelShape


def kv_cache_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the bytes of keys and values of `tokens` padded tokens in all layers."""
    return 2 * tokens * shape.num_layers * shape.num_kv_heads * shape.head_dim * itemsize


# A sampler holds the next token's logits, their logprobs and their cumulative probabilities, in float32.
SAMPLER_COPIES = 3


def sampling_bytes(
    shape: ModelShape,
    sizes: Sequence[int],
    rows: float,
    width: float,
    itemsize: float,
    *,
    batches: int = 1,
    gathered: float = 0.0,
) -> list[dict[str, float]]:
    """Return the bytes that sampling adds in each stage of a pipeline, by part; a process alone is one stage.

    Args:
        rows: rows that decode at once in the pipeline.
        width: padded tokens of a row at its end.
        batches: batches in flight; the last stage draws for one of them at a time.
        gathered: bytes of a weight of a sharded base, of which a stage holds its own layers and what is outside of
            all layers; 0: the base is whole on every process already.

    Returns:
        For each stage: `kv_cache` of its layers, `logits` of the last one, and `transient` where the base is sharded.
    """
    stages = []
    for stage, size in enumerate(sizes):
        logits = rows / batches * shape.vocab_size * 4 * SAMPLER_COPIES if stage == len(sizes) - 1 else 0.0
        parts = {"kv_cache": kv_cache_bytes(shape, 1, 1) * itemsize * rows * width * size / shape.num_layers}
        parts["logits"] = logits
        if gathered:
            # A layer of another stage is held for a moment, because gathering is collective.
            layers = size if len(sizes) == 1 else size + 1
            parts["transient"] = gathered * (layers * shape.layer_parameters + shape.outer_parameters)
        stages.append(parts)
    return stages


@functools.cache
def stage_weights(shape: ModelShape, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of frozen weights that each training stage holds; one stage has all of them.

    The first stage also has the embedding, and the last one the head: tied weights are on both.
    """
    if len(sizes) == 1:
        return (shape.parameters,)
    dense = replace(shape, num_experts=0).layer_parameters
    layers = [dense] * shape.num_dense_layers + [shape.layer_parameters] * (shape.num_layers - shape.num_dense_layers)
    ends = list(itertools.accumulate(sizes))
    weights = [sum(layers[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    weights[0] += shape.head_parameters
    weights[-1] += shape.head_parameters
    return tuple(weights)


@functools.cache
def layers_above(sizes: tuple[int, ...], adapted: int) -> tuple[int, ...]:
    """Return how many of the layers of each stage are among the last `adapted` ones, which have adapters."""
    cut, ends = sum(sizes) - adapted, itertools.accumulate(sizes)
    return tuple(max(0, min(size, end - cut)) for size, end in zip(sizes, ends, strict=True))


def packs_in_flight(stage: int, stages: int, packs: int) -> int:
    """Return the packs whose activations a stage holds at once: by 1F1B it runs `stages - stage` forwards first.

    Fewer packs than stages run by GPipe's order: all forwards, then all backwards.
    """
    return packs if packs < stages else stages - stage


@dataclass(frozen=True)
class Streams:
    """Hidden states [tokens, hidden_size] that cross from one training stage to the next, for one pack.

    Args:
        scored: in scoring: one per role above the cut, and one for all roles below it.
        trained: in the update, forward.
        gradients: in the update, backward: none below the cut.
    """

    scored: int
    trained: int
    gradients: int


@functools.cache
def stage_streams(sizes: tuple[int, ...], adapted: int, has_reference: bool) -> tuple[Streams, ...]:
    """Return what crosses each boundary of training stages, those before the first and after the last stage included.

    Args:
        sizes: layers of each stage.
        adapted: layers with adapters, the last ones.
        has_reference: whether the reference is scored.
    """
    cut = sum(sizes) - adapted
    inner = [
        Streams(1 + has_reference, 1, 1) if layer > cut else Streams(1, 1, 0)
        for layer in itertools.accumulate(sizes[:-1])
    ]
    return (Streams(0, 0, 0), *inner, Streams(0, 0, 0))


def stage_buffers(boundaries: Sequence[Streams], stage: int, packs: int, all_packs: int) -> tuple[int, int]:
    """Return the hidden states of a pack's size that a training stage holds in scoring and in the update.

    torch.distributed.pipelining has a buffer for what each pack of a schedule receives, forward and backward. It keeps
    what was sent until the pack's backward; in scoring until the end.
    """
    stages = len(boundaries) - 1
    before, after = boundaries[stage], boundaries[stage + 1]
    scored = min(SCORED_AT_ONCE * stages, all_packs)
    flying = packs_in_flight(stage, stages, packs)
    return (
        scored * (before.scored + after.scored),
        packs * (before.trained + after.gradients) + flying * after.trained,
    )


# Hidden states that a layer keeps for the backward, per token, in units of the hidden size: attention with its
# projections, norms and residuals about 10; the feed-forward block has its own width, three times if gated.
KEPT_PER_TOKEN = 10


def kept_activations_bytes(shape: ModelShape, tokens: int, layers: int, itemsize: float, is_checkpointed: bool) -> int:
    """Return the bytes that `layers` trained layers keep for their backward; checkpointed, only their inputs."""
    per_layer = shape.hidden_size
    if not is_checkpointed:
        per_layer = KEPT_PER_TOKEN * shape.hidden_size + (3 if shape.is_gated else 1) * shape.active_width
    return int(tokens * per_layer * layers * itemsize)


@dataclass(frozen=True)
class Gathers:
    """How often weights of a sharded base are gathered: single layers, and the weights outside the layers."""

    layers: int
    outer: int

    def num_bytes(self, shape: ModelShape, itemsize: float) -> int:
        """Return the bytes of the gathered weights; a process receives all of them but its own share."""
        return math.ceil((self.layers * shape.layer_parameters + self.outer * shape.outer_parameters) * itemsize)


def gathers(
    shape: ModelShape, cut: int, packs: int, epochs: int, *, has_reference: bool = True, lower_layers: str = "sampling"
) -> dict[str, Gathers]:
    """Return what one iteration gathers, by its phases "generate", "score" and "update".

    A rollout gathers everything once. In scoring and update each forward through a layer gathers it, and so does each
    backward; the weights outside the layers stay for all of the scoring, and for one pack of the update. Holds without
    activation checkpointing.

    Args:
        packs: packs of one process in one rollout.
        has_reference: False where beta is 0.
        lower_layers: when the layers below the cut run: in "sampling" only (the states are captured there), once in
            "scoring", or in "every" forward (`trunk_cache: off`).
    """
    above = shape.num_layers - cut
    in_scoring = (1 + has_reference) * above + (0 if lower_layers == "sampling" else cut)
    in_update = 2 * above + (cut if lower_layers == "every" else 0)
    return {
        "generate": Gathers(shape.num_layers, 1),
        "score": Gathers(packs * in_scoring, 1),
        "update": Gathers(epochs * packs * in_update, epochs * packs),
    }


def forward_flops(shape: ModelShape, tokens: int, layers: int, context: float = 0.0) -> float:
    """Return the FLOPs of `layers` layers for `tokens` tokens that each attend to `context` tokens on average."""
    attention = 4 * context * shape.num_heads * shape.head_dim
    return tokens * layers * (2.0 * shape.active_layer_parameters + attention)


def head_flops(shape: ModelShape, tokens: int) -> float:
    """Return the FLOPs of the output head for `tokens` tokens."""
    return 2.0 * tokens * shape.head_parameters


@dataclass(frozen=True)
class Operations:
    """Operations of torch in eager mode, for any number of tokens. On a GPU each is at least one launch.

    Args:
        layer: of a layer's forward; two more where it decodes, for the cache.
        adapter, scored_adapter, decoded_adapter: of the adapters of a layer in a pack that trains, in one that is
            scored, and where it decodes.
        backward: of a layer with adapters.
        token, score, update: of everything else in a decoded token, a scored pack and a trained pack.
    """

    layer: int
    adapter: int
    scored_adapter: int
    decoded_adapter: int
    backward: int
    token: int
    score: int
    update: int

    def of_token(self, layers: int, adapted: int) -> int:
        """Return those of one decoded token of all rows."""
        return layers * (self.layer + 2) + adapted * self.decoded_adapter + self.token

    def of_score(self, layers: int, adapted: int) -> int:
        """Return those of scoring a pack; a layer counts once for every role that runs it."""
        return layers * self.layer + adapted * self.scored_adapter + self.score

    def of_update(self, adapted: int, frozen: int, is_checkpointed: bool) -> int:
        """Return those of a pack's forward and backward; `frozen` layers run forward only."""
        forward = self.layer + self.adapter
        return adapted * (self.backward + forward * (1 + is_checkpointed)) + frozen * self.layer + self.update


def operations_of(itemsize: float) -> Operations:
    """Return the counts of Llama and Qwen2 (scripts/bench/launches.py), which most families exceed.

    In half precision autocast casts whatever an adapter multiplies; without gradients only once (`casting_once`). In
    float32 the policy samples from merged weights.
    """
    is_float32 = itemsize > 2
    return (
        Operations(37, 14, 14, 0, 102, 68, 208, 193) if is_float32 else Operations(41, 56, 18, 18, 134, 73, 221, 193)
    )


def slowest_stage(shape: ModelShape, sizes: Sequence[int]) -> float:
    """Return the time of the slowest stage over the mean of all, by the weights that a decoded token reads."""
    costs = [size * shape.layer_parameters for size in sizes]
    costs[-1] += shape.head_parameters
    return max(costs) * len(costs) / sum(costs)
