"""What happens around an optimizer step: bad gradients are thrown away, progress is shown.

Knows the trainer's state; no tensors but gradients.
"""

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
    TrainingArguments,
)

SHOWN = {
    "score": "score/mean",
    "kl": "kl/ref",
    "len": "completion/length",
    "tok/s": "throughput/completion_tokens_per_s",
    "eval_score": "eval_score/mean",
}

# Halvings from the largest scale that a gradient scaler starts with to one that any gradient fits.
SCALER_PATIENCE = 50


def short_number(value: float) -> str:
    """Return a number in three digits for people: 0.123, 12.3, 123, 7.5k, 1.2M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        # From here on three digits round up to the unit.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.3g}"


def optimizer_state(optimizer: Optimizer) -> list[Tensor]:
    """Return the floating-point tensors of an optimizer's state; those in 8 bit are none."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]


@torch.no_grad()
def are_finite(tensors: list[Tensor]) -> bool:
    """Return whether no entry is NaN or infinite; one wait for the device."""
    # The largest magnitude: no square overflows, and NaN stays.
    return not tensors or bool(get_total_norm(tensors, norm_type=math.inf).isfinite())


class StepGuard(TrainerCallback):
    """Empties an optimizer step whose gradient is not finite or that exceeds `target_kl`; stops after some in a row.

    A gradient of None leaves weights and optimizer state alone, while the schedule and the step count go on. Nothing
    is saved after a step that was not finite. An optimizer whose state is not finite takes no step, and one whose step
    makes it so, or the weights, is the last: both end the run before anything is saved.

    Args:
        max_skipped_steps: non-finite steps in a row after which the run stops.
    """

    def __init__(self, max_skipped_steps: int):
        self.max_skipped_steps = max_skipped_steps
        # In fp16 the gradient scaler skips steps that overflow, several in a row while it looks for its scale.
        self.has_scaler = False
        self.grad_norm = 0.0
        self.is_empty = False
        self.is_bad = False
        self.num_bad_in_a_row = 0

    def begin_step(self, is_empty: bool) -> None:
        """Note whether the step that begins is to leave the weights alone."""
        self.is_empty = is_empty

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Optimizer,
        **kwargs: Any,
    ) -> None:
        self.is_bad = not self.grad_norm < float("inf")
        self.num_bad_in_a_row = self.num_bad_in_a_row + 1 if self.is_bad else 0
        self.is_empty = self.is_empty or self.is_bad
        if self.is_empty and not (self.is_bad and self.has_scaler):
            for parameter in model.parameters():
                parameter.grad = None
        limit = max(self.max_skipped_steps, SCALER_PATIENCE) if self.has_scaler else self.max_skipped_steps
        if self.num_bad_in_a_row >= limit:
            raise RuntimeError(
                f"the gradient was not finite in {self.num_bad_in_a_row} optimizer steps in a row (step"
                f" {state.global_step}); the weights are those before them. Lower learning_rate, or look for infinite"
                " scores, then resume from the last checkpoint"
            )

        if not self.is_empty and not are_finite(optimizer_state(optimizer)):
            raise RuntimeError(
                f"the optimizer's state is not finite before step {state.global_step + 1}; the weights are those"
                " before it. Resume from an earlier checkpoint, or start a new run from the saved adapter"
            )

    def on_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Optimizer,
        **kwargs: Any,
    ) -> None:
        if self.is_empty:
            return
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not are_finite([*weights, *optimizer_state(optimizer)]):
            raise RuntimeError(
                f"step {state.global_step + 1}, of a gradient with norm {short_number(self.grad_norm)}, left weights"
                " or optimizer state that are not finite; nothing of it is saved. Lower learning_rate or set"
                " max_grad_norm, then resume from the last checkpoint"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.is_bad:
            control.should_save = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.is_bad:
            control.should_save = False


class StepEnd(TrainerCallback):
    """Calls back after every optimizer step, before anything is logged or saved.

    Args:
        ended: receives the trainer's state.
    """

    def __init__(self, ended: Callable[[TrainerState], None]):
        self.ended = ended

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.ended(state)


class RolloutProgress(TrainerCallback):
    """A progress bar over optimizer steps that shows what matters in PPO, and what is being sampled."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None
        self._phase = "rollout"
        self._own_bar: tqdm | None = None
        self._shows_own_bar = False
        self.opening: str | None = None
        self._shown: dict[str, str] = {}

    def replace_those_of(self, trainer: Trainer) -> None:
        """Take the place of transformers' own bar."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            if self.opening:
                tqdm.write(self.opening, file=sys.stderr)
            # A step that ends a rollout takes far longer than the others: only the mean over all says when it ends.
            settings = {"unit": "step", "dynamic_ncols": True, "smoothing": 0}
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="PPO", **settings)

    @contextlib.contextmanager
    def phase(self, name: str, is_shown: bool) -> Iterator[None]:
        """Call what is sampled in the block by this name; outside training it gets a bar of its own.

        Args:
            name: "eval", "before", ...
            is_shown: False shows nothing outside training.
        """
        before, self._phase, self._shows_own_bar = self._phase, name, is_shown
        try:
            yield
        finally:
            self._phase, self._shows_own_bar = before, False
            if self._own_bar is not None:
                self._own_bar.close()
                self._own_bar = None

    def rollout(self, done_rows: int, total_rows: int, tokens: int) -> None:
        """Show how far a rollout is; the rollout backend calls it."""
        if self.bar is not None:
            is_done = done_rows == total_rows
            self.bar.set_description("PPO" if is_done else f"PPO {self._phase} {done_rows}/{total_rows}")
        elif self._shows_own_bar:
            if self._own_bar is None:
                self._own_bar = tqdm(total=total_rows, desc=self._phase, unit="row", dynamic_ncols=True)
            self._own_bar.update(done_rows - self._own_bar.n)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.bar is None or not logs:
            return
        self._shown |= {short: short_number(logs[name]) for short, name in SHOWN.items() if name in logs}
        self.bar.set_postfix(self._shown)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
