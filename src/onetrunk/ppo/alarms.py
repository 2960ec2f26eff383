"""Alarms: the metrics of every rollout are compared with limits; a warning names the usual cause and what to change.

An alarm is raised when its condition has held for `alarm_patience` rollouts in a row. It is over with the first
rollout in which the condition does not hold. A new alarm is an entry in RULES and a field of AlarmConfig.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerControl, TrainerState

from onetrunk.checkpoints.folders import LEAST_KEPT, last_checkpoint
from onetrunk.checkpoints.resume_point import EndingCallback
from onetrunk.utils.options import option

logger = get_logger(__name__)

# With the sampler's own probabilities, the sum of k1 over a rollout's completions falls below -x with probability
# exp(-x) at most (Markov's inequality, because the mean of exp(-k1) is 1): 2e-9 here.
CHANCE_NATS = 20.0
# If a smaller share of the first completions stopped, a few more or fewer would raise length_explosion.
LEAST_STOPPED = 0.3
# Rollouts whose mean metrics are the reference of relative limits.
NUM_FIRST = 3

SHARE = (0.0, 1.0, "between 0 and 1")
AT_LEAST_0 = (0.0, math.inf, "0 or more")
AT_MOST_0 = (-math.inf, 0.0, "0 or less")


@dataclass(frozen=True)
class Rule:
    """One alarm.

    Args:
        metric: name of the watched metric.
        default: of the setting `alarm_<name>`.
        help: help text of the setting.
        description: what the metric is, for the warning.
        cause: the usual cause.
        change: what to change.
        is_upper: True if the limit is the largest good value, False if it is the smallest.
        range: least and greatest value of the setting, and both in words.
        is_relative: the setting is a share of the metric's mean over the first rollouts.
    """

    metric: str
    default: float
    help: str
    description: str
    cause: str
    change: str
    is_upper: bool = False
    range: tuple[float, float, str] = SHARE
    is_relative: bool = False


RULES = {
    "kl": Rule(
        "kl/ref",
        100.0,
        "Alarm if the KL to the reference exceeds it, nats per completion.",
        "the KL to the reference, nats per completion,",
        "a reward for what the reference never says, too small a beta, or too large a learning rate",
        "raise beta or set kl_target, lower learning_rate, and read completions",
        is_upper=True,
        range=AT_LEAST_0,
    ),
    "negative_kl": Rule(
        "kl/ref",
        0.1,
        "Alarm if that KL, a mean over completions, is so far below 0, nats, and chance does not explain it.",
        "the KL to the reference, nats per completion, which can't be negative,",
        "a sampler whose probabilities differ from those the trainer computes: another temperature, truncated"
        " sampling, stale or rounded weights, or an override of the scoring",
        "look at sampling/logprob_gap_mean and at the rollout backend",
        range=AT_LEAST_0,
    ),
    "logprob_gap": Rule(
        "sampling/logprob_gap_mean",
        0.1,
        "Alarm if the logprobs recorded by the sampler differ by more from those of the trainer's forward, nats, mean"
        " over tokens. Rounding to bfloat16 gives about 0.01; sampling ahead adds what was learnt since.",
        "the difference between the sampler's logprobs and the trainer's, nats per token,",
        "a sampler with other weights, another adapter, temperature or precision than the trainer, a logits_processor,"
        " or, with schedule one_step or async, large steps",
        "check that the rollout backend loads the policy in sync and returns logprobs after temperature",
        is_upper=True,
        range=AT_LEAST_0,
    ),
    "length_collapse": Rule(
        "completion/length",
        0.2,
        "Alarm if the mean completion length falls below this share of that of the first rollouts.",
        "the mean completion length, tokens,",
        "a reward or a penalty that is highest for saying nothing",
        "lower length_penalty, score short completions for what they lack, or raise beta",
        is_relative=True,
    ),
    "length_explosion": Rule(
        "completion/stopped_fraction",
        0.3,
        "Alarm if the share of completions that end by themselves falls below this share of that of the first"
        " rollouts.",
        "the share of completions that end by themselves",
        "a reward that grows with length, or completions that are cut and scored as if they had ended",
        "set missing_eos_penalty or length_penalty, or raise max_completion_length",
        is_relative=True,
    ),
    "entropy": Rule(
        "policy/entropy",
        0.01,
        "Alarm if the policy's entropy falls below it, nats per token.",
        "the policy's entropy, nats per token,",
        "a policy that answers every prompt alike, after too many steps on too few prompts or a reward for one phrase",
        "set entropy_coef or raise beta, lower learning_rate or num_ppo_epochs, and use more prompts",
        range=AT_LEAST_0,
    ),
    "repeated_ngrams": Rule(
        "completion/repeated_ngrams",
        0.5,
        "Alarm if more of the 4-grams of completions occurred before in the same completion.",
        "the share of 4-grams that occurred before in the same completion",
        "a reward that does not penalise repetition, or a policy that has left the reference's language",
        "score repetition in the reward, raise beta, or set missing_eos_penalty",
        is_upper=True,
    ),
    "clip_fraction": Rule(
        "policy/clip_fraction",
        0.5,
        "Alarm if the loss clips a larger share of a rollout's tokens.",
        "the share of tokens that the loss clips",
        "steps that are too large or too many for one rollout",
        "lower learning_rate or num_ppo_epochs, set target_kl, or raise rollout_batch_size",
        is_upper=True,
    ),
    "skipped_steps": Rule(
        "policy/skipped_fraction",
        0.8,
        "Alarm if a larger share of a rollout's steps is skipped.",
        "the share of steps that left the weights alone",
        "a target_kl that the first steps exceed, gradients that are not finite, or completions that are all masked",
        "lower learning_rate, raise target_kl, and look for infinite scores",
        is_upper=True,
    ),
    "explained_variance": Rule(
        "value/explained_variance",
        -20.0,
        "Alarm if the explained variance of the value head falls below it; a constant has 0.",
        "the explained variance of the value head",
        "values that are worse than a constant: too large a value learning rate, or scores whose scale jumps",
        "lower value_learning_rate, set normalize_scores or value_pretraining_rollouts, or try value_head adapter",
        range=AT_MOST_0,
    ),
}


def _limit(name: str) -> Any:
    return option(RULES[name].default, f"{RULES[name].help} null: no such alarm.")


@dataclass(repr=False)
class AlarmConfig:
    """The settings of alarms in PPOConfig; a base class that comes before TrainingArguments."""

    alarm_kl: float | None = _limit("kl")
    alarm_negative_kl: float | None = _limit("negative_kl")
    alarm_logprob_gap: float | None = _limit("logprob_gap")
    alarm_length_collapse: float | None = _limit("length_collapse")
    alarm_length_explosion: float | None = _limit("length_explosion")
    alarm_entropy: float | None = _limit("entropy")
    alarm_repeated_ngrams: float | None = _limit("repeated_ngrams")
    alarm_clip_fraction: float | None = _limit("clip_fraction")
    alarm_skipped_steps: float | None = _limit("skipped_steps")
    alarm_explained_variance: float | None = _limit("explained_variance")
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


def find_breach(
    name: str, limit: float, metrics: Mapping[str, float], first: Mapping[str, float], num_rows: int
) -> tuple[float, float] | None:
    """Return the value of an alarm's metric and the bound that it is beyond; None if it is not, or is missing.

    Args:
        name, limit: of the alarm.
        metrics: of the rollout, which has `num_rows` completions.
        first: means over the first rollouts; empty until they are over.
    """
    rule, bound = RULES[name], limit
    if name == "negative_kl":
        bound = -max(limit, CHANCE_NATS / num_rows)
    elif rule.is_relative:
        if rule.metric not in first or (name == "length_explosion" and first[rule.metric] < LEAST_STOPPED):
            return None
        bound = limit * first[rule.metric]
    value = metrics.get(rule.metric)
    if value is None or not (value > bound if rule.is_upper else value < bound):
        return None
    return value, bound


def fewest_checkpoints(every: int, slots: int) -> int:
    """Return how many checkpoints, one `every` steps, reach back before a rollout of `slots` steps just found bad."""
    # The newest is at least gcd(every, slots) steps old, the one that is needed at most two rollouts.
    return 1 + math.ceil((2 * slots - math.gcd(every, slots)) / every)


class Alarms(EndingCallback):
    """Logs `alarm/<name>`, 1 while an alarm lasts and otherwise 0, at the last step of every rollout.

    Args:
        take_totals: returns the metrics of the rollout that has just ended, and forgets them.
        log: adds metrics to those of the next log.
        may_save: returns whether the weights after the last step may be saved; the end of the run waits for it.
    """

    def __init__(
        self,
        take_totals: Callable[[], dict[str, float]],
        log: Callable[[dict[str, float]], None],
        may_save: Callable[[], bool],
    ):
        self.take_totals = take_totals
        self.log = log
        self.may_save = may_save
        self._reset()

    def _reset(self) -> None:
        # For each alarm, the rollouts in a row in which its condition has held.
        self._in_a_row = dict.fromkeys(RULES, 0)
        # Metrics of the first rollouts, summed.
        self._first_sums = {rule.metric: 0.0 for rule in RULES.values() if rule.is_relative}
        self._num_first = 0
        # Why the run will end, until `ended` says that it has.
        self._ending: str | None = None
        self.ended = None
        self.explanation: str | None = None
        # Name and explanation of the alarms that this process has raised.
        self.raised: list[tuple[str, str]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, as JSON values."""
        return {"in_a_row": self._in_a_row, "first_sums": self._first_sums, "num_first": self._num_first}

    def load_state_dict(self, state: dict[str, Any], config: AlarmConfig) -> None:
        """Restore what `state_dict` returned. An alarm that ended the run starts counting again."""
        self._in_a_row |= state["in_a_row"]
        self._first_sums, self._num_first = dict(state["first_sums"]), state["num_first"]
        for name in config.stop_on_alarm or ():
            if self._in_a_row[name] >= config.alarm_patience:
                self._in_a_row[name] = 0

    def needed_checkpoints(self, step: int, config: AlarmConfig) -> set[Path]:
        """Return the last checkpoint from before each condition that holds at a step, whether or not it is raised."""
        slots, output_dir = config.slots_per_rollout, Path(config.output_dir)
        end = step - step % slots
        # The weights that sampled the first bad rollout are bad; those that sampled the one before were not.
        steps = {end - (count + 1) * slots for count in self._in_a_row.values() if count}
        return {output_dir / name for name in (last_checkpoint(output_dir, good) for good in steps) if name}

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: AlarmConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The trainer restores the state from a checkpoint after this.
        self._reset()
        if args.stop_on_alarm and args.save_total_limit and args.save_strategy == "steps" and state.save_steps:
            needed = fewest_checkpoints(int(state.save_steps), args.slots_per_rollout)
            if max(args.save_total_limit, LEAST_KEPT) < needed:
                logger.warning(
                    f"save_total_limit {args.save_total_limit} with save_steps {state.save_steps:g} may leave no"
                    f" checkpoint from before an alarm; set it to {needed} or more"
                )

    def on_step_end(self, args: AlarmConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % args.slots_per_rollout == 0:
            self._end_rollout(args, state)
        if self._ending is not None and self.may_save():
            self.ended = self._ending
            control.should_training_stop = control.should_save = True

    def _end_rollout(self, args: AlarmConfig, state: TrainerState) -> None:
        metrics = self.take_totals()
        num_rows = args.rollout_batch_size * args.num_generations
        first = {}
        if self._num_first >= NUM_FIRST:
            first = {name: total / self._num_first for name, total in self._first_sums.items()}
        is_on: dict[str, float] = {}
        for name in RULES:
            limit = getattr(args, f"alarm_{name}")
            if limit is None:
                self._in_a_row[name] = 0
                continue
            breach = find_breach(name, limit, metrics, first, num_rows)
            was_on = self._in_a_row[name] >= args.alarm_patience
            self._in_a_row[name] = self._in_a_row[name] + 1 if breach else 0
            is_on[f"alarm/{name}"] = float(self._in_a_row[name] >= args.alarm_patience)
            if self._in_a_row[name] == args.alarm_patience:
                self._raise_alarm(name, breach, args, state)
            elif was_on and not breach:
                logger.info(f"alarm {name} is over")
        self.log(is_on)
        if self._num_first < NUM_FIRST and all(name in metrics for name in self._first_sums):
            self._num_first += 1
            self._first_sums = {name: total + metrics[name] for name, total in self._first_sums.items()}

    def _raise_alarm(self, name: str, breach: tuple[float, float], args: AlarmConfig, state: TrainerState) -> None:
        rule, num_rollouts = RULES[name], args.alarm_patience
        # The first bad rollout was sampled by the weights at this step, the one before it by good ones.
        begin = state.global_step - num_rollouts * args.slots_per_rollout
        good = last_checkpoint(args.output_dir, begin - args.slots_per_rollout)
        remedy = "No checkpoint is left from before it: start a new run, with another output_dir"
        if good is not None:
            remedy = (
                f"The last checkpoint from before it is {good}: --resume {Path(args.output_dir) / good}"
                " (resume_from_checkpoint of train) resumes there, with allow_config_change if settings change"
            )
        (value, bound), side = breach, "above" if rule.is_upper else "below"
        period = f"in {num_rollouts} rollouts in a row, sampled from step {begin} on"
        self.explanation = (
            f"alarm {name} at step {state.global_step}: {rule.description} is {value:.4g}, {side} the limit"
            f" {bound:.4g} (alarm_{name} {getattr(args, f'alarm_{name}'):g}),"
            f" {period if num_rollouts > 1 else 'in a rollout'}. The usual cause: {rule.cause}. What helps:"
            f" {rule.change}. {remedy}"
        )
        self.raised.append((name, self.explanation))
        if name in (args.stop_on_alarm or ()):
            consequence = "Training stops"
            self._ending = self._ending or f"alarm {name} at step {state.global_step}"
        else:
            consequence = f"Training continues (stop_on_alarm [{name}] would end it)"
        logger.warning(f"{self.explanation}. {consequence}")
