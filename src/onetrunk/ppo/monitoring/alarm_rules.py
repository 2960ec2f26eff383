"""The table of alarms with their limits; `alarms.py` watches. A new alarm is an entry in RULES.

It imports no library, because the settings of PPO use it (`ppo/settings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Quantiles of Student's t for a 95% interval, for 1, 2, ... degrees of freedom.
T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
SHARE = (0.0, 1.0, "between 0 and 1")
AT_LEAST_0 = (0.0, math.inf, "0 or more")
AT_MOST_0 = (-math.inf, 0.0, "0 or less")
AT_MOST_1 = (-math.inf, 1.0, "1 or less")


@dataclass(frozen=True)
class Rule:
    """One alarm.

    Args:
        description: what the metric is, for the warning.
        is_upper: True if the limit is the largest good value, False if it is the smallest.
        range: least and greatest value of the limit, and both in words.
        is_relative: the limit is a share of the metric's mean over the first rollouts.
    """

    limit: float
    metric: str
    description: str
    cause: str
    change: str
    is_upper: bool = False
    range: tuple[float, float, str] = SHARE
    is_relative: bool = False


RULES = {
    "kl": Rule(
        100.0,
        "kl/ref",
        "the KL to the reference, nats per completion,",
        "a reward for what the reference never says, too small a beta, or too large a learning rate",
        "raise beta or set kl_target, lower learning_rate, and read completions",
        is_upper=True,
        range=AT_LEAST_0,
    ),
    "negative_kl": Rule(
        0.1,
        "kl/ref",
        "the KL to the reference, nats per completion, which can't be negative,",
        "a sampler whose probabilities differ from those the trainer computes: another temperature, truncated"
        " sampling, stale or rounded weights, or an override of the scoring",
        "look at sampling/logprob_gap_mean and at the rollout backend",
        range=AT_LEAST_0,
    ),
    "logprob_gap": Rule(
        0.1,
        "sampling/logprob_gap_mean",
        "the difference between the sampler's logprobs and the trainer's, nats per token,",
        "a sampler with other weights, another adapter, temperature or precision than the trainer, a logits_processor,"
        " or, with schedule one_step or async, large steps",
        "check that the rollout backend loads the policy in sync and returns logprobs after temperature",
        is_upper=True,
        range=AT_LEAST_0,
    ),
    "length_collapse": Rule(
        0.2,
        "completion/length",
        "the mean completion length, tokens,",
        "a reward or a penalty that is highest for saying nothing",
        "lower length_penalty, score short completions for what they lack, or raise beta",
        is_relative=True,
    ),
    "length_explosion": Rule(
        0.3,
        "completion/stopped_fraction",
        "the share of completions that end by themselves",
        "a reward that grows with length, or completions that are cut and scored as if they had ended",
        "set missing_eos_penalty or length_penalty, or raise max_completion_length",
        is_relative=True,
    ),
    "entropy": Rule(
        0.01,
        "policy/entropy",
        "the policy's entropy, nats per token,",
        "a policy with one answer to every prompt, after too many steps on too few prompts or a reward for one phrase",
        "set entropy_coef or raise beta, lower learning_rate or num_ppo_epochs, and use more prompts",
        range=AT_LEAST_0,
    ),
    "repeated_ngrams": Rule(
        0.5,
        "completion/repeated_ngrams",
        "the share of 4-grams that occurred before in the same completion",
        "a reward that does not penalise repetition, or a policy that has switched language",
        "score repetition in the reward, raise beta, or set missing_eos_penalty",
        is_upper=True,
    ),
    "clip_fraction": Rule(
        0.5,
        "policy/clip_fraction",
        "the share of tokens that the loss clips",
        "steps that are too large or too many for one rollout",
        "lower learning_rate or num_ppo_epochs, set target_kl, or raise rollout_batch_size",
        is_upper=True,
    ),
    "skipped_steps": Rule(
        0.8,
        "policy/skipped_fraction",
        "the share of steps that left the weights alone",
        "a target_kl that the first steps exceed, gradients that are not finite, or completions that are all masked",
        "lower learning_rate, raise target_kl, and look for infinite scores",
        is_upper=True,
    ),
    "explained_variance": Rule(
        -0.5,
        "value/explained_variance",
        "the explained variance of the value head",
        "values that are worse than a constant: rollouts of too few tokens, or scores whose scale jumps",
        "raise rollout_batch_size, lower value_learning_rate or value_steps, or set normalize_scores",
        range=AT_MOST_0,
    ),
    "useless_values": Rule(
        0.02,
        "value/explained_variance",
        "the explained variance of the value head, the upper end of the 95% interval of its mean,",
        "a value head that predicts no better than a constant (0): rewards that the state does not predict,"
        " or too few rollouts yet",
        "raise rollout_batch_size or value_steps",
        range=AT_MOST_1,
    ),
    "equal_scores": Rule(
        1e-6,
        "score/std",
        "the standard deviation of the scores of a rollout",
        "a reward that is the same for every completion, because its condition is never or always met, or it reads"
        " another column than you think",
        "score a few completions by hand, make the reward graded, or start from a model that sometimes succeeds",
        range=AT_LEAST_0,
    ),
    "cut_off": Rule(
        0.01,
        "completion/stopped_fraction",
        "the share of completions that end by themselves",
        "too small a max_completion_length, or a model that never writes its EOS token",
        "raise max_completion_length, check eos_token and the chat template, or add stop_tokens",
    ),
    "one_token": Rule(
        1.5,
        "completion/length",
        "the mean completion length, tokens,",
        "a model that ends at once: a chat template without its generation prompt, prompts that already end in an"
        " answer, or a stop token that answers begin with",
        "read samples, cut prompts before the answer, and check the chat template, eos_token and stop_tokens",
        range=AT_LEAST_0,
    ),
    "no_gradient": Rule(
        1e-7,
        "policy/gradient_norm",
        "the largest norm of the gradient in a rollout",
        "advantages that are all 0, completions that are all masked, or an adapter that no loss reaches",
        "look at score/std, set truncated_completions to terminal, and check lora_target_modules and adapter_layers",
        range=AT_LEAST_0,
    ),
    "tool_errors": Rule(
        0.5,
        "episode/tool_errors",
        "the share of tool calls and environment steps that gave an error",
        "calls that do not fit the schemas of the tools, a broken tool or service, or too short a tool_timeout",
        "read completions, correct the tools and their docstrings or raise tool_timeout, and score calls that fail",
        is_upper=True,
    ),
    "turn_limit": Rule(
        0.5,
        "episode/turn_limit",
        "the share of episodes that end at max_turns",
        "too small a limit for the task, or a policy that never comes to an end",
        "raise max_turns, or reward an early end (gamma below 1)",
        is_upper=True,
    ),
    "length_limit": Rule(
        0.5,
        "episode/length_limit",
        "the share of episodes that a limit of tokens ends",
        "too small a limit for the task, long observations, or a policy that never comes to an end",
        "raise max_completion_length (or max_turn_length or max_context_length, if one of these is what ends them),"
        " lower max_observation_characters, or reward an early end (gamma below 1)",
        is_upper=True,
    ),
}

# Alarms about differences between sampler and trainer, which truncated sampling makes on purpose.
TRUNCATION_ALARMS = ("negative_kl", "logprob_gap")


def quantile(freedom: int) -> float:
    """Return the quantile of Student's t for a 95% interval; NaN for no degree of freedom."""
    if freedom < 1:
        return math.nan
    return T[freedom - 1] if freedom <= len(T) else 1.96 + 2.37 / freedom + 2.8 / freedom**2


def check_limits(limits: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a limit of an unknown alarm, or one that is out of range."""
    for name, value in (limits or {}).items():
        if name not in RULES:
            raise ValueError(f"alarm_limits names {name!r}, which is not an alarm; expected any of {', '.join(RULES)}")
        low, high, words = RULES[name].range
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and math.isfinite(value) and low <= value <= high):
            raise ValueError(f"the alarm limit {name} is {value!r}; it must be a number, {words}, or null for none")


def limits_in_use(
    limits: Mapping[str, float | None] | None, truncates: bool, samples_ahead: bool
) -> dict[str, float | None]:
    """Return the limit of every alarm, None for one that is off.

    Args:
        truncates: whether rollouts are sampled from a part of the vocabulary.
        samples_ahead: whether a completion may have tokens of an older policy.
    """
    off = TRUNCATION_ALARMS if truncates else ("negative_kl",) if samples_ahead else ()
    return {name: None if name in off else rule.limit for name, rule in RULES.items()} | dict(limits or {})


def stopping_alarms(setting: str | Sequence[str] | None, limits: Mapping[str, float | None]) -> list[str] | None:
    """Return the names of the alarms that end a run, or None; `setting` may be a name, or names."""
    words = [setting] if isinstance(setting, str) else list(setting or ())
    if words in ([], ["null"], ["none"], ["None"]):
        return None
    if words == ["all"]:
        return list(RULES)
    unknown = [word for word in words if word not in RULES]
    if unknown:
        raise ValueError(
            f"stop_on_alarm names {unknown[0]!r}, which is not an alarm; set it to all, null, or some of"
            f" {', '.join(RULES)}"
        )
    off = [name for name in words if limits[name] is None]
    if off and len(words) < len(RULES):
        raise ValueError(f"stop_on_alarm names {off[0]}, and its limit is null; give it one in alarm_limits")
    return [name for name in RULES if name in words]
