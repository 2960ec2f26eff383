"""Metrics under the names of TRL's GRPOTrainer (1.16), for dashboards and scripts that were made for it.

Only metrics that mean the same have a name here. TRL's `kl` is per token: it is `kl/ref`, nats per completion, divided
by the tokens of a completion.
"""

from __future__ import annotations

import re

# Ours -> TRL's.
TRL_NAMES = {
    "score/mean": "reward",
    "score/std": "reward_std",
    "completion/length": "completions/mean_length",
    "policy/loss": "policy_loss",
    "policy/entropy": "entropy",
    "policy/clip_fraction": "clip_ratio/region_mean",
    "sampling/logprob_gap_mean": "sampling/sampling_logp_difference/mean",
    "sampling/logprob_gap_max": "sampling/sampling_logp_difference/max",
}
# "eval_" or, with several evaluation sets, "eval_NAME_"; then ours.
METRIC = re.compile(r"(?P<prefix>eval_(?:[^/]*_)?|)(?P<name>[a-z]+/.+)")


def with_trl_names(logs: dict[str, float]) -> dict[str, float]:
    """Return the logs with the metrics that TRL has under its names as well."""
    more: dict[str, float] = {}
    for key, value in logs.items():
        match = METRIC.fullmatch(key)
        if match is None:
            continue
        prefix, name = match["prefix"], match["name"]
        if name in TRL_NAMES:
            more[prefix + TRL_NAMES[name]] = value
        elif name.startswith("score/"):
            more[f"{prefix}rewards/{name.removeprefix('score/')}/mean"] = value
        elif name == "completion/stopped_fraction":
            more[f"{prefix}completions/clipped_ratio"] = 1 - value
        elif name == "kl/ref" and logs.get(f"{prefix}completion/length"):
            more[f"{prefix}kl"] = value / logs[f"{prefix}completion/length"]
    return {**logs, **more}
