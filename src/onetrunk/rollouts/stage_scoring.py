"""Score the minibatches of a rollout in the pipeline that samples it, while its last rows still decode.

For stages that also train (`pipeline_training`). The packs of a minibatch depend on the lengths of all of its rows, so
a minibatch is scored once all of them are finished, and only when a batch has ended, whose slots no other batch uses.
The packs are those of the update, and each stage runs them as it does there: the outputs are the same, bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from onetrunk.models.staged import StagedTrunk
from onetrunk.ops.packing import PackLimits, make_pack, plan_packs
from onetrunk.types import PackOutput, to_device


@dataclass(eq=False, repr=False)
class StageScoring:
    """What one rollout's packs give, as far as they were run while it was sampled.

    Every process of a pipeline has one, made from the same arguments.

    Args:
        stage: of the trunk that samples.
        prompt_ids: n lists of token ids, as the backend gets them.
        minibatches: the rows of each minibatch; all of the n.
        limits: of a pack.
        pad_id: fills the padding of a pack.
        roles, temperature: as TrunkModel takes them.
    """

    stage: StagedTrunk
    prompt_ids: Sequence[list[int]]
    minibatches: Sequence[Sequence[int]]
    limits: PackLimits
    pad_id: int
    roles: Sequence[str]
    temperature: float
    # By the rows of a pack, in the order in which they ran: its outputs, which the last stage has.
    outputs: dict[tuple[int, ...], PackOutput | None] = field(default_factory=dict, init=False)
    _completions: dict[int, list[int]] = field(default_factory=dict, init=False)
    _ready: deque[tuple[int, ...]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        self.minibatch_of = {row: i for i, rows in enumerate(self.minibatches) for row in rows}
        self._missing = [len(rows) for rows in self.minibatches]

    @property
    def scored_share(self) -> float:
        """The share of the rows whose packs were run."""
        return sum(map(len, self.outputs)) / len(self.prompt_ids)

    # --- the first stage ---------------------------------------------------------------------------------------------

    def add(self, completions: Mapping[int, list[int]]) -> None:
        """Note rows that are finished; the packs of minibatches that they complete can be scored."""
        self._completions |= completions
        for row in completions:
            number = self.minibatch_of[row]
            self._missing[number] -= 1
            if not self._missing[number]:
                members = self.minibatches[number]
                lengths = [len(self.prompt_ids[i]) + len(self._completions[i]) for i in members]
                packs = plan_packs(lengths, self.limits)
                self._ready += [tuple(members[place] for place in pack) for pack in packs]

    def begin(self) -> tuple[Tensor, Tensor] | None:
        """Run the next pack through this stage; return its description and states, or None if no pack is ready."""
        if not self._ready:
            return None
        rows = self._ready.popleft()
        completions = [self._completions[row] for row in rows]
        numbers = [len(rows), *rows, *map(len, completions), *(token for ids in completions for token in ids)]
        return torch.tensor(numbers), self._run(rows, completions, None)

    # --- every other stage -------------------------------------------------------------------------------------------

    def follow(self, description: Tensor, receive: Callable[[int], Tensor]) -> Tensor | None:
        """Run a pack that the first stage has begun; return the states for the next stage, None on the last one.

        Args:
            description: of the pack, from `begin`.
            receive: takes a count, and returns as many numbers of the stage before.
        """
        size, *numbers = description.tolist()
        rows, lengths, tokens = numbers[:size], numbers[size : 2 * size], iter(numbers[2 * size :])
        return self._run(tuple(rows), [list(islice(tokens, length)) for length in lengths], receive)

    def _run(
        self, rows: tuple[int, ...], completions: Sequence[list[int]], receive: Callable[[int], Tensor] | None
    ) -> Tensor | None:
        number, stage = self.minibatch_of[rows[0]], self.stage
        pack = make_pack([self.prompt_ids[row] for row in rows], completions, self.pad_id, number)
        pack = to_device(pack, stage.device)
        received = None
        if receive is not None:
            shape = (stage.num_received(self.roles), stage.num_tokens(pack), stage.hidden_size)
            received = receive(math.prod(shape)).view(shape)
        result = stage.run_alone(pack, self.roles, self.temperature, received)
        self.outputs[rows] = result if stage.is_last else None
        return None if stage.is_last else result
