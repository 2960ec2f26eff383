"""Callbacks around an optimizer step: StepGuard discards bad gradients, RolloutProgress shows progress."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from onetrunk.ppo.config import PPOConfig

SHOWN = {
    "score": "score/mean",
    "kl": "kl/ref",
    "len": "completion/length",
    "tok/s": "throughput/completion_tokens_per_s",
    "eval_score": "eval_score/mean",
}
# Longer names, where there is room.
WORDS = {"len": "length", "tok/s": "tokens/s"}

# The scaler halves its scale at every overflow; so many halvings bring it from its start to one that always fits.
SCALER_PATIENCE = 50


def short_number(value: float) -> str:
    """Return a number in three digits for people: 0.123, 12.3, 123, 7.5k, 1.2M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        # From here on three digits round up to the unit.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.3g}"


def optimizer_state(optimizer: Optimizer) -> list[Tensor]:
    """Return the floating-point tensors of an optimizer's state; 8-bit ones are left out."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]


@torch.no_grad()
def are_finite(tensors: list[Tensor]) -> bool:
    """Return whether no entry is NaN or infinite; waits for the device once."""
    # With the largest magnitude no square overflows, and NaN stays.
    return not tensors or bool(get_total_norm(tensors, norm_type=math.inf).isfinite())


class StepGuard(TrainerCallback):
    """Skips an optimizer step whose gradient is not finite, or that exceeds `target_kl`.

    Setting gradients to None keeps weights and optimizer state, while the schedule and the step count continue. After
    a non-finite step nothing is saved, and several in a row end the run. The run also ends, before anything is saved,
    if the optimizer's state is not finite, or if a step makes the state or the weights so.

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
        limit = max(args.max_skipped_steps, SCALER_PATIENCE) if has_scaler else args.max_skipped_steps
        if self.num_bad_in_a_row >= limit:
            raise RuntimeError(
                f"the gradient was not finite in {self.num_bad_in_a_row} optimizer steps in a row (step"
                f" {state.global_step}); the weights are those before them. Lower learning_rate, or look for infinite"
                " scores, then resume from the last checkpoint"
            )
        if not self.is_empty and not are_finite(optimizer_state(kwargs["optimizer"])):
            raise RuntimeError(
                f"the optimizer's state is not finite before step {state.global_step + 1}; the weights are those"
                " before it. Resume from an earlier checkpoint, or start a new run from the saved adapter"
            )

    def on_optimizer_step(
        self, args: PPOConfig, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        if self.is_empty:
            return
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not are_finite([*weights, *optimizer_state(kwargs["optimizer"])]):
            raise RuntimeError(
                f"step {state.global_step + 1}, of a gradient with norm {short_number(self.grad_norm)}, left weights"
                " or optimizer state that are not finite; it is not saved. Lower learning_rate or set max_grad_norm,"
                " then resume from the last checkpoint"
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


class RolloutProgress(TrainerCallback):
    """Shows how far a run is: its rollout and what it does in it, the metrics that matter in PPO, and the time left.

    Args:
        opening: printed before training.
        style: "bar" or "lines"; None: a bar in a terminal or notebook, lines elsewhere.
    """

    def __init__(self, opening: str | None = None, style: str | None = None) -> None:
        self.opening = opening
        self.style = style or default_style()
        self.bar: tqdm | None = None
        self._phase = "rollout"
        self._sampling_bar: tqdm | None = None
        self._shows_sampling_bar = False
        self._shown: dict[str, str] = {}
        # Of training; steps count from where this process began.
        self._rollouts, self._total_rollouts, self._first_step = 0, 0, 0
        self._begun = self._rollout_begun = 0.0
        # Rows of the sampling outside training, and whether a rollout has ended that no line tells of yet.
        self._sampled, self._is_line_due = 0, False

    def add_to(self, trainer: Trainer) -> None:
        """Replace transformers' own progress bar by this one."""
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(self)

    @contextlib.contextmanager
    def phase(self, name: str, is_shown: bool) -> Iterator[None]:
        """Label the sampling in the block with `name`; outside training it is shown by itself if `is_shown`."""
        before, self._phase, self._shows_sampling_bar = self._phase, name, is_shown
        self._sampled = 0
        try:
            yield
        finally:
            is_alone = self._shows_sampling_bar and not self._total_rollouts
            if self.style == "lines" and is_alone and self._sampled:
                write_line(f"{name}: {self._sampled} completions")
            self._phase, self._shows_sampling_bar = before, False
            self._describe_next()
            if self._sampling_bar is not None:
                self._sampling_bar.close()
                self._sampling_bar = None

    def rollout(self, done_rows: int, total_rows: int, tokens: int) -> None:
        """Show how far a rollout is; called by the rollout backend."""
        self._sampled = done_rows
        if self.bar is not None:
            work = "generating" if self._phase == "rollout" else self._phase
            self._describe("scoring" if done_rows == total_rows else f"{work} {done_rows}/{total_rows} completions")
        elif self._shows_sampling_bar and self.style == "bar":
            if self._sampling_bar is None:
                self._sampling_bar = tqdm(total=total_rows, desc=self._phase, unit="row", dynamic_ncols=True)
            self._sampling_bar.update(done_rows - self._sampling_bar.n)

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.opening:
            tqdm.write(self.opening, file=sys.stderr)
        self._total_rollouts = math.ceil(state.max_steps / args.slots_per_rollout)
        self._rollouts, self._first_step = state.global_step // args.slots_per_rollout, state.global_step
        self._begun = self._rollout_begun = time.monotonic()
        self._shown, self._is_line_due = {}, False
        if self.style == "bar":
            # The first step of a rollout takes far longer than the others: only the mean over all predicts the end.
            settings = {"unit": "step", "dynamic_ncols": True, "smoothing": 0}
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, **settings)
            self._describe("generating")

    def on_step_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write_due_line(state)  # Where the end of the rollout was not logged.
        if self.bar is not None:
            self._describe("updating")

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)
        if state.global_step % args.slots_per_rollout == 0:
            self._rollouts = state.global_step // args.slots_per_rollout
            self._is_line_due = self.style == "lines" and self._total_rollouts > 0
            self._describe_next()

    def on_log(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if not logs or not state.is_world_process_zero:
            return
        self._shown |= {short: short_number(logs[name]) for short, name in SHOWN.items() if name in logs}
        if self.bar is not None:
            self.bar.set_postfix(self._shown)
        elif self.style == "lines" and "eval_score/mean" in logs:
            names = {"score": "eval_score/mean", "kl": "eval_kl/ref", "length": "eval_completion/length"}
            values = [f"{short} {short_number(logs[name])}" for short, name in names.items() if name in logs]
            write_line(f"evaluation at step {state.global_step}: {', '.join(values)}")
        self._write_due_line(state)

    def on_train_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._write_due_line(state)
        self._total_rollouts = 0
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    # --- text -------------------------------------------------------------------------------------------------------

    def _describe(self, work: str) -> None:
        number = min(self._rollouts + 1, self._total_rollouts)
        self.bar.set_description(f"rollout {number}/{self._total_rollouts}: {work}")

    def _describe_next(self) -> None:
        if self.bar is not None:
            self._describe("generating" if self._rollouts < self._total_rollouts else "done")

    def _write_due_line(self, state: TrainerState) -> None:
        """Write the line of the rollout that has ended, if it is not written yet."""
        if not self._is_line_due:
            return
        self._is_line_due = False
        now = time.monotonic()
        values = [f"{WORDS.get(name, name)} {v}" for name, v in self._shown.items() if not name.startswith("eval_")]
        values.append(f"{now - self._rollout_begun:.1f} s")
        left = (
            (now - self._begun) / max(1, state.global_step - self._first_step) * (state.max_steps - state.global_step)
        )
        write_line(f"rollout {self._rollouts}/{self._total_rollouts}: {', '.join(values)}; {short_time(left)} left")
        self._rollout_begun = now


def default_style() -> str:
    """Return "bar" in a terminal or notebook, else "lines": frames of a bar would fill a file."""
    return "bar" if sys.stderr.isatty() or "ipykernel" in sys.modules else "lines"


def write_line(text: str) -> None:
    """Write a line of progress where a bar would be."""
    tqdm.write(text, file=sys.stderr)


def short_time(seconds: float) -> str:
    """Return a duration for people: 8 s, 3 min, 2 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
