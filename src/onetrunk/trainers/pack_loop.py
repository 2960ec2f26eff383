"""One optimizer step: forward and backward over the packs of a minibatch, in parts where the memory does not hold one.

Knows packs, gradients and memory; the objective is `compute_loss`.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from onetrunk.models.offload import offloaded_activations
from onetrunk.ops.out_of_memory import free_memory, is_out_of_memory
from onetrunk.trainers.stopping import StopAsked
from onetrunk.types import Minibatch, to_device


class PackLoop(Trainer):
    """The part of PPOTrainer that runs the packs of an optimizer step."""

    def training_step(self, model: nn.Module, inputs: dict[str, Minibatch], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward over the packs of a minibatch; return its loss, summed over this process."""
        minibatch = inputs["minibatch"]
        self._step_start = time.perf_counter()
        self.guard.begin_step(minibatch.is_empty_slot)
        if minibatch.is_empty_slot:
            self._give_scaler_gradients(model)
            return torch.zeros((), device=self.accelerator.device)
        if not model.training:  # a walk over all modules
            model.train()
        total = self._run_unless_stopped(model, minibatch)
        while isinstance(total, str):  # memory ran out
            self._forget_step(model)
            free_memory()
            self.pack_size.shrink([e.pack for e in minibatch.experiences], total)
            total = self._run_unless_stopped(model, minibatch)
        self._stop_on_target_kl()
        return total

    def _run_unless_stopped(self, model: nn.Module, minibatch: Minibatch) -> Tensor | str:
        # The first step of a rollout is not given up: what the rollout has moved (beta, moments) has moved. Nor is one
        # of several processes, whose gradients the others wait for.
        if self.accelerator.num_processes > 1 or not self._stream.can_retreat:
            return self._run_packs(model, minibatch)
        try:
            with self.stop_signals.giving_up(self.accelerator):
                return self._run_packs(model, minibatch)
        except StopAsked:
            self._forget_step(model)
            self._stream.retreat()
            raise

    def _forget_step(self, model: nn.Module) -> None:
        model.zero_grad()
        self.metric_log.drop_step()

    def _run_packs(self, model: nn.Module, minibatch: Minibatch) -> Tensor | str:
        """Return the loss of a minibatch whose gradients are there, or what torch said where memory ran out."""
        try:
            return self._run_all_packs(model, minibatch)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self.accelerator.num_processes > 1:
                raise self._alone(minibatch, error) from error
            return str(error)

    def _alone(self, minibatch: Minibatch, error: BaseException) -> RuntimeError:
        rows, width = (max(e.pack.input_ids.shape[i] for e in minibatch.experiences) for i in (0, 1))
        reason = (str(error) or "out of memory").splitlines()[0]
        return RuntimeError(
            f"the memory of process {self.accelerator.process_index} does not hold the update of {rows} rows x {width}"
            f" tokens ({reason}). One of several processes can't make a step again whose gradients the others wait"
            f" for: set per_device_train_batch_size to {max(1, rows // 2)}, lower microbatch_tokens or"
            " max_completion_length, or set activation_checkpointing, then resume"
        )

    def memory_figures(self) -> dict[str, float]:
        """Return `memory/halvings`, how often update and scoring have had to take half the rows; nothing where never.

        It counts from the start of this process."""
        count = self.pack_size.num_halvings
        count += self._stream.scorer.pack_size.num_halvings if self._stream else 0
        return {"memory/halvings": float(count)} if count else {}

    def _run_all_packs(self, model: nn.Module, minibatch: Minibatch) -> Tensor:
        total = torch.zeros((), device=self.accelerator.device)
        self._policy_kl = torch.zeros_like(total)
        experiences = [part for whole in minibatch.experiences for part in self.pack_size.parts(whole)]
        last = len(experiences) - 1
        for i, experience in enumerate(experiences):
            self.stop_signals.poll()
            sync = contextlib.nullcontext() if i == last else self.accelerator.no_sync(model)
            with sync:
                pack = {"experience": to_device(experience, self.accelerator.device), "minibatch": minibatch}
                with offloaded_activations(model) if self.args.activation_offloading else contextlib.nullcontext():
                    loss = self.compute_loss(model, pack)
                # DDP averages gradients over processes; the loss is a share of a global mean.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach() * self.accelerator.num_processes
        return total

    def _give_scaler_gradients(self, model: nn.Module) -> None:
        # The gradient scaler of fp16 fails on a step that has seen no gradient; StepGuard takes these away again.
        if self.args.fp16:
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter)

    def _stop_on_target_kl(self) -> None:
        if self.args.target_kl is None:
            return
        if self.accelerator.reduce(self._policy_kl, reduction="sum").item() > self.args.target_kl:
            self.guard.begin_step(is_empty=True)
            self._stream.skip_rest_of_rollout()
