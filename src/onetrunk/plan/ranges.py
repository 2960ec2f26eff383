"""The numbers that a plan is made for. What is outside is a mistake, or more than a float or a search holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MANY = 10**9
# Settings of `onetrunk ppo`: least and most; None stands for a setting that is left out.
SETTINGS = {
    "rollout_batch_size": (1, 10**7), "num_generations": (1, 10**4), "num_rollouts": (1, MANY),
    "max_steps": (-1, MANY), "num_ppo_epochs": (1, 10**4), "num_minibatches": (1, 10**7), "lora_r": (1, 10**5),
    "max_prompt_length": (1, 10**7), "max_completion_length": (1, 10**7), "per_device_train_batch_size": (1, 10**7),
    "microbatch_tokens": (1, MANY), "max_rollout_rows": (1, 10**7), "max_staleness": (0, 10**4),
    "save_total_limit": (0, MANY), "save_steps": (0, MANY),
}  # fmt: skip
# Own options of `onetrunk plan`.
OPTIONS = {
    "num_rollouts": (1, MANY), "nodes": (1, 4096), "top": (1, 10**4), "label_completions": (1, 10**4),
    "prompt_tokens": (1, 10**7), "completion_tokens": (1, 10**7), "budget": (1e-6, 10**12), "length_spread": (0, 3),
    "label_prompts": (0, 10**12), "reward_pairs": (0, 10**12), "distill_rows": (0, 10**12),
}  # fmt: skip
# Fields of a ModelShape, and their names in a config.json.
SHAPES = {
    "vocab_size": ("vocab_size", 1, 10**8), "hidden_size": ("hidden_size", 1, 10**6),
    "num_layers": ("num_hidden_layers", 1, 1000), "intermediate_size": ("intermediate_size", 1, 10**7),
    "num_heads": ("num_attention_heads", 1, 10**5), "num_kv_heads": ("num_key_value_heads", 1, 10**5),
    "head_dim": ("head_dim", 1, 10**5), "num_experts": ("num_experts", 0, 10**5),
    "experts_per_token": ("num_experts_per_tok", 0, 10**5), "num_shared_experts": ("n_shared_experts", 0, 10**5),
    "expert_size": ("moe_intermediate_size", 0, 10**7), "num_dense_layers": ("first_k_dense_replace", 0, 1000),
}  # fmt: skip


def require_ranges(values: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]], prefix: str = "") -> None:
    """Raise ValueError for the first number that is outside of its range, or that is none; None is a default."""
    for name, (least, most) in ranges.items():
        value = values.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and least <= value <= most):
            shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:40]}..."
            raise ValueError(f"{prefix}{name} is {shown}; give {least:g} or more, at most {most:g}")
