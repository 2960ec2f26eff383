"""Bytes and FLOPs of a decoder, computed from its config. A multiplication and an addition count as two FLOPs."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder that its costs depend on.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        is_gated: whether the feed-forward block has three matrices (SwiGLU, GeGLU) instead of two.
        is_tied: whether the output head shares the embedding's weights.
        num_experts: experts of a layer of a mixture; 0: the feed-forward blocks are dense.
        experts_per_token: experts that a token runs through, without the shared ones.
        num_shared_experts: experts that every token runs through in addition.
        expert_size: width of one expert.
        num_dense_layers: layers of a mixture whose feed-forward block is dense, of `intermediate_size`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_gated: bool = True
    is_tied: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
    expert_size: int = 0
    num_dense_layers: int = 0

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Return the shape in a transformers config, with the usual defaults for fields that a family lacks."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        intermediate = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            num_layers=config.num_hidden_layers,
            intermediate_size=intermediate or 4 * hidden,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            is_gated=config.model_type != "gpt2",
            is_tied=bool(getattr(config, "tie_word_embeddings", True)),
            **_mixture_of(config, intermediate or 4 * hidden),
        )

    @property
    def attention_parameters(self) -> int:
        """Number of weights in the attention matrices of one layer."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def layer_parameters(self) -> int:
        """Number of weights in the matrices of one layer; of a mixture, with all experts."""
        return self.attention_parameters + self._feed_forward(self.num_experts)

    @property
    def active_layer_parameters(self) -> int:
        """Number of weights that one token is multiplied with in one layer."""
        return self.attention_parameters + self._feed_forward(self.experts_per_token)

    @property
    def active_width(self) -> int:
        """Width of the feed-forward block that one token runs through."""
        if not self.num_experts:
            return self.intermediate_size
        return (self.experts_per_token + self.num_shared_experts) * self.expert_size

    def _feed_forward(self, experts: int) -> int:
        matrices = 3 if self.is_gated else 2
        width = (experts + self.num_shared_experts) * self.expert_size if self.num_experts else self.intermediate_size
        return matrices * self.hidden_size * width

    @property
    def head_parameters(self) -> int:
        """Number of weights in the output head."""
        return self.vocab_size * self.hidden_size

    @property
    def outer_parameters(self) -> int:
        """Number of weights outside the layers: the embedding, and the output head where it is not tied."""
        return (1 if self.is_tied else 2) * self.head_parameters

    @property
    def parameters(self) -> int:
        """Number of weights in all matrices; norms and biases, under 1% of a model, are left out."""
        dense = self.attention_parameters + (3 if self.is_gated else 2) * self.hidden_size * self.intermediate_size
        mixed = self.num_layers - self.num_dense_layers
        return mixed * self.layer_parameters + self.num_dense_layers * dense + self.outer_parameters

    def lora_parameters(self, rank: int, layers: int | None = None) -> int:
        """Return the weights of a LoRA adapter on every matrix: `rank` times inputs plus outputs of each."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * (self.hidden_size + queries) + 2 * (self.hidden_size + keys)
        width = self.expert_size if self.num_experts else self.intermediate_size
        blocks = self.num_experts + self.num_shared_experts if self.num_experts else 1
        feed_forward = blocks * (3 if self.is_gated else 2) * (self.hidden_size + width)
        return rank * (self.num_layers if layers is None else layers) * (attention + feed_forward)


def _mixture_of(config: Any, intermediate: int) -> dict[str, int]:
    """Return the fields of a mixture of experts in a config, under the names of the families; {} of a dense model."""

    def first(*names: str) -> int:
        return next((int(value) for name in names if (value := getattr(config, name, None))), 0)

    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        return {}
    return {
        "num_experts": experts,
        "experts_per_token": first("num_experts_per_tok", "num_experts_per_token") or 1,
        "num_shared_experts": first("n_shared_experts", "num_shared_experts"),
        "expert_size": first("moe_intermediate_size") or intermediate,
        "num_dense_layers": first("first_k_dense_replace"),
    }


def trunk_states_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the bytes of the hidden states of `tokens` padded tokens at one layer."""
    return tokens * shape.hidden_size * itemsize


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


# Packs of one forward-only schedule of training stages, per stage: hidden states of all of them are in memory at once.
SCORED_AT_ONCE = 4


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
        adapter, decoded_adapter: of the adapters of a layer in a pack, and where it decodes.
        backward: of a layer with adapters.
        token, score, update: of everything else in a decoded token, a scored pack and a trained pack.
    """

    layer: int
    adapter: int
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
        return layers * self.layer + adapted * self.adapter + self.score

    def of_update(self, adapted: int, frozen: int, is_checkpointed: bool) -> int:
        """Return those of a pack's forward and backward; `frozen` layers run forward only."""
        forward = self.layer + self.adapter
        return adapted * (self.backward + forward * (1 + is_checkpointed)) + frozen * self.layer + self.update


def operations_of(itemsize: float) -> Operations:
    """Return the counts of Llama and Qwen2 (scripts/bench/launches.py), which most families exceed.

    In half precision autocast casts whatever an adapter multiplies; in float32 the policy samples from merged weights.
    """
    return Operations(37, 14, 0, 102, 68, 208, 193) if itemsize > 2 else Operations(41, 56, 56, 134, 73, 221, 193)


def balanced_split(
    layer_costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return the number of layers of each stage of a pipeline, such that the slowest stage is as fast as possible.

    Among equally fast splits it takes the one whose stages are most even.

    Args:
        layer_costs: cost of each layer, measured or modelled, in any unit.
        stages: at least 1 and at most the number of layers; each stage has a layer.
        first, last: extra cost of the first stage (embedding) and of the last one (output head), in the same unit.
    """
    num_layers = len(layer_costs)
    if not 1 <= stages <= num_layers:
        raise ValueError(f"{stages} pipeline stages for {num_layers} layers; set it to 1 to {num_layers}")
    sums = [0.0, *itertools.accumulate(layer_costs)]
    # (the slowest stage, sum of squares, sizes) of the best split of the first n layers into the stages so far.
    best = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (slowest, squares, sizes) in best.items():
            for end in range(start + 1, num_layers - (stages - 1 - stage) + 1):
                cost = sums[end] - sums[start] + extra
                split = (max(slowest, cost), squares + cost**2, (*sizes, end - start))
                longer[end] = min(longer.get(end, split), split)
        best = longer
    return best[num_layers][2]


@functools.cache
def decode_split(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage that samples: a decoded token reads all weights, and of the embedding a row."""
    return balanced_split([shape.layer_parameters] * shape.num_layers, stages, last=shape.head_parameters)


def slowest_stage(shape: ModelShape, sizes: Sequence[int]) -> float:
    """Return the time of the slowest stage over the mean of all, by the weights that a decoded token reads."""
    costs = [size * shape.layer_parameters for size in sizes]
    costs[-1] += shape.head_parameters
    return max(costs) * len(costs) / sum(costs)


def reuse_saving(shape: ModelShape, cut: int, num_ppo_epochs: int, completion_share: float) -> float:
    """Return the share of FLOPs in scoring and updates that is saved by keeping the output of the frozen layers.

    Otherwise the frozen layers run once for scoring (policy, value and reference share that pass) and once in every
    epoch. Above them, scoring is one forward of the policy and one of the reference, and an epoch is a forward and the
    gradient with respect to every input (frozen weights need none). The head runs for completion tokens only.
    """
    above = shape.num_layers - cut
    lower = cut * shape.layer_parameters
    upper = above * shape.layer_parameters
    head = completion_share * shape.head_parameters
    work_above = 4 * (1 + num_ppo_epochs) * (upper + head)
    return 2 * lower * num_ppo_epochs / (work_above + 2 * lower * (1 + num_ppo_epochs))


def host_memory_bytes() -> int:
    """Return the size of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
