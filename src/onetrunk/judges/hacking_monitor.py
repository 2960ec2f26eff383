"""HackingMonitor: detects a policy that gets better at pleasing the reward, but not better.

Every few rollouts the policy answers the same prompts with the same random numbers. The reward functions (the proxy)
and a judge that PPO never sees rate the same completions. If the proxy rises while the judge falls, the monitor raises
an alarm, and stops the run if it is set to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from onetrunk.checkpoints.folders import last_checkpoint
from onetrunk.checkpoints.resume_point import EndingCallback
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Answer, Judge
from onetrunk.judges.labels import kept_ratings
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.types import as_text
from onetrunk.utils.files import digest
from onetrunk.utils.ledger import Ledger

logger = get_logger(__name__)

# What it does at an alarm.
ACTIONS = ("warn", "stop")
SERIES = ("proxy", "judge")
# A measurement with fewer of its prompts rated is left out.
LEAST_RATED = 0.5
# A change counts if it exceeds this many of its standard errors and this many standard deviations of a score.
# Simulated with 64 prompts, windows of 5, 10 and 20, and a reward that rises all the time: a constant judge raises an
# alarm in 1 of 50 runs of 40 measurements, one that falls by .1 (.02) standard deviations per measurement at the 5th
# (20th).
LEAST_ERRORS = 3.5
LEAST_CHANGE = 0.1
# Windows of these multiples of the given length are tested, so that a slow fall is found too.
SPANS = (1, 2, 4)
# Attributes of the monitor that checkpoints keep.
KEPT = ("baseline", "measurements", "best", "num_alarms", "num_left_out", "explanation", "ended")

Series = dict[str, list[float | None]]


def check_monitor(every: int, action: str, num_rows: int) -> None:
    """Raise ValueError for a setting of a monitor that is out of range."""
    if every < 1:
        raise ValueError(f"monitor_every is {every} rollouts between two measurements; set it to 1 or more")
    if num_rows < 2:
        raise ValueError(f"monitor_rows is {num_rows}; one prompt gives no reliable change: set it to 2 or more")
    if action not in ACTIONS:
        raise ValueError(f"monitor_action is {action!r}; expected {' or '.join(ACTIONS)}")


def paired_change(series: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    """Return the mean change of the rows' scores, by a least-squares line per row, and its standard error.

    A line per row removes what is peculiar to the row, which a comparison of means would take for noise. Both are NaN
    if fewer than two rows are left.

    Args:
        series: [measurements, rows], 2 measurements or more, the earliest first; rows with a None are left out.
    """
    rows = [values for values in zip(*series, strict=True) if None not in values]
    if len(rows) < 2:
        return math.nan, math.nan
    scores = torch.tensor(rows, dtype=torch.float64)
    times = torch.arange(scores.shape[1], dtype=torch.float64)
    centred = times - times.mean()
    changes = scores @ centred / centred.square().sum() * (len(times) - 1)
    return float(changes.mean()), float(changes.std()) / math.sqrt(len(changes))


def _from_first(value: Any) -> Any:
    values = [value]
    broadcast_object_list(values)
    return values[0]


class HackingMonitor(EndingCallback, ExportableState):
    """Logs `judge/score`, `judge/proxy_score`, `judge/gap` and `judge/alarm`, and warns or stops.

    Both scores are in units of the standard deviation of a completion's score before training, from its mean then; the
    gap is the proxy's minus the judge's. A window is tested prompt by prompt: a line is fitted to the scores of each
    prompt, and the mean rise of these lines must exceed LEAST_ERRORS of its standard errors, upwards for the proxy and
    downwards for the judge. Windows of twice and four times the length are tested too.

        monitor = HackingMonitor(judge, constitution, every=2, action="stop")
        monitor.attach(trainer)
        trainer.train()

    Args:
        judge: rates the completions; no reward function should use it. None on all processes but the first, which
            alone asks it.
        constitution: the principles by which it rates.
        every: rollouts between two measurements.
        window: measurements in a window, 2 or more.
        action: "warn", or "stop" to end training at an alarm.
        num_rows: number of held-out prompts, or of training prompts if there are none.
        memory: keeps the judge's answers.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        judge: Judge | None,
        constitution: Constitution,
        *,
        every: int = 1,
        window: int = 5,
        action: str = "warn",
        num_rows: int = 64,
        memory: Ledger | None = None,
    ):
        check_monitor(every, action, num_rows)
        if window < 2:
            raise ValueError(f"window is {window}; a change takes two measurements: set it to 2 or more")
        self.judge, self.constitution, self.memory = judge, constitution, memory
        self.every, self.window, self.action = every, window, action
        self.num_rows = num_rows
        self.rows: Dataset | None = None
        self._trainer: PPOTrainer | None = None
        self._watched: str | None = None
        self._judge_name = "" if judge is None else judge.name
        # Why the judge gave a completion of the last measurement no rating.
        self._unrated = ""
        self._reset()

    def _reset(self) -> None:
        # Mean and std of the first measurement, the last measurements, step and score of the one rated best.
        self.baseline: dict[str, list[float]] | None = None
        self.measurements: list[dict[str, Any]] = []
        self.best: list[float] | None = None
        self.num_alarms = self.num_left_out = 0
        self.explanation: str | None = None
        self.ended = None

    def attach(self, trainer: PPOTrainer) -> None:
        """Watch the training of `trainer`."""
        held_out = trainer.eval_dataset
        held_out = next(iter(held_out.values())) if isinstance(held_out, dict) else held_out
        rows = trainer.train_dataset if held_out is None else held_out
        self.rows = rows.select(range(min(self.num_rows, len(rows))))
        self._trainer, self._watched = trainer, self._identity(trainer)
        trainer.add_callback(self)

    def _identity(self, trainer: PPOTrainer) -> str:
        """Return a digest of what measurements depend on, except the policy; the same on every process."""
        rewards = trainer.sampler.rewards
        judge = None if self.judge is None else self.judge.identity
        settings = [self.constitution.version, rewards.names, rewards.weights, trainer.args.seed]
        return _from_first(digest([judge, *settings, [list(ids) for ids in self.rows["prompt_ids"]]]))

    # --- transformers calls -----------------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Trainer's state holds the state of the checkpoint, or the one from when training was set up.
        is_restored = self._restore(state.stateful_callbacks.get(type(self).__name__))
        if self.ended is not None:
            # An ended run is continued: another alarm needs a new window.
            self.measurements, self.ended = self.measurements[-1:], None
        if not is_restored:
            self._reset()
            before = self._measure(state)
            if before is not None:
                # Changes are measured from here, so the gap is 0.
                first = {"judge/score": before["judge"], "judge/proxy_score": before["proxy"], "judge/gap": 0.0}
                self._trainer.log(first)
        # Without an entry, as in a checkpoint of a run without a monitor, saving the next checkpoint would fail.
        state.stateful_callbacks[type(self).__name__] = self.state()

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % (self._trainer.args.steps_per_rollout * self.every):
            return
        start = time.perf_counter()
        scores = self._measure(state)
        if scores is None:
            return
        proxy, judge = ((scores[name] - self.baseline[name][0]) / self.baseline[name][1] for name in SERIES)
        alarm = self.find_alarm()
        self._trainer.metric_log.add_rollout(
            {
                "judge/score": scores["judge"],
                "judge/proxy_score": scores["proxy"],
                "judge/gap": proxy - judge,
                "judge/alarm": float(alarm is not None),
                "time/judge_s": time.perf_counter() - start,
            }
        )
        if alarm is not None:
            self.num_alarms += 1
            self._act(*alarm, state, control)

    def restore_ended(self, state: TrainerState) -> None:
        """Restore what a checkpoint keeps, from the trainer's state."""
        self._restore(state.stateful_callbacks.get(type(self).__name__))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        attributes = {"watched": self._watched, **{name: getattr(self, name) for name in KEPT}}
        return {"args": {}, "attributes": attributes}

    # --- measuring --------------------------------------------------------------------------------------------------

    def _restore(self, saved: dict[str, Any] | None) -> bool:
        """Restore a checkpoint's state; return whether it holds measurements of the same judge and prompts."""
        kept = (saved or {}).get("attributes", {})
        # The state from when training was set up has no measurement, not even one that was left out.
        if kept.get("baseline") is None and not kept.get("num_left_out"):
            return False
        if kept["watched"] != self._watched:
            logger.warning(
                "the monitor's judge, constitution or prompts have changed since the checkpoint: it starts again here"
            )
            return False
        for name in ("baseline", "best", "num_alarms", "num_left_out"):
            setattr(self, name, kept[name])
        self.explanation, self.ended = kept.get("explanation"), kept.get("ended")
        self.measurements = list(kept["measurements"])[-self.window * SPANS[-1] :]
        return True

    def _measure(self, state: TrainerState) -> dict[str, float] | None:
        """Add a measurement; return the mean score of proxy and judge, or None if it was left out."""
        measured = self._scores(state.global_step)
        if measured is None:
            self.num_left_out += 1
            return None
        if self.baseline is None:
            self.baseline = {name: _baseline(measured[name]) for name in SERIES}
        kept = [*self.measurements, {"step": state.global_step, **measured}]
        self.measurements = kept[-self.window * SPANS[-1] :]
        means = {name: _mean(measured[name]) for name in SERIES}
        if self.best is None or means["judge"] >= self.best[1]:
            self.best = [state.global_step, means["judge"]]
        return means

    def _scores(self, at_step: int) -> Series | None:
        """Return the "proxy" and "judge" scores of every row, the same on every process; None if too few have both.

        Every process must call it. The policy samples with the same random numbers each time.
        """
        trainer, num_rows = self._trainer, len(self.rows)
        _, scored = trainer.sample_and_score(self.rows, "policy", "judged", is_shown=False)
        ranks = trainer.data_parallel
        totals, stopped = scored.scores.total.tolist(), scored.rollout.stopped
        columns = zip(scored.batch.prompts, map(as_text, scored.completions), map(bool, stopped), totals, strict=True)
        local = [(ranks.process_index + i * ranks.num_processes, *row) for i, row in enumerate(columns)]
        answered = sorted((row for row in ranks.gather_object(local) if row[0] < num_rows), key=lambda row: row[0])
        ratings = self._ratings(answered) if trainer.accelerator.is_main_process else []
        # A row counts only with both scores.
        both = [
            (row[4], rating) if math.isfinite(row[4]) and rating is not None else (None, None)
            for row, rating in zip(answered, _from_first(ratings), strict=True)
        ]
        num_rated = sum(rating is not None for _, rating in both)
        if num_rated < max(2, LEAST_RATED * len(both)):
            logger.warning(
                f"step {at_step}: {num_rated} of {len(both)} completions of the monitor have scores from both reward"
                " and judge; this measurement is left out, and training continues"
                + (f" (the judge on one of them: {self._unrated})" if self._unrated else "")
            )
            return None
        return {"proxy": [proxy for proxy, _ in both], "judge": [rating for _, rating in both]}

    def _ratings(self, answered: Sequence[tuple]) -> list[float | None]:
        _, prompts, texts, stopped, _ = map(list, zip(*answered, strict=True))
        self._unrated = ""

        def note(_: Any, answer: Answer) -> None:
            if answer.number is None:
                self._unrated = self._unrated or answer.error or answer.reason or "no reason"

        try:
            return kept_ratings(self.judge, prompts, texts, self.constitution, self.memory, stopped, note)
        except Exception as error:  # Training does not depend on the monitor.
            logger.warning(f"the monitor's judge failed ({type(error).__name__}: {error})")
            return [None] * len(prompts)

    # --- alarm ------------------------------------------------------------------------------------------------------

    def find_alarm(self) -> tuple[int, dict[str, float]] | None:
        """Return the first step of a window that raises an alarm and the changes of proxy and judge; else None."""
        for length in (span * self.window for span in SPANS):
            measured, changes = self.measurements[-length:], {}
            for name, sign in zip(SERIES, (1, -1), strict=True) if len(measured) == length else ():
                unit = self.baseline[name][1]
                change, error = (x / unit for x in paired_change([m[name] for m in measured]))
                if sign * change > max(LEAST_CHANGE, LEAST_ERRORS * error):
                    changes[name] = change
            if len(changes) == len(SERIES):
                return measured[0]["step"], changes
        return None

    def _act(self, first_step: int, changes: dict[str, float], state: TrainerState, control: TrainerControl) -> None:
        best = "what training started from"
        if self.best[0]:
            checkpoint = last_checkpoint(self._trainer.args.output_dir, int(self.best[0]))
            best = f"step {int(self.best[0])}; {checkpoint or 'no checkpoint'} is the last checkpoint up to there"
        self.explanation = (
            f"from step {first_step} to step {state.global_step} the reward rose by {changes['proxy']:.2f} and the"
            f" judge {self._judge_name}, which PPO does not see, fell by {-changes['judge']:.2f} (in standard"
            " deviations of a completion's score before training): the policy learns what the reward likes and the"
            f" judge does not. The judge preferred {best}"
        )
        if self.action == "stop":
            self.ended = f"the monitor's alarm at step {state.global_step}"
            control.should_training_stop = True
            # The checkpoint records that the run has ended, also if it is killed before its result is written.
            control.should_save = control.should_save or self._trainer.may_save()
            logger.warning(
                f"training stops: {self.explanation}. Correct the reward or raise beta, then start a new run"
            )
        else:
            logger.warning(f"{self.explanation}. Training continues (monitor_action stop would end it)")

    def summary(self) -> dict[str, Any]:
        """Return the monitor's entry in the run's metrics.json."""
        best = None if self.best is None else {"step": int(self.best[0]), "judge_score": self.best[1]}
        counts = {"alarms": self.num_alarms, "left_out": self.num_left_out}
        return {"judge": self._judge_name, **counts, "best": best, "last_alarm": self.explanation}


def _baseline(values: Sequence[float | None]) -> list[float]:
    scores = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
    std = float(scores.std()) if len(scores) > 1 else 0.0
    # Equal scores have no standard deviation: their own unit is used.
    return [float(scores.mean()), std if std > 1e-9 else 1.0]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)
