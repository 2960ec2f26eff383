"""Progress of a run: a bar in a terminal or notebook, a line per rollout elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState

from onetrunk.ppo.config import PPOConfig

SHOWN = {"score": "score/mean", "kl": "kl/ref", "length": "completion/length"}
SHOWN |= {"tokens/s": "throughput/completion_tokens_per_s"}


def short_number(value: float) -> str:
    """Return a number in three digits for people: 0.123, 12.3, 123, 7.5k, 1.2M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        # From here on three digits round up to the unit.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.3g}"


def short_time(seconds: float) -> str:
    """Return a duration for people: 8 s, 3 min, 2 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _shown(logs: dict[str, Any], prefix: str = "") -> dict[str, str]:
    return {short: short_number(logs[prefix + name]) for short, name in SHOWN.items() if prefix + name in logs}


def _line(text: str) -> None:
    tqdm.write(text, file=sys.stderr)


class RolloutProgress(TrainerCallback):
    """Shows how far a run is: its rollout and what it does in it, the metrics that matter in PPO, and the time left.

    Args:
        opening: printed before training.
    """

    def __init__(self, opening: str | None = None) -> None:
        self.opening = opening
        # Frames of a bar would fill a file.
        self.has_bar = sys.stderr.isatty() or "ipykernel" in sys.modules
        self.bar: tqdm | None = None
        self._evaluation_bar: tqdm | None = None
        self._phase, self._is_shown, self._sampled = "rollout", False, 0
        self._metrics: dict[str, str] = {}
        # Of training; None outside.
        self._total_rollouts: int | None = None
        self._rollouts = self._first_step = 0
        self._begun = self._rollout_begun = 0.0
        # A rollout has ended whose line is not written yet.
        self._is_line_due = False

    def add_to(self, trainer: Trainer) -> None:
        """Replace transformers' own progress bar by this one."""
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(self)

    @contextlib.contextmanager
    def phase(self, name: str, is_shown: bool) -> Iterator[None]:
        """Label the sampling in the block with `name`; outside training it is shown by itself if `is_shown`."""
        before, self._phase = self._phase, name
        self._is_shown, self._sampled = is_shown and self._total_rollouts is None, 0
        try:
            yield
        finally:
            if self._is_shown and self._sampled and not self.has_bar:
                _line(f"{name}: {self._sampled} completions")
            self._phase, self._is_shown = before, False
            self._describe()
            if self._evaluation_bar is not None:
                self._evaluation_bar.close()
                self._evaluation_bar = None

    def rollout(self, done_rows: int, total_rows: int, tokens: int) -> None:
        """Show how far a rollout is; called by the rollout backend."""
        self._sampled = done_rows
        work = "generating" if self._phase == "rollout" else self._phase
        self._describe("scoring" if done_rows == total_rows else f"{work} {done_rows}/{total_rows} completions")
        if self._is_shown and self.has_bar:
            if self._evaluation_bar is None:
                self._evaluation_bar = tqdm(total=total_rows, desc=self._phase, unit="row", dynamic_ncols=True)
            self._evaluation_bar.update(done_rows - self._evaluation_bar.n)

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.opening:
            _line(self.opening)
        self._total_rollouts = math.ceil(state.max_steps / args.slots_per_rollout)
        self._rollouts, self._first_step = state.global_step // args.slots_per_rollout, state.global_step
        self._begun = self._rollout_begun = time.monotonic()
        self._metrics, self._is_line_due = {}, False
        if self.has_bar:
            # The first step of a rollout takes far longer than the others: only the mean over all predicts the end.
            settings = {"unit": "step", "dynamic_ncols": True, "smoothing": 0}
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, **settings)
            self._describe()

    def on_step_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write_due_line(state)  # Where the end of the rollout was not logged.
        self._describe("updating")

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)
        if state.global_step % args.slots_per_rollout == 0:
            self._rollouts = state.global_step // args.slots_per_rollout
            self._is_line_due = not self.has_bar and self._total_rollouts is not None
            self._describe()

    def on_log(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if not state.is_world_process_zero:
            return
        self._metrics |= _shown(logs)
        evaluated = _shown(logs, "eval_")
        if self.bar is not None:
            scores = {"eval_score": evaluated["score"]} if "score" in evaluated else {}
            self.bar.set_postfix(self._metrics | scores)
        elif evaluated and not self.has_bar:
            values = ", ".join(f"{name} {value}" for name, value in evaluated.items())
            _line(f"evaluation at step {state.global_step}: {values}")
        self._write_due_line(state)

    def on_train_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write_due_line(state)
        self._total_rollouts = None
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    # --- text -------------------------------------------------------------------------------------------------------

    def _describe(self, work: str | None = None) -> None:
        """Say in the bar what the run does; None: what comes next."""
        if self.bar is not None:
            work = work or ("generating" if self._rollouts < self._total_rollouts else "done")
            number = min(self._rollouts + 1, self._total_rollouts)
            self.bar.set_description(f"rollout {number}/{self._total_rollouts}: {work}")

    def _write_due_line(self, state: TrainerState) -> None:
        if not self._is_line_due:
            return
        self._is_line_due, now = False, time.monotonic()
        values = [f"{name} {value}" for name, value in self._metrics.items()] + [f"{now - self._rollout_begun:.1f} s"]
        per_step = (now - self._begun) / max(1, state.global_step - self._first_step)
        left = short_time(per_step * (state.max_steps - state.global_step))
        _line(f"rollout {self._rollouts}/{self._total_rollouts}: {', '.join(values)}; {left} left")
        self._rollout_begun = now
