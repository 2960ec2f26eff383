"""Watches the figures of every rollout: says once what goes wrong, why as a rule, and what to change; may end the run.

An alarm is raised when its condition held for `alarm_patience` rollouts in a row, and is over with the first rollout
that is as it should be. Knows figures, settings and the names of checkpoints; changes no weight.
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
from onetrunk.ppo.alarm_settings import ALARMS
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.metrics import MetricLog

# With the sampler's own probabilities, the sum of k1 over a rollout's completions falls below -x with probability
# exp(-x) at most (Markov's inequality, for the mean of exp(-k1) is 1): 2e-9 here.
CHANCE_NATS = 20.0
# Of so few completions that stop, too few more or less would be an alarm.
LEAST_STOPPED = 0.3

OF_FIRST = {"length_collapse": "completion/length", "length_explosion": "completion/stopped_fraction"}


@dataclass(frozen=True)
class Rule:
    """One alarm.

    Args:
        figure: name of the figure that is watched.
        is_upper: True where the limit is the largest figure that is right, False where it is the smallest.
        seen: what the figure is, for a sentence.
        cause: what usually lies behind it.
        change: what to do.
    """

    figure: str
    is_upper: bool
    seen: str
    cause: str
    change: str


RULES = {
    "kl": Rule(
        "kl/ref",
        True,
        "the KL to the reference, nats per completion,",
        "a reward that pays for what the reference never says, too small a beta, or too large a learning rate",
        "raise beta or set kl_target, lower learning_rate, and read completions",
    ),
    "negative_kl": Rule(
        "kl/ref",
        False,
        "the KL to the reference, nats per completion, which can't be negative,",
        "a sampler that draws from other probabilities than the trainer scores: another temperature, truncated"
        " sampling, stale or rounded weights, an override that scores otherwise",
        "look at sampling/logprob_gap_mean and at the rollout backend",
    ),
    "logprob_gap": Rule(
        "sampling/logprob_gap_mean",
        True,
        "the difference between the sampler's logprobs and the trainer's, nats per token,",
        "a sampler that has other weights, another adapter, temperature or precision than the trainer, or a"
        " logits_processor",
        "check that the rollout backend takes over the policy in sync and returns logprobs after temperature",
    ),
    "length_collapse": Rule(
        "completion/length",
        False,
        "the mean completion length, tokens,",
        "a reward or a penalty that is best served by saying nothing",
        "lower length_penalty, score short completions for what they lack, or raise beta",
    ),
    "length_explosion": Rule(
        "completion/stopped_fraction",
        False,
        "the share of completions that end by themselves",
        "a reward that grows with length, or completions that are cut and scored as if they had ended",
        "set missing_eos_penalty or length_penalty, or raise max_completion_length",
    ),
    "entropy": Rule(
        "policy/entropy",
        False,
        "the policy's entropy, nats per token,",
        "a policy that says one thing to everything, after too many steps on too few prompts or one reward that pays"
        " for a phrase",
        "set entropy_coef or raise beta, lower learning_rate or num_ppo_epochs, and use more prompts",
    ),
    "repeated_ngrams": Rule(
        "completion/repeated_ngrams",
        True,
        "the share of 4-grams that occurred before in the same completion",
        "a reward that does not mind repetition, or a policy that has left the reference's language",
        "score repetition in the reward, raise beta, or set missing_eos_penalty",
    ),
    "clip_fraction": Rule(
        "policy/clip_fraction",
        True,
        "the share of tokens that the loss clips",
        "steps too large or too many for one rollout",
        "lower learning_rate or num_ppo_epochs, set target_kl, or raise rollout_batch_size",
    ),
    "skipped_steps": Rule(
        "policy/skipped_fraction",
        True,
        "the share of steps that left the weights alone",
        "a target_kl that the first steps exceed, gradients that are not finite, or completions that are all masked",
        "lower learning_rate, raise target_kl, and look for infinite scores",
    ),
    "explained_variance": Rule(
        "value/explained_variance",
        False,
        "the explained variance of the value head",
        "values that are worse than a constant: too large a value learning rate, or scores whose scale jumps",
        "lower value_learning_rate, set normalize_scores or value_pretraining_rollouts, or try value_head adapter",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A figure beyond its bound."""

    seen: float
    bound: float


def find(
    name: str, limit: float, figures: Mapping[str, float], first: Mapping[str, float], num_rows: int
) -> Finding | None:
    """Return what is wrong with a rollout by one rule; None where nothing is, or where nothing can be said.

    Args:
        name: of the alarm.
        limit: its setting.
        figures: of the rollout.
        first: means of the first rollouts; empty until they are over.
        num_rows: completions of a rollout.
    """
    rule = RULES[name]
    bound = limit
    if name == "negative_kl":
        bound = -max(limit, CHANCE_NATS / num_rows)
    elif name in OF_FIRST:
        if rule.figure not in first or (name == "length_explosion" and first[rule.figure] < LEAST_STOPPED):
            return None
        bound = limit * first[rule.figure]
    seen = figures.get(rule.figure)
    if seen is None or not (seen > bound if rule.is_upper else seen < bound):
        return None
    return Finding(seen, bound)


logger = get_logger(__name__)

# Their means are what the first rollouts were like.
NUM_FIRST = 3


def fewest_checkpoints(every: int, slots: int) -> int:
    """Return how many of the newest checkpoints reach back before a rollout that has just been found bad.

    Args:
        every: steps between two checkpoints.
        slots: steps of a rollout.
    """
    # The newest is gcd(every, slots) steps old at least, the one that is needed two rollouts at most.
    return 1 + math.ceil((2 * slots - math.gcd(every, slots)) / every)


class Alarms(EndingCallback):
    """Logs `alarm/<name>`, 1 while an alarm lasts and else 0, at the last step of every rollout.

    Args:
        metrics: returns the run's MetricLog, whose totals are those of the rollout.
        may_save: says whether the last step left weights that may be saved; until then a run that is to end goes on.
    """

    def __init__(self, metrics: Callable[[], MetricLog], may_save: Callable[[], bool]):
        self.metrics = metrics
        self.may_save = may_save
        self._begin_anew()

    def _begin_anew(self) -> None:
        # Rollouts in a row in which each condition held, and what the first rollouts were like, added up.
        self._in_a_row = dict.fromkeys(ALARMS, 0)
        self._first_sums = dict.fromkeys(OF_FIRST.values(), 0.0)
        self._num_first = 0
        # The alarm that ends the run; the end waits for weights that may be saved.
        self._ending: str | None = None
        self.ended = None
        self.explanation: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in terms of JSON."""
        return {"in_a_row": self._in_a_row, "first_sums": self._first_sums, "num_first": self._num_first}

    def load_state_dict(self, state: dict[str, Any], config: PPOConfig) -> None:
        """Go on from what `state_dict` returned. An alarm that has ended the run takes its patience anew where the run
        is continued all the same."""
        self._in_a_row |= state["in_a_row"]
        self._first_sums, self._num_first = dict(state["first_sums"]), state["num_first"]
        for name in config.stop_on_alarm or ():
            if self._in_a_row[name] >= config.alarm_patience:
                self._in_a_row[name] = 0

    def needed_checkpoints(self, step: int, config: PPOConfig) -> set[Path]:
        """Return the last checkpoints from before each condition that holds at a step, raised or not yet."""
        slots, output_dir = config.slots_per_rollout, Path(config.output_dir)
        end = step - step % slots
        # The weights that sampled the first bad rollout are bad, those that sampled the one before were not.
        steps = {end - (count + 1) * slots for count in self._in_a_row.values() if count}
        return {output_dir / name for name in (last_checkpoint(output_dir, good) for good in steps) if name}

    # --- transformers calls -----------------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The trainer loads the state of a checkpoint behind this.
        self._begin_anew()
        if args.stop_on_alarm and args.save_total_limit and args.save_strategy == "steps" and state.save_steps:
            needed = fewest_checkpoints(int(state.save_steps), args.slots_per_rollout)
            if max(args.save_total_limit, LEAST_KEPT) < needed:
                logger.warning(
                    f"save_total_limit {args.save_total_limit} with save_steps {state.save_steps:g} may leave no"
                    f" checkpoint from before an alarm; set it to {needed} or more"
                )

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % args.slots_per_rollout == 0:
            self._end_rollout(args, state)
        if self._ending is not None and self.may_save():
            self.ended = self._ending
            control.should_training_stop = control.should_save = True

    # --- judging ----------------------------------------------------------------------------------------------------

    def _end_rollout(self, args: PPOConfig, state: TrainerState) -> None:
        log = self.metrics()
        figures = log.totals.finish(log.accelerator)
        is_raised = self._judge(figures, args)
        log.add_rollout({f"alarm/{name}": float(self._in_a_row[name] >= args.alarm_patience) for name in is_raised})
        self._remember_first(figures)
        raised = {name: finding for name, finding in is_raised.items() if finding is not None}
        stopping = [name for name in raised if name in (args.stop_on_alarm or ())]
        for name, finding in raised.items():
            self._say(name, finding, args, state, name in stopping)
        if stopping and self._ending is None:
            self._ending = f"alarm {stopping[0]} at step {state.global_step}"

    def _judge(self, figures: dict[str, float], args: PPOConfig) -> dict[str, Finding | None]:
        """Return the alarms that are on, by name, with a finding where the alarm is raised now."""
        first = {}
        if self._num_first >= NUM_FIRST:
            first = {name: total / self._num_first for name, total in self._first_sums.items()}
        num_rows = args.rollout_batch_size * args.num_generations
        raised = {}
        for name in ALARMS:
            limit = getattr(args, f"alarm_{name}")
            if limit is None:
                self._in_a_row[name] = 0
                continue
            finding = find(name, limit, figures, first, num_rows)
            was_on = self._in_a_row[name] >= args.alarm_patience
            self._in_a_row[name] = self._in_a_row[name] + 1 if finding else 0
            is_on = self._in_a_row[name] >= args.alarm_patience
            raised[name] = finding if is_on and not was_on else None
            if was_on and not is_on:
                logger.info(f"alarm {name} is over")
        return raised

    def _remember_first(self, figures: dict[str, float]) -> None:
        if self._num_first < NUM_FIRST and all(name in figures for name in self._first_sums):
            self._num_first += 1
            for name in self._first_sums:
                self._first_sums[name] += figures[name]

    # --- words ------------------------------------------------------------------------------------------------------

    def _say(self, name: str, finding: Finding, args: PPOConfig, state: TrainerState, is_stop: bool) -> None:
        rule = RULES[name]
        rollouts = args.alarm_patience
        # Its completions came from the weights at this step.
        begin = state.global_step - rollouts * args.slots_per_rollout
        beyond = "above" if rule.is_upper else "below"
        times = f"in {rollouts} rollouts in a row, sampled from step {begin} on" if rollouts > 1 else "in a rollout"
        self.explanation = (
            f"alarm {name} at step {state.global_step}: {rule.seen} is {finding.seen:.4g}, {beyond} the limit"
            f" {finding.bound:.4g} (alarm_{name} {getattr(args, f'alarm_{name}'):g}), {times}. The usual cause:"
            f" {rule.cause}. What helps: {rule.change}. {self._way_back(begin, args)}"
        )
        what_now = "Training stops" if is_stop else f"Training goes on (stop_on_alarm [{name}] would end it)"
        logger.warning(f"{self.explanation}. {what_now}")

    def _way_back(self, begin: int, args: PPOConfig) -> str:
        # The weights at `begin` showed it; those that sampled the rollout before did not.
        good = last_checkpoint(args.output_dir, begin - args.slots_per_rollout)
        if good is None:
            return "No checkpoint is left from before it: start a new run, with another output_dir"
        folder = Path(args.output_dir) / good
        return (
            f"The last checkpoint from before it is {good}: --resume {folder} (resume_from_checkpoint of train) goes"
            " on from there, with allow_config_change where settings change"
        )
