"""Fit the value head to the returns of a rollout, on the states that scoring kept: no forward of the backbone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from onetrunk.models.value_head import ValueHead
from onetrunk.ops.masking import on_cpu, widest_dtype
from onetrunk.parallel.groups import RowGroups
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.packs import RolloutPack
from onetrunk.types import Experience
from onetrunk.utils.files import check_tensors, load_tensors, save_tensors
from onetrunk.utils.randomness import VALUE_STREAM, derived_seed

OPTIMIZER_FILE = "value_optimizer.safetensors"
# Tokens of one step.
BATCH_SIZE = 512
# Completions of a rollout that gets all of its steps. The returns of a completion are nearly one number, so a head
# overfits few completions, however many tokens they have.
FULL_ROLLOUT = 128
# Weight of a rollout in the running mean and standard deviation of the returns; early rollouts weigh more.
NEW_WEIGHT = 0.1


class ValueFit:
    """Takes `value_steps` steps of Adam after every rollout, on the squared error of tokens drawn from it.

    A rollout of fewer completions than FULL_ROLLOUT or of fewer tokens than one batch gets fewer steps, in proportion.
    Tokens are drawn by their number in the rollout of all processes, each of which adds the gradient of its own: the
    number of processes changes only the order of sums.

    Args:
        head: the head of the trunk; its parameters need no gradients outside the fit.
        config: value_steps, value_learning_rate and the seed.
        data_parallel: the processes.
    """

    def __init__(self, head: ValueHead, config: PPOConfig, data_parallel: RowGroups):
        self.head, self.num_steps, self.seed = head, config.value_steps, config.seed
        self.fits_turn_ends = config.truncated_completions == "bootstrap"
        self.num_rows = config.rollout_batch_size * config.num_generations
        self.data_parallel = data_parallel
        self.optimizer = torch.optim.Adam(head.parameters(), config.value_learning_rate)

    def fit(
        self, packs: Sequence[RolloutPack], experiences: Sequence[Experience], numbers: Sequence[int], iteration: int
    ) -> float:
        """Fit the head to the tokens that train; return half their mean squared error over the steps.

        Args:
            packs: with `output.value_states`.
            experiences: of the packs, with returns.
            numbers: of each row of this process in the rollout of all processes.
            iteration: number of the rollout.
        """
        rows = [torch.tensor([numbers[row] for row in item.rows]) for item in packs]
        of_packs = [item.pack for item in packs]
        has_state = [p.completion_mask | p.turn_ends if self.fits_turn_ends else p.completion_mask for p in of_packs]
        masks = on_cpu([*(e.value_tokens for e in experiences), *has_state])
        masks, sampled = masks[: len(packs)], masks[len(packs) :]
        counts = torch.zeros(self.num_rows, dtype=torch.long)
        for own, mask in zip(rows, masks, strict=True):
            counts.index_add_(0, own, mask.sum(1))
        if self.data_parallel.num_processes > 1:
            counts = self.data_parallel.sum(counts.to(self._device, non_blocking=True)).cpu()
        num_tokens, first = int(counts.sum()), counts.cumsum(0) - counts
        if not num_tokens:
            return 0.0
        states, returns, tokens = [], [], []
        for item, experience, own, mask, has_state in zip(packs, experiences, rows, masks, sampled, strict=True):
            states.append(item.output.value_states[mask[has_state]])
            place = mask.flatten().nonzero().squeeze(1).to(self._device, non_blocking=True)
            returns.append(experience.returns.flatten().index_select(0, place))
            row, _ = mask.nonzero(as_tuple=True)
            tokens.append(first[own[row]] + (mask.cumsum(1) - 1)[mask])
        places = torch.full((num_tokens,), -1)
        places[torch.cat(tokens)] = torch.arange(sum(map(len, tokens)))
        self._rescale(torch.cat(returns), iteration)
        return self._run(torch.cat(states), torch.cat(returns), places, iteration)

    def _rescale(self, returns: Tensor, iteration: int) -> None:
        wide = returns.to(widest_dtype(returns.device))
        sums = torch.stack([torch.ones_like(wide).sum(), wide.sum(), wide.square().sum()])
        moments = self.head.moments.to(sums.dtype)
        count, total, squares, mean, std = torch.cat([self.data_parallel.sum(sums), moments]).tolist()
        weight = max(NEW_WEIGHT, 1 / (iteration + 1))
        new_mean = (1 - weight) * mean + weight * total / count
        new_square = (1 - weight) * (mean**2 + std**2) + weight * squares / count
        # Returns that are all equal have no scale.
        variance = new_square - new_mean**2
        self.head.rescale(new_mean, math.sqrt(variance) if variance > 1e-12 * max(1.0, new_square) else 1.0)

    def _run(self, states: Tensor, returns: Tensor, places: Tensor, iteration: int) -> float:
        generator = torch.Generator().manual_seed(derived_seed(self.seed, VALUE_STREAM, iteration))
        num_steps = math.ceil(self.num_steps * min(1.0, len(places) / BATCH_SIZE, self.num_rows / FULL_ROLLOUT))
        total, parameters = torch.zeros((), device=self._device), list(self.head.parameters())
        std = self.head.moments[1]
        self.head.requires_grad_(True)
        try:
            for drawn in torch.randint(len(places), (num_steps, BATCH_SIZE), generator=generator):
                own = places[drawn]
                own = own[own >= 0]
                inputs, own = (x.to(self._device, non_blocking=True) for x in (states[own], own))
                with torch.enable_grad():
                    error = self.head(inputs) - returns[own]
                    loss = (error / std).square().sum() / (2 * BATCH_SIZE)
                    gradients = torch.autograd.grad(loss, parameters)
                flat = self.data_parallel.sum(torch.cat([loss.detach()[None], *(g.flatten() for g in gradients)]))
                total += flat[0] / num_steps
                for parameter, gradient in zip(
                    parameters, flat[1:].split([p.numel() for p in parameters]), strict=True
                ):
                    parameter.grad = gradient.view_as(parameter)
                self.optimizer.step()
        finally:
            self.head.requires_grad_(False)
            self.optimizer.zero_grad()
        return (total * std**2).item()

    @property
    def _device(self) -> torch.device:
        return self.head.linear.weight.device

    def save(self, folder: str | Path) -> None:
        """Write the moments of Adam into a checkpoint; the head itself is saved with the adapters."""
        if self._moments():
            save_tensors(Path(folder) / OPTIMIZER_FILE, {n: t.cpu().contiguous() for n, t in self._moments().items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors and the moments of Adam, by name."""
        return {f"value head: {n}": t for n, t in {**self.head.state_dict(), **self._moments()}.items()}

    def _moments(self) -> dict[str, Tensor]:
        state = self.optimizer.state_dict()["state"]
        return {f"{number}.{name}": tensor for number, moments in state.items() for name, tensor in moments.items()}

    def load(self, folder: str | Path) -> None:
        """Restore what `save` wrote; ValueError if the file is missing."""
        path = Path(folder) / OPTIMIZER_FILE
        if not path.is_file() and not self.head.linear.weight.any():
            return  # No token has trained yet.
        if not path.is_file():
            raise ValueError(f"{path} is missing: the checkpoint is incomplete, or of an earlier version")
        tensors, expected = load_tensors(path), {}
        for number, parameter in enumerate(self.head.parameters()):
            expected |= {f"{number}.step": torch.zeros(()), f"{number}.exp_avg": parameter}
            expected[f"{number}.exp_avg_sq"] = parameter
        check_tensors(path, tensors, expected, "it was written by another version")
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            number, name = key.split(".")
            state.setdefault(int(number), {})[name] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
