"""Messages between the processes of a pipeline: plans and hidden states to the next stage, tokens back to the first.

Consecutive processes form a pipeline. Plans and tokens are small and read by the host, so they travel over gloo;
hidden states travel over the backend of their device (NCCL on GPUs) and never wait for the host. Between two processes
messages of a group arrive in the order in which they were sent, so none needs a tag.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from onetrunk.parallel.stages import StageLost

T = TypeVar("T")


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@functools.cache
def _groups_of(_world: dist.ProcessGroup, num_stages: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of this process's pipeline for plans and for states. The first call is collective."""
    world_size = dist.get_world_size()
    ranks = [list(range(first, first + num_stages)) for first in range(0, world_size, num_stages)]
    control, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")
    states, _ = dist.new_subgroups_by_enumeration(ranks)
    return control, states


class StageLinks:
    """This process's place in its pipeline, and its links to the other stages.

    Args:
        num_stages: divides the number of processes; 1: nothing is sent.

    Raises:
        ValueError: the number of processes is not a multiple of the stages.
    """

    def __init__(self, num_stages: int):
        self.num_stages = num_stages
        self.stage = 0
        self.first_process = 0
        # What was sent must stay in memory until it has arrived: at most two messages of each turn under way.
        self.max_turns = 1
        self._sent: deque[tuple[dist.Work, Tensor, int]] = deque()
        if num_stages == 1:
            return
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if world_size % num_stages:
            raise ValueError(
                f"{num_stages} pipeline stages and {world_size} processes: the number of processes must be a multiple"
                " of pipeline_stages"
            )
        self._control, self._states = _groups_of(dist.group.WORLD, num_stages)
        self.first_process, self.stage = divmod(dist.get_rank(), num_stages)
        self.first_process *= num_stages

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    # --- what all stages do together ---------------------------------------------------------------------------------

    def shared(self, item: T) -> list[T]:
        """Return the items of all stages, in their order."""
        if self.num_stages == 1:
            return [item]
        items: list[Any] = [None] * self.num_stages
        with self._naming(None):
            dist.all_gather_object(items, item, group=self._control)
        return items

    def dealt(self, items: Sequence[T] | None) -> T:
        """Return this stage's share of `items`, which the last stage has: one for each stage."""
        if self.num_stages == 1:
            return items[0]
        share: list[Any] = [None]
        with self._naming(self.num_stages - 1):
            last = self._process(self.num_stages - 1)
            dist.scatter_object_list(share, None if items is None else list(items), src=last, group=self._control)
        return share[0]

    # --- forward -----------------------------------------------------------------------------------------------------

    def send_on(self, plan: Tensor, states: Tensor | None = None) -> None:
        """Send a plan (int64, on the CPU) to the next stage, and states if there are any."""
        stage = self.stage + 1
        code = -1 if states is None else DTYPES.index(states.dtype)
        self._send(torch.cat([torch.tensor([code]), plan]), stage, self._control)
        if states is not None:
            self._send(states.contiguous(), stage, self._states)

    def next_plan(self, length: int) -> tuple[Tensor, torch.dtype | None]:
        """Wait for a plan of `length` numbers; return it and the type of the states that follow, None if none do."""
        message = torch.empty(length + 1, dtype=torch.int64)
        self._receive(message, self.stage - 1, self._control)
        code = int(message[0])
        return message[1:], None if code < 0 else DTYPES[code]

    def next_states(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Wait for `count` numbers of the stage before."""
        states = torch.empty(count, dtype=dtype, device=device)
        self._receive(states, self.stage - 1, self._states)
        return states

    # --- back --------------------------------------------------------------------------------------------------------

    def send_back(self, tokens: Tensor) -> None:
        """Send tokens (int64, on the CPU) from the last stage to the first."""
        self._send(tokens.contiguous(), 0, self._control)

    def next_tokens(self, count: int) -> Tensor:
        """Wait for [2, count] numbers of the last stage."""
        tokens = torch.empty(2, count, dtype=torch.int64)
        self._receive(tokens, self.num_stages - 1, self._control)
        return tokens

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        while self._sent:
            self._drop_oldest()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _process(self, stage: int) -> int:
        return self.first_process + stage

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        with self._naming(stage):
            work = dist.isend(tensor, self._process(stage), group=group)
        self._sent.append((work, tensor, stage))
        # gloo does not say whether a message has arrived. Of a turn that is over, it has: this does not wait.
        while len(self._sent) > 2 * (self.max_turns + 1):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        work, _, stage = self._sent[0]
        with self._naming(stage):
            work.wait()
        self._sent.popleft()

    def _receive(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        with self._naming(stage):
            dist.recv(tensor, self._process(stage), group=group)

    @contextlib.contextmanager
    def _naming(self, stage: int | None) -> Iterator[None]:
        """Turn an error of torch.distributed into one that names the stage."""
        try:
            yield
        except RuntimeError as error:
            peer = "another stage" if stage is None else f"stage {stage} (process {self._process(stage)})"
            raise StageLost(self.stage, peer, "rows were sampled") from error
