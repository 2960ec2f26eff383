"""Watches the figures of every rollout: says once what goes wrong, why as a rule, and what to change; may end the run.

An alarm is raised when its condition held for `alarm_patience` rollouts in a row, and is over with the first rollout
that is as it should be. Knows figures, settings and the names of checkpoints; changes no weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerControl, TrainerState

from onetrunk.checkpoints.folders import LEAST_KEPT
from onetrunk.trainers.alarm_rules import OF_FIRST, RULES, Finding, find
from onetrunk.trainers.alarm_settings import ALARMS
from onetrunk.trainers.good_checkpoint import last_checkpoint
from onetrunk.trainers.loop_state import EndingCallback
from onetrunk.trainers.metrics import MetricLog
from onetrunk.trainers.ppo_config import PPOConfig

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
