"""Bytes and FLOPs of a decoder, computed from its config. A multiplication and an addition count as two FLOPs."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Model types whose feed-forward block has two matrices.
UNGATED = frozenset(
    "apertus arcee biogpt bloom codegen falcon gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gptj jais2 mpt"
    " nanochat nemotron opt persimmon phi starcoder2 xglm".split()
)


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
        shared_size: width of one shared expert of a mixture that has a width of its own for it; 0: `expert_size`.
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
    shared_size: int = 0

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Return the shape in a transformers config, with the usual defaults for fields that a family lacks."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        widths = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
        intermediate = next((size for name in widths if (size := getattr(config, name, None))), 4 * hidden)
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            num_layers=config.num_hidden_layers,
            intermediate_size=intermediate,
            num_heads=heads,
            num_kv_heads=_kv_heads(config) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            is_gated=config.model_type not in UNGATED,
            is_tied=bool(getattr(config, "tie_word_embeddings", True)),
            **_mixture_of(config, intermediate),
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
        return self.experts_per_token * self.expert_size + self._shared_width

    @property
    def _shared_width(self) -> int:
        return self.num_shared_experts * (self.shared_size or self.expert_size)

    def _feed_forward(self, experts: int) -> int:
        matrices = 3 if self.is_gated else 2
        width = experts * self.expert_size + self._shared_width if self.num_experts else self.intermediate_size
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
        # Inputs plus outputs of one matrix of every block.
        sizes = max(self.num_experts, 1) * (self.hidden_size + width)
        sizes += self.num_shared_experts * self.hidden_size + self._shared_width
        feed_forward = (3 if self.is_gated else 2) * sizes
        return rank * (self.num_layers if layers is None else layers) * (attention + feed_forward)


def _kv_heads(config: Any) -> int | None:
    """Return the number of key and value heads in a config; None if each query head has its own."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)


def _mixture_of(config: Any, intermediate: int) -> dict[str, int]:
    """Return the fields of a mixture of experts in a config, under the names of the families; {} of a dense model."""

    def first(*names: str) -> int:
        return next((int(value) for name in names if (value := getattr(config, name, None))), 0)

    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    if not experts:
        return {}
    shared_size = first("shared_expert_intermediate_size")
    has_one = shared_size > 0 or config.model_type == "llama4_text"
    return {
        "num_experts": experts,
        "experts_per_token": first("num_experts_per_tok", "num_experts_per_token") or 1,
        "num_shared_experts": 1 if has_one else first("n_shared_experts", "num_shared_experts"),
        "shared_size": shared_size,
        "expert_size": first("moe_intermediate_size") or intermediate,
        "num_dense_layers": first("first_k_dense_replace"),
    }


def trunk_states_bytes(shape: ModelShape, tokens: int, itemsize: int) -> int:
    """Return the bytes of the hidden states of `tokens` padded tokens at one layer."""
    return tokens * shape.hidden_size * itemsize


# Packs of one forward-only schedule of training stages, per stage: hidden states of all of them are in memory at once.
SCORED_AT_ONCE = 4


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
