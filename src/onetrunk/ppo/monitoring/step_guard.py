"""StepGuard: discards gradients that are not finite, and ends a run whose weights or optimizer state are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.ppo.config import PPOConfig

# So many non-finite steps in a row end the run.
MAX_SKIPPED_STEPS = 3
# The scaler halves its scale at every overflow; so many halvings bring it from its start to one that always fits.
SCALER_PATIENCE = 50


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
        limit = max(MAX_SKIPPED_STEPS, SCALER_PATIENCE) if has_scaler else MAX_SKIPPED_STEPS
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
                f"step {state.global_step + 1}, of a gradient with norm {self.grad_norm:.3g}, left weights"
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
