"""When a PPO run raises an alarm, and which alarms end it: settings, with what is watched under each name.

Knows names, limits and help texts; no figures and no trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

ALARMS = (
    "kl",
    "negative_kl",
    "logprob_gap",
    "length_collapse",
    "length_explosion",
    "entropy",
    "repeated_ngrams",
    "clip_fraction",
    "skipped_steps",
    "explained_variance",
)
SHARES = ("length_collapse", "length_explosion", "repeated_ngrams", "clip_fraction", "skipped_steps")


def _limit(default: float, text: str) -> Any:
    return field(default=default, metadata={"help": f"{text} null: no such alarm."})


@dataclass(repr=False)
class AlarmSettings:
    """The part of PPOConfig that speaks of alarms; it stands before TrainingArguments."""

    alarm_kl: float | None = _limit(100.0, "Alarm where the KL to the reference exceeds it, nats per completion.")
    alarm_negative_kl: float | None = _limit(
        0.1,
        "Alarm where that KL, a mean over completions, lies so far below 0, nats, and chance does not explain it.",
    )
    alarm_logprob_gap: float | None = _limit(
        0.1,
        "Alarm where the logprobs that the sampler recorded differ by more from those of the trainer's own forward,"
        " nats, mean over tokens. Rounding to bfloat16 gives about 0.01.",
    )
    alarm_length_collapse: float | None = _limit(
        0.2, "Alarm where the mean completion length falls below this share of that of the first rollouts."
    )
    alarm_length_explosion: float | None = _limit(
        0.3,
        "Alarm where the share of completions that end by themselves falls below this share of that of the first"
        " rollouts.",
    )
    alarm_entropy: float | None = _limit(0.01, "Alarm where the policy's entropy falls below it, nats per token.")
    alarm_repeated_ngrams: float | None = _limit(
        0.5, "Alarm where more of the 4-grams of completions occurred before in the same completion."
    )
    alarm_clip_fraction: float | None = _limit(0.5, "Alarm where the loss clips a larger share of a rollout's tokens.")
    alarm_skipped_steps: float | None = _limit(0.8, "Alarm where a larger share of a rollout's steps is skipped.")
    alarm_explained_variance: float | None = _limit(
        -20.0, "Alarm where the explained variance of the value head falls below it; 0 is a constant's."
    )
    alarm_patience: int = field(default=3, metadata={"help": "Rollouts in a row that an alarm takes."})
    stop_on_alarm: list[str] | None = field(
        default=None,
        metadata={
            "help": "all: any alarm ends the run, with a checkpoint; names (kl, entropy, ...): these do; null: none,"
            " they only warn."
        },
    )


def check_alarm_settings(config: AlarmSettings) -> None:
    """Check the settings of alarms, and write out the names that `stop_on_alarm` stands for.

    Raises:
        ValueError: a limit out of range, or an alarm that there is not.
    """
    for name in ALARMS:
        _check_limit(name, getattr(config, f"alarm_{name}"))
    patience = config.alarm_patience
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
        raise ValueError(f"alarm_patience is {patience!r}; it must be a whole number above 0")
    config.stop_on_alarm = stopping_alarms(config.stop_on_alarm)
    off = [name for name in config.stop_on_alarm or () if getattr(config, f"alarm_{name}") is None]
    if off and len(config.stop_on_alarm) < len(ALARMS):
        raise ValueError(f"stop_on_alarm names {off[0]}, and alarm_{off[0]} is null; give it a limit")


def stopping_alarms(given: Any) -> list[str] | None:
    """Return the names of the alarms that end a run, or None, from what a user wrote: a boolean, a name, or names.

    Raises:
        ValueError: a name that is no alarm's.
    """
    named = [given] if isinstance(given, (str, bool)) else given
    words = [str(word).lower() for word in named or ()]
    if not words or words in (["false"], ["null"], ["none"]):
        return None
    if words in (["all"], ["true"]):
        return list(ALARMS)
    unknown = [word for word in words if word not in ALARMS]
    if unknown:
        raise ValueError(
            f"stop_on_alarm names {unknown[0]!r}, which is no alarm; set it to all, null, or some of"
            f" {', '.join(ALARMS)}"
        )
    return [name for name in ALARMS if name in words]


def _check_limit(name: str, value: Any) -> None:
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    low, high, words = -math.inf, 0.0, "0 or less"
    if name in SHARES:
        low, high, words = 0.0, 1.0, "between 0 and 1"
    elif name != "explained_variance":
        low, high, words = 0.0, math.inf, "0 or more"
    if not is_number or not low <= value <= high:
        raise ValueError(f"alarm_{name} is {value!r}; it must be a number, {words}, or null for no such alarm")
