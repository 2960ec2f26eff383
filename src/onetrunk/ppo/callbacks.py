"""Callbacks around an optimizer step: StepGuard discards bad gradients, RolloutProgress shows a progress bar."""

from __future__ import annotations

import contextlib
import math
import sys
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
    """A progress bar over optimizer steps, with the metrics that matter in PPO and the progress of sampling."""

    def __init__(self, opening: str | None = None) -> None:
        # Printed before the bar.
        self.opening = opening
        self.bar: tqdm | None = None
        self._phase = "rollout"
        self._sampling_bar: tqdm | None = None
        self._shows_sampling_bar = False
        self._shown: dict[str, str] = {}

    def add_to(self, trainer: Trainer) -> None:
        """Replace transformers' own progress bar by this one."""
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(self)

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            if self.opening:
                tqdm.write(self.opening, file=sys.stderr)
            # The first step of a rollout takes far longer than the others: only the mean over all predicts the end.
            settings = {"unit": "step", "dynamic_ncols": True, "smoothing": 0}
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="PPO", **settings)

    @contextlib.contextmanager
    def phase(self, name: str, is_shown: bool) -> Iterator[None]:
        """Label the sampling in the block with `name`; outside training it has its own bar if `is_shown`."""
        before, self._phase, self._shows_sampling_bar = self._phase, name, is_shown
        try:
            yield
        finally:
            self._phase, self._shows_sampling_bar = before, False
            if self._sampling_bar is not None:
                self._sampling_bar.close()
                self._sampling_bar = None

    def rollout(self, done_rows: int, total_rows: int, tokens: int) -> None:
        """Show how far a rollout is; called by the rollout backend."""
        if self.bar is not None:
            is_done = done_rows == total_rows
            self.bar.set_description("PPO" if is_done else f"PPO {self._phase} {done_rows}/{total_rows}")
        elif self._shows_sampling_bar:
            if self._sampling_bar is None:
                self._sampling_bar = tqdm(total=total_rows, desc=self._phase, unit="row", dynamic_ncols=True)
            self._sampling_bar.update(done_rows - self._sampling_bar.n)

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if self.bar is None or not logs:
            return
        self._shown |= {short: short_number(logs[name]) for short, name in SHOWN.items() if name in logs}
        self.bar.set_postfix(self._shown)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
