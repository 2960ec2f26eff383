"""Alarms: the metrics of every rollout are compared with limits; a warning names the usual cause and what to change.

An alarm is raised when its condition has held for `alarm_patience` rollouts in a row, and `useless_values` also for a
mean over more of them. It is over when the condition no longer holds. The alarms and their limits are in
`alarm_rules.py`. StepGuard skips single steps whose gradient is not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from accelerate.logging import get_logger
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.checkpoints.folders import last_checkpoint
from onetrunk.checkpoints.resume_point import EndingCallback
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.monitoring.alarm_rules import RULES, quantile
from onetrunk.ppo.stream_state import NEW_RUN

logger = get_logger(__name__)

# With the sampler's own probabilities, the sum of k1 over a rollout's completions falls below -x with probability
# exp(-x) at most (Markov's inequality, because the mean of exp(-k1) is 1): 2e-9 here.
CHANCE_NATS = 20.0
# If a smaller share of the first completions stopped, a few more or fewer would raise length_explosion.
LEAST_STOPPED = 0.3
# Rollouts whose mean metrics are the reference of relative limits.
NUM_FIRST = 3
USELESS = "useless_values"
# The mean of useless_values is over at least this many completions and rollouts. LEAST_VALUE bounds what an outlier
# adds to it. A value nearer to 0 than CONSTANT is that of a constant.
LEAST_COMPLETIONS, LEAST_ROLLOUTS, LEAST_VALUE, CONSTANT = 512, 8, -0.5, 0.001
# This many non-finite steps in a row end the run.
MAX_SKIPPED_STEPS = 3
# The scaler halves its scale at every overflow; this many halvings bring it from its start to one that always fits.
SCALER_PATIENCE = 50


def find_breach(
    name: str, limit: float, metrics: Mapping[str, float], first: Mapping[str, float], num_rows: int
) -> tuple[float, float] | None:
    """Return the value of an alarm's metric and the bound that it is beyond; None if it is not, or is missing.

    Args:
        first: means over the first rollouts; empty until they are over.
    """
    rule, bound = RULES[name], limit
    if name == "negative_kl":
        bound = -max(limit, CHANCE_NATS / num_rows)
    elif rule.is_relative:
        if rule.metric not in first or (name == "length_explosion" and first[rule.metric] < LEAST_STOPPED):
            return None
        bound = limit * first[rule.metric]
    elif rule.metric == "value/explained_variance" and metrics.get("score/std", 1.0) < RULES["equal_scores"].limit:
        return None  # With equal scores the returns are the KL alone.
    value = metrics.get(rule.metric)
    if value is None or not (value > bound if rule.is_upper else value < bound):
        return None
    return value, bound


def useless_rollouts(values: Sequence[float], window: int, limit: float) -> tuple[int, tuple[float, float] | None]:
    """Return in how many rollouts the values were useless, and the breach as `find_breach` does.

    These are all rollouts of the window if the upper end of the mean's interval is below the limit, else the last
    ones whose values are a constant.

    Args:
        values: the explained variances of the last rollouts, at most `window`.
    """
    if len(values) == window:
        upper = fmean(values) + quantile(window - 1) * stdev(values) / math.sqrt(window)
        if upper < limit:
            return window, (upper, limit)
    constant = list(takewhile(lambda value: abs(value) < CONSTANT, reversed(values)))
    return len(constant), (abs(constant[0]), CONSTANT) if constant else None


class Alarms(EndingCallback):
    """Logs `alarm/<name>`, 1 while an alarm lasts and otherwise 0, at the last step of every rollout.

    Args:
        take_totals: returns the metrics of the rollout that has just ended, and forgets them.
        log: adds metrics to the next log.
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
        # The alarms that last, and the explained variances that useless_values is about.
        self._is_on: dict[str, bool] = {}
        self._values: list[float] = []
        # Why the run will end, until `ended` says that it has.
        self._ending: str | None = None
        self.ended = None
        self.explanation: str | None = None
        # Name and explanation of the alarms that this process has raised.
        self.raised: list[tuple[str, str]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, as JSON values."""
        first = {"first_sums": self._first_sums, "num_first": self._num_first}
        return {"in_a_row": self._in_a_row, "is_on": self._is_on, "values": self._values, **first}

    def load_state_dict(self, state: dict[str, Any], config: PPOConfig) -> None:
        """Restore what `state_dict` returned. An alarm that ended the run starts counting again."""
        self._in_a_row |= state["in_a_row"]
        self._first_sums, self._num_first = dict(state["first_sums"]), state["num_first"]
        counted = {name: count >= config.alarm_patience for name, count in self._in_a_row.items()}
        self._is_on, self._values = dict(state.get("is_on", counted)), list(state.get("values", ()))
        for name in config.stop_on_alarm or ():
            if self._is_on.pop(name, False):
                self._in_a_row[name] = 0
                self._values = [] if name == USELESS else self._values

    def needed_checkpoints(self, step: int, config: PPOConfig) -> set[Path]:
        """Return the last checkpoint from before each condition that holds at a step, whether or not it is raised."""
        slots, output_dir = config.steps_per_rollout, Path(config.output_dir)
        end = step - step % slots
        # The weights that sampled the first bad rollout are bad; those that sampled the one before were not. They may
        # be `max_staleness` rollouts older than its updates.
        steps = {end - (count + 1 + config.max_staleness) * slots for count in self._in_a_row.values() if count}
        return {output_dir / name for name in (last_checkpoint(output_dir, good) for good in steps) if name}

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The trainer restores the state from a checkpoint after this.
        self._reset()

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % args.steps_per_rollout == 0:
            self._end_rollout(args, state)
        if self._ending is not None and self.may_save():
            self.ended = self._ending
            control.should_training_stop = control.should_save = True

    def _end_rollout(self, args: PPOConfig, state: TrainerState) -> None:
        metrics = self.take_totals()
        num_rows = args.rollout_batch_size * args.num_generations
        first = {}
        if self._num_first >= NUM_FIRST:
            first = {name: total / self._num_first for name, total in self._first_sums.items()}
        window = max(LEAST_ROLLOUTS, math.ceil(LEAST_COMPLETIONS / num_rows))
        value = metrics.get("value/explained_variance", math.nan)
        has_scores = metrics.get("score/std", 1.0) >= RULES["equal_scores"].limit
        # The values of the first rollout are a constant.
        if has_scores and not math.isnan(value) and state.global_step > args.steps_per_rollout:
            self._values = [*self._values, max(value, LEAST_VALUE)][-window:]
        is_on: dict[str, bool] = {}
        for name, limit in args.limits.items():
            if limit is None:
                self._in_a_row[name] = 0
                continue
            patience, was_on = args.alarm_patience, self._is_on.get(name, False)
            if name == USELESS:
                patience = min(patience, window)
                count, breach = useless_rollouts(self._values, window, limit)
            else:
                breach = find_breach(name, limit, metrics, first, num_rows)
                count = self._in_a_row[name] + 1 if breach else 0
            self._in_a_row[name] = max(count, self._in_a_row[name] + 1) if breach else 0
            is_on[name] = count >= patience
            if is_on[name] and not was_on:
                self._raise_alarm(name, breach, args, state)
            elif was_on and not is_on[name]:
                logger.info(f"alarm {name} has ended")
        self._is_on = is_on
        self.log({f"alarm/{name}": float(value) for name, value in is_on.items()})
        if self._num_first < NUM_FIRST and all(name in metrics for name in self._first_sums):
            self._num_first += 1
            self._first_sums = {name: total + metrics[name] for name, total in self._first_sums.items()}

    def _raise_alarm(self, name: str, breach: tuple[float, float], args: PPOConfig, state: TrainerState) -> None:
        rule, num_rollouts = RULES[name], self._in_a_row[name]
        # The first bad rollout was sampled by the weights at this step, the one before it by good ones.
        begin = max(0, state.global_step - (num_rollouts + args.max_staleness) * args.steps_per_rollout)
        good = last_checkpoint(args.output_dir, begin - args.steps_per_rollout)
        remedy = "No checkpoint is left from before it: start a new run, with another output_dir"
        if good is not None:
            remedy = (
                f"The last checkpoint from before it is {good}: --resume {Path(args.output_dir) / good}"
                " (resume_from_checkpoint of train) resumes there, with allow_config_change if settings change"
            )
            fixed = [name for name in re.findall(r"\w+", rule.change) if name in NEW_RUN]
            remedy += f"; {' and '.join(fixed)} can change only in a new run" if fixed else ""
        (value, bound), side = breach, "above" if rule.is_upper else "below"
        period = f"in {num_rollouts} rollouts in a row, sampled from step {begin} on"
        self.explanation = (
            f"alarm {name} at step {state.global_step}: {rule.description} is {value:.4g}, {side} the limit"
            f" {bound:.4g} (alarm_limits {name} {args.limits[name]:g}),"
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


class StepGuard(TrainerCallback):
    """Skips an optimizer step whose gradient is not finite, or that exceeds `target_kl`.

    Setting gradients to None keeps weights and optimizer state, while the schedule and the step count continue. After
    a non-finite step nothing is saved, and several in a row end the run.

    Args:
        has_scaler: returns whether the run has a gradient scaler (fp16).
    """

    def __init__(self, has_scaler: Callable[[], bool]):
        self.has_scaler = has_scaler
        self.grad_norm = 0.0
        self.is_empty = False
        self.is_bad = False
        self.num_bad_in_a_row = 0

    def begin_step(self, is_empty: bool) -> None:
        """Begin a step; an empty one keeps the weights."""
        self.is_empty = is_empty

    def on_grad_norm(self, norm: float) -> None:
        """Receive the norm of the step's gradient, before clipping."""
        self.grad_norm = norm

    def on_pre_optimizer_step(
        self, args: PPOConfig, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        self.is_bad = not self.grad_norm < float("inf")
        self.num_bad_in_a_row = self.num_bad_in_a_row + 1 if self.is_bad else 0
        self.is_empty = self.is_empty or self.is_bad
        # The scaler itself skips steps that overflow, several in a row while it searches for its scale.
        has_scaler = self.has_scaler()
        if self.is_empty and not (self.is_bad and has_scaler):
            for parameter in model.parameters():
                parameter.grad = None
        limit = max(MAX_SKIPPED_STEPS, SCALER_PATIENCE) if has_scaler else MAX_SKIPPED_STEPS
        if self.num_bad_in_a_row >= limit:
            raise RuntimeError(
                f"the gradient was not finite in {self.num_bad_in_a_row} optimizer steps in a row (step"
                f" {state.global_step}); the weights are those before them. Look for infinite scores and resume from"
                " the last checkpoint, or start a new run with a lower learning_rate"
            )

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.is_bad:
            control.should_save = False

    on_epoch_end = on_step_end


class StepEnd(TrainerCallback):
    """Calls `end_step` with the trainer's state after every optimizer step, before anything is logged or saved."""

    def __init__(self, end_step: Callable[[TrainerState], None]):
        self.end_step = end_step

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.end_step(state)
