"""Computes the GPU memory of PPO for the models of the recipes, and prints it as a table in Markdown.

    python scripts/figures/memory.py
    python scripts/figures/memory.py --lora_r 32 --no_reward_adapter    # for gsm8k-0.5b and qwen2.5-1.5b-tools

This is arithmetic on the shapes of the models; nothing is loaded and nothing has been measured on a GPU. Counted are
weights, gradients, optimizer state and the key-value cache of a rollout. Not counted are activations, which
`microbatch_tokens` bounds, and what CUDA itself takes.
"""

from __future__ import annotations

import argparse

from onetrunk.costs import ModelShape
from onetrunk.plan.costs import kv_cache_bytes

GIB = 2**30
# Vocabulary, width, layers, feed-forward width, query heads, key-value heads, head size: the models' config.json.
MODELS = {
    "SmolLM2-135M": ModelShape(49_152, 576, 30, 1_536, 9, 3, 64),
    "Qwen2.5-0.5B": ModelShape(151_936, 896, 24, 4_864, 14, 2, 64),
    "Qwen2.5-1.5B": ModelShape(151_936, 1_536, 28, 8_960, 12, 2, 128),
    "Llama-3.1-8B": ModelShape(128_256, 4_096, 32, 14_336, 32, 8, 128, is_tied=False),
}
ROWS, WIDTH = 64, 1024
LORA_RANK = 16
BF16, FP32 = 2, 4
# Float32 weight, gradient and two moments of Adam.
TRAINED = 4 * FP32
# 4 bits, an 8-bit scale for every 64 weights, and a float32 scale for every 256 of those (nested quantisation).
NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8


def layer_parameters(shape: ModelShape) -> int:
    """Return the weights of the matrices of all layers."""
    return shape.num_layers * shape.layer_parameters


def embedding_parameters(shape: ModelShape) -> int:
    """Return the weights of the embedding, and of the output head where it has its own."""
    return shape.head_parameters * (1 if shape.is_tied else 2)


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Return the weights of a LoRA adapter on all linear layers: `rank` times inputs plus outputs of each matrix."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = 2 * (shape.hidden_size + queries) + 2 * (shape.hidden_size + keys)
    feed_forward = (3 if shape.is_gated else 2) * (shape.hidden_size + shape.intermediate_size)
    return rank * shape.num_layers * (attention + feed_forward)


def method_bytes(shape: ModelShape, rank: int = LORA_RANK, has_reward_adapter: bool = True) -> dict[str, float]:
    """Return the bytes of weights, gradients, optimizer state and key-value cache, by method.

    The reward is a model of the base's size in the first method, and a frozen adapter on the trunk in the others, or
    nothing that is counted (a rule, a server, a model of another size).
    """
    layers, embeddings = layer_parameters(shape), embedding_parameters(shape)
    adapter = lora_parameters(shape, rank)
    # The policy's adapter and the value head are trained; the reward adapter is frozen in float32.
    branches = TRAINED * (adapter + shape.hidden_size + 1)
    branches += FP32 * (adapter + shape.hidden_size) if has_reward_adapter else 0
    cache = kv_cache_bytes(shape, ROWS * WIDTH, BF16)
    full = layers + embeddings
    return {
        "four models, policy and value trained in full": (2 * TRAINED + 2 * BF16) * full + cache,
        "onetrunk, LoRA on a bfloat16 base": BF16 * full + branches + cache,
        "onetrunk, QLoRA on an NF4 base": NF4 * layers + BF16 * embeddings + branches + cache,
    }


def table(rank: int = LORA_RANK, has_reward_adapter: bool = True) -> str:
    """Return the table in Markdown, in GiB."""
    rows = {name: method_bytes(shape, rank, has_reward_adapter) for name, shape in MODELS.items()}
    header = ["computed, GiB", *next(iter(rows.values()))]
    lines = [header, ["---"] * len(header)]
    lines += [[name, *(f"{size / GIB:.1f}" for size in sizes.values())] for name, sizes in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--lora_r", type=int, default=LORA_RANK, help="rank of all adapters (default %(default)s)")
    parser.add_argument("--no_reward_adapter", action="store_true", help="for a rule or a separate reward model")
    given = parser.parse_args()
    print(table(given.lora_r, not given.no_reward_adapter))
