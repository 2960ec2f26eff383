"""Sampling rollouts while the trainer updates on earlier ones: which version samples what, and how a run resumes.

The backend receives the policy once per rollout, in the main thread, before the update on that rollout. Rollouts that
are under way at a checkpoint are saved: completions as they are, and for rows that run the version that they started
with, whose adapter is saved too. The resumed run publishes these adapters again and samples the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from onetrunk.models.adapters import POLICY, adapter_parameters
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.rollout import PromptBatch, Sampler
from onetrunk.rollouts.async_sampler import Producer, StartedRow
from onetrunk.types import Rollout, RowKey
from onetrunk.utils.files import load_tensors, save_tensors

ROWS_FILE = "rollouts_ahead_{rank}.safetensors"
VERSIONS_FILE = "policy_versions.safetensors"
# Calls into which `async` divides a rollout: rows of the next one take the place of those that end early.
PARTS = 8


class RolloutsAhead:
    """Samples rollouts under earlier versions of the policy, at most `max_staleness` rollouts old.

    With schedule one_step the next rollout is sampled in one call during the update, so the version of each is known.
    With async several rollouts may be under way, each in PARTS parts.

    Args:
        config: of the run.
        sampler: its backend is a VersionedBackend.
        model: returns the policy, unwrapped.
        prompts: returns this process's prompts of a rollout.
        rows: of a rollout, this process.
        num_rollouts: of the whole run; none beyond them is sampled.
    """

    def __init__(
        self,
        config: PPOConfig,
        sampler: Sampler,
        model: Callable[[], nn.Module],
        prompts: Callable[[int], PromptBatch],
        rows: int,
        num_rollouts: int,
    ):
        self.config = config
        self.sampler = sampler
        self.model = model
        self.prompts = prompts
        self.num_rollouts = num_rollouts
        self.max_staleness = config.max_staleness
        is_whole = config.schedule == "one_step" or not config.max_staleness
        self.producer = Producer(
            partial(sampler.generate_as, "policy"),
            rows,
            self.max_staleness,
            rows_per_part=rows if is_whole else math.ceil(rows / PARTS),
            max_rows=rows if is_whole else config.max_rollout_rows,
        )
        self._batches: dict[int, PromptBatch] = {}
        # Weights of the policy by the number of the rollout that they were published for, on the CPU.
        self._published: dict[int, dict[str, Tensor]] = {}
        # Of a checkpoint: the first rollout that is not in use.
        self._resumes_at: int | None = None

    # --- one rollout ------------------------------------------------------------------------------------------------

    def begin(self, iteration: int) -> PromptBatch:
        """Publish the policy that is about to train on a rollout, and start what it may sample; return its prompts."""
        self.resume()
        self._publish(iteration)
        self._offer(iteration, iteration + self.max_staleness)
        return self._batches[iteration]

    def take(self, iteration: int, poll: Callable[[], None]) -> Rollout:
        """Wait for the rollout. `poll` is called meanwhile, and may raise to give up."""
        return self.producer.take(iteration, poll)

    def finish(self, iteration: int) -> None:
        """Forget a rollout that the trainer has scored."""
        self.producer.finish(iteration)
        del self._batches[iteration]

    def close(self) -> None:
        """Start nothing more."""
        self.producer.close()

    def _publish(self, iteration: int) -> None:
        model, version = self.model(), iteration * self.config.slots_per_rollout
        self.sampler.backend.sync(model, version)
        self._published[iteration] = {name: p.detach().cpu().clone() for name, p in _trained(model).items()}
        for old in [number for number in self._published if number < iteration - self.max_staleness]:
            del self._published[old]
        self.producer.publish(iteration, version)

    def _offer(self, first: int, last: int) -> None:
        for iteration in range(first, min(last, self.num_rollouts - 1) + 1):
            if iteration not in self._batches:
                batch = self._batches[iteration] = self.prompts(iteration)
                self.producer.offer(iteration, batch.prompt_ids, batch.keys)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, rank: int, is_main: bool, first: int) -> None:
        """Write the rows that have started, and the adapters that they need; no file if there are none.

        Args:
            folder: the checkpoint.
            rank: of this process.
            is_main: whether it writes the adapters.
            first: the first rollout that is not in use.
        """
        save_rows(folder, rank, self.producer.started())
        needed = {i: weights for i, weights in self._published.items() if i >= first - self.max_staleness}
        if is_main and needed:
            tensors = {f"{i}|{name}": t for i, weights in needed.items() for name, t in weights.items()}
            save_tensors(Path(folder) / VERSIONS_FILE, tensors)

    def load(self, folder: str | Path, num_writers: int, first: int) -> None:
        """Read what the processes of a run saved. Rows that are now too old are sampled again.

        Args:
            folder: the checkpoint.
            num_writers: processes that wrote it.
            first: the first rollout that is not in use.
        """
        versions = Path(folder) / VERSIONS_FILE
        if not versions.is_file():  # The run that wrote it sampled nothing ahead.
            return
        for name, tensor in load_tensors(versions).items():
            number, _, parameter = name.partition("|")
            if int(number) >= first - self.max_staleness:
                self._published.setdefault(int(number), {})[parameter] = tensor
        for rank in range(num_writers):
            rows = load_rows(folder, rank)
            slots = self.config.slots_per_rollout
            fresh = {key: row for key, row in rows.items() if key[1] - row.version // slots <= self.max_staleness}
            self.producer.remember(fresh)
        self._resumes_at = first if self._published else None

    @torch.no_grad()
    def resume(self) -> None:
        """Publish the versions of the checkpoint again, and go on sampling. The weights must be loaded already."""
        if self._resumes_at is None:
            return
        first, self._resumes_at = self._resumes_at, None
        trained = _trained(self.model())
        current = {name: parameter.detach().clone() for name, parameter in trained.items()}
        for number in sorted(self._published):
            for name, tensor in self._published[number].items():
                trained[name].copy_(tensor)
            self._publish(number)
        for name, tensor in current.items():
            trained[name].copy_(tensor)
        self._offer(first, max(self._published) + self.max_staleness)


def rollouts_since(versions: Sequence[int], iteration: int, config: PPOConfig) -> Tensor:
    """Return [n] how many rollouts the policy was trained on between the sampling of rows and their use."""
    return iteration - torch.tensor(versions) / config.slots_per_rollout


def save_rows(folder: str | Path, rank: int, rows: Mapping[RowKey, StartedRow]) -> None:
    """Write the rows of a process that were sampled ahead into a checkpoint; no file if there are none."""
    if rows:
        save_tensors(Path(folder) / ROWS_FILE.format(rank=rank), _as_tensors(rows))


def load_rows(folder: str | Path, rank: int) -> dict[RowKey, StartedRow]:
    """Return the rows that `save_rows` wrote."""
    path = Path(folder) / ROWS_FILE.format(rank=rank)
    return _as_rows(load_tensors(path)) if path.is_file() else {}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in adapter_parameters(model, POLICY).items() if p.requires_grad}


def _as_tensors(rows: Mapping[RowKey, StartedRow]) -> dict[str, Tensor]:
    done = [row for row in rows.values() if row.completion_ids is not None]
    ids = [torch.tensor(row.completion_ids, dtype=torch.int64) for row in done]
    logprobs = [row.logprobs.float().cpu() for row in done]
    nothing = [torch.zeros(0)]
    return {
        "keys": torch.tensor(list(rows), dtype=torch.int64),
        "versions": torch.tensor([row.version for row in rows.values()]),
        # 0: the row was running.
        "lengths": torch.tensor([len(row.completion_ids or ()) for row in rows.values()]),
        "stopped": torch.tensor([row.stopped for row in rows.values()]),
        "completion_ids": torch.cat(ids or nothing).long(),
        "logprobs": torch.cat(logprobs or nothing),
    }


def _as_rows(tensors: Mapping[str, Tensor]) -> dict[RowKey, StartedRow]:
    rows, place = {}, 0
    columns = (tensors[name].tolist() for name in ("keys", "versions", "lengths", "stopped"))
    for key, version, length, stopped in zip(*columns, strict=True):
        own = slice(place, place + length)
        place += length
        row = StartedRow(version)
        if length:
            ids, logprobs = tensors["completion_ids"][own].tolist(), tensors["logprobs"][own]
            row = StartedRow(version, ids, logprobs, stopped)
        rows[tuple(key)] = row
    return rows
