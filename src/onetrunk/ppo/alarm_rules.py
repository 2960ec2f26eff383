"""The alarms and their settings. A new alarm is an entry in RULES and a field of AlarmConfig; `alarms.py` watches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onetrunk.utils.options import option

SHARE = (0.0, 1.0, "between 0 and 1")
AT_LEAST_0 = (0.0, math.inf, "0 or more")
AT_MOST_0 = (-math.inf, 0.0, "0 or less")


@dataclass(frozen=True)
class Rule:
    """One alarm.

    Args:
        metric: name of the watched metric.
        description: what the metric is, for the warning.
        cause: the usual cause.
        change: what to change.
        is_upper: True if the limit is the largest good value, False if it is the smallest.
        range: least and greatest value of the setting, and both in words.
        is_relative: the setting is a share of the metric's mean over the first rollouts.
    """

    metric: str
    description: str
    cause: str
    change: str
    is_upper: bool = False
    range: tuple[float, float, str] = SHARE
    is_relative: bool = False


RULES = {
    "kl": Rule(
        "kl/ref",
        "the KL to the reference, nats per completion,",
        "a reward for what the reference never says, too small a beta, or too large a learning rate",
        "raise beta or set kl_target, lower learning_rate, and read completions",
        is_upper=True,
        range=AT_LEAST_0,
    ),
    "negative_kl": Rule(
        "kl/ref",
        "the KL to the reference, nats per completion, which can't be negative,",
        "a sampler whose probabilities differ from those the trainer computes: another temperature, truncated"
        " sampling, stale or rounded weights, or an override of the scoring",
        "look at sampling/logprob_gap_mean and at the rollout backend",
        range=AT_LEAST_0,
    ),
    "logprob_gap": Rule(
        "sampling/logprob_gap_mean",
        "the difference between the sampler's logprobs and the trainer's, nats per token,",
        "a sampler with other weights, another adapter, temperature or precision than the trainer, a logits_processor,"
        " or, with schedule one_step or async, large steps",
        "check that the rollout backend loads the policy in sync and returns logprobs after temperature",
        is_upper=True,
        range=AT_LEAST_0,
    ),
    "length_collapse": Rule(
        "completion/length",
        "the mean completion length, tokens,",
        "a reward or a penalty that is highest for saying nothing",
        "lower length_penalty, score short completions for what they lack, or raise beta",
        is_relative=True,
    ),
    "length_explosion": Rule(
        "completion/stopped_fraction",
        "the share of completions that end by themselves",
        "a reward that grows with length, or completions that are cut and scored as if they had ended",
        "set missing_eos_penalty or length_penalty, or raise max_completion_length",
        is_relative=True,
    ),
    "entropy": Rule(
        "policy/entropy",
        "the policy's entropy, nats per token,",
        "a policy that answers every prompt alike, after too many steps on too few prompts or a reward for one phrase",
        "set entropy_coef or raise beta, lower learning_rate or num_ppo_epochs, and use more prompts",
        range=AT_LEAST_0,
    ),
    "repeated_ngrams": Rule(
        "completion/repeated_ngrams",
        "the share of 4-grams that occurred before in the same completion",
        "a reward that does not penalise repetition, or a policy that has left the reference's language",
        "score repetition in the reward, raise beta, or set missing_eos_penalty",
        is_upper=True,
    ),
    "clip_fraction": Rule(
        "policy/clip_fraction",
        "the share of tokens that the loss clips",
        "steps that are too large or too many for one rollout",
        "lower learning_rate or num_ppo_epochs, set target_kl, or raise rollout_batch_size",
        is_upper=True,
    ),
    "skipped_steps": Rule(
        "policy/skipped_fraction",
        "the share of steps that left the weights alone",
        "a target_kl that the first steps exceed, gradients that are not finite, or completions that are all masked",
        "lower learning_rate, raise target_kl, and look for infinite scores",
        is_upper=True,
    ),
    "explained_variance": Rule(
        "value/explained_variance",
        "the explained variance of the value head",
        "values that are worse than a constant: too large a value learning rate, or scores whose scale jumps",
        "lower value_learning_rate, set normalize_scores or value_pretraining_rollouts, or try value_head adapter",
        range=AT_MOST_0,
    ),
}


@dataclass(repr=False)
class AlarmConfig:
    """The settings of alarms in PPOConfig; a base class that comes before TrainingArguments."""

    alarm_kl: float | None = option(
        100.0,
        "Alarm if the KL to the reference exceeds it, nats per completion. null: no such alarm.",
    )
    alarm_negative_kl: float | None = option(
        0.1,
        "Alarm if that KL, a mean over completions, is so far below 0, nats, and chance does not explain it. Off with"
        " truncated sampling and where rollouts are sampled ahead, unless another limit is set. null: no such alarm.",
    )
    alarm_logprob_gap: float | None = option(
        0.1,
        "Alarm if the logprobs recorded by the sampler differ by more from those of the trainer's forward, nats,"
        " mean over tokens. Rounding to bfloat16 gives about 0.01; sampling ahead adds what was learnt since. null:"
        " no such alarm.",
    )
    alarm_length_collapse: float | None = option(
        0.2,
        "Alarm if the mean completion length falls below this share of that of the first rollouts. null: no such"
        " alarm.",
    )
    alarm_length_explosion: float | None = option(
        0.3,
        "Alarm if the share of completions that end by themselves falls below this share of that of the first"
        " rollouts. null: no such alarm.",
    )
    alarm_entropy: float | None = option(
        0.01,
        "Alarm if the policy's entropy falls below it, nats per token. null: no such alarm.",
    )
    alarm_repeated_ngrams: float | None = option(
        0.5,
        "Alarm if more of the 4-grams of completions occurred before in the same completion. null: no such alarm.",
    )
    alarm_clip_fraction: float | None = option(
        0.5,
        "Alarm if the loss clips a larger share of a rollout's tokens. null: no such alarm.",
    )
    alarm_skipped_steps: float | None = option(
        0.8,
        "Alarm if a larger share of a rollout's steps is skipped. null: no such alarm.",
    )
    alarm_explained_variance: float | None = option(
        -20.0,
        "Alarm if the explained variance of the value head falls below it; a constant has 0. null: no such alarm.",
    )
    alarm_patience: int = option(3, "Rollouts in a row in which the condition must hold before an alarm is raised.")
    stop_on_alarm: list[str] | None = option(
        None,
        "all: any alarm ends the run, with a checkpoint; names (kl, entropy, ...): only these do; null: alarms only"
        " warn.",
    )


def stopping_alarms(config: AlarmConfig) -> list[str] | None:
    """Return the names of the alarms that end a run, or None; `stop_on_alarm` may be a boolean, a name, or names.

    Raises:
        ValueError: an unknown name, or an alarm without a limit.
    """
    setting = config.stop_on_alarm
    words = [str(word).lower() for word in ([setting] if isinstance(setting, (str, bool)) else setting or ())]
    if not words or words in (["false"], ["null"], ["none"]):
        return None
    if words in (["all"], ["true"]):
        return list(RULES)
    unknown = [word for word in words if word not in RULES]
    if unknown:
        raise ValueError(
            f"stop_on_alarm names {unknown[0]!r}, which is no alarm; set it to all, null, or some of"
            f" {', '.join(RULES)}"
        )
    names = [name for name in RULES if name in words]
    off = [name for name in names if getattr(config, f"alarm_{name}") is None]
    if off and len(names) < len(RULES):
        raise ValueError(f"stop_on_alarm names {off[0]}, and alarm_{off[0]} is null; give it a limit")
    return names
