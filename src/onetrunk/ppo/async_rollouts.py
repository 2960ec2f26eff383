"""Rollouts that are sampled ahead of the update on earlier ones: which version samples what, and how a run resumes.

With schedule one_step or async the backend receives the policy once per rollout, in the main thread, before the update
on that rollout. Rollouts that are under way at a checkpoint are saved: completions as they are, and for rows that run
the version that they started with, whose adapter is saved too. The resumed run publishes these adapters again and
samples the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from onetrunk.models.adapters import POLICY, adapter_parameters
from onetrunk.ppo.rollout import PromptBatch, Sampled, SamplingStream
from onetrunk.ppo.stream_state import num_writers
from onetrunk.rollouts.async_sampler import AsyncSampler, StartedRow
from onetrunk.types import Rollout, RowKey
from onetrunk.utils.files import load_tensors, save_tensors

ROWS_FILE = "rollouts_ahead_{rank}.safetensors"
VERSIONS_FILE = "policy_versions.safetensors"
# Calls into which `async` divides a rollout: rows of the next one take the place of those that end early.
PARTS = 8


class AsyncSource:
    """Samples rollouts under earlier versions of the policy, at most `max_staleness` rollouts old.

    With schedule one_step the next rollout is sampled in one call during the update, so the version of each is known.
    With async several rollouts may be under way, each in PARTS parts.

    Args:
        rows: how many rows of a rollout this process samples.
    """

    def __init__(self, stream: SamplingStream, rows: int):
        config = stream.config
        self.stream = stream
        self.max_staleness = config.max_staleness
        is_whole = config.schedule == "one_step" or not config.max_staleness
        self.sampler = AsyncSampler(
            self._sample,
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

    def next(self, iteration: int) -> Sampled:
        """Publish the policy that is about to train on a rollout, start what it may sample, and wait for it."""
        self.start()
        self._forget(iteration)
        self._publish(iteration)
        self._offer(iteration, iteration + self.max_staleness)
        with self.stream.sampling(is_collective=False):
            return Sampled(self._batches[iteration], self.sampler.take(iteration, self.stream.poll))

    def close(self) -> None:
        """Start nothing more."""
        self.sampler.close()

    def _forget(self, first: int) -> None:
        """Forget the rollouts before `first`, which are used."""
        for iteration in [i for i in self._batches if i < first]:
            self.sampler.finish(iteration)
            del self._batches[iteration]

    def _publish(self, iteration: int) -> None:
        model, version = self.stream.model, iteration * self.stream.config.steps_per_rollout
        self.stream.sampler.backend.sync(model, version)
        self._published[iteration] = {name: p.detach().cpu().clone() for name, p in _trained(model).items()}
        for old in [number for number in self._published if number < iteration - self.max_staleness]:
            del self._published[old]
        self.sampler.publish(iteration, version)

    def _offer(self, first: int, last: int) -> None:
        for iteration in range(first, min(last, self.stream.num_rollouts - 1) + 1):
            if iteration not in self._batches:
                batch = self._batches[iteration] = self.stream.prompts(iteration)
                self.sampler.offer(iteration, batch.prompt_ids, batch.keys)

    def _sample(self, version: int, _prompt_ids: Sequence[list[int]], keys: Sequence[RowKey]) -> Rollout:
        """Return completions of rows of one rollout; in any thread."""
        iteration = keys[0][1]
        return self.stream.sampler.generate(self._batches[iteration].only(keys), version=version)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, first: int) -> None:
        """Write the rows that have started, and on the main process the adapters that they need."""
        self._forget(first)
        started = self.sampler.started().items()
        # What an environment knows cannot be saved: its episode is played again.
        rows = {key: row if row.episode is None else StartedRow(row.version) for key, row in started}
        save_rows(folder, self.stream.data_parallel.process_index, rows)
        needed = {i: weights for i, weights in self._published.items() if i >= first - self.max_staleness}
        if self.stream.data_parallel.accelerator.is_main_process and needed:
            tensors = {f"{i}|{name}": t for i, weights in needed.items() for name, t in weights.items()}
            save_tensors(Path(folder) / VERSIONS_FILE, tensors)

    def load(self, folder: str | Path, first: int) -> None:
        """Read what the processes of a run saved. Rows that are now too old are sampled again."""
        versions = Path(folder) / VERSIONS_FILE
        if not versions.is_file():  # The run that wrote it sampled nothing ahead.
            return
        for name, tensor in load_tensors(versions).items():
            number, _, parameter = name.partition("|")
            if int(number) >= first - self.max_staleness:
                self._published.setdefault(int(number), {})[parameter] = tensor
        slots = self.stream.config.steps_per_rollout
        for rank in range(num_writers(folder)):
            rows = load_rows(folder, rank)
            fresh = {key: row for key, row in rows.items() if key[1] - row.version // slots <= self.max_staleness}
            self.sampler.remember(fresh)
        self._resumes_at = first if self._published else None

    @torch.no_grad()
    def start(self) -> None:
        """Publish the versions of the checkpoint again, and continue to sample."""
        if self._resumes_at is None:
            return
        first, self._resumes_at = self._resumes_at, None
        trained = _trained(self.stream.model)
        current = {name: parameter.detach().clone() for name, parameter in trained.items()}
        for number in sorted(self._published):
            for name, tensor in self._published[number].items():
                trained[name].copy_(tensor)
            self._publish(number)
        for name, tensor in current.items():
            trained[name].copy_(tensor)
        self._offer(first, max(self._published) + self.max_staleness)


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
