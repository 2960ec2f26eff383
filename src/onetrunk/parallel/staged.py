"""Train a trunk whose layers are divided over the processes of a pipeline, so that none of them holds the whole base.

A microbatch is a pack. What this shares with other models that train in stages is in `training_stage.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onetrunk.costs import SCORED_AT_ONCE
from onetrunk.models.speedups.padding_free import token_grid
from onetrunk.models.trunk import PackOutput, StageInput, TrunkModel
from onetrunk.parallel.stages import LayerSplit
from onetrunk.parallel.training_stage import (
    Stage,
    StagePlace,
    base_obstacle,
    divide_layers,
    reduce_gradients,
    staged,
)
from onetrunk.types import Pack

# The outputs of each role, by the shape that they have: of the completions [R, C], or one per row [R].
OUTPUTS = {
    "policy": {"logprobs": 2, "entropy": 2},
    "value": {"values": 2, "next_values": 1},
    "reference": {"ref_logprobs": 2},
}
# Takes the number of a pack and a model that runs the rest of its forward; returns the pack's loss.
LossOf = Callable[[int, Callable[..., PackOutput]], Tensor]


def keep_stage(trunk: TrunkModel, split: LayerSplit, device: torch.device) -> str:
    """Drop the frozen weights of other stages from a trunk, move the rest to `device`; return a line for the user.

    Call it as `divide_layers`.

    Raises:
        ValueError: the trunk cannot be trained in stages; the message says why.
        RuntimeError: the processes loaded different bases.
    """
    obstacle = training_obstacle(trunk)
    if obstacle is not None:
        raise ValueError(f"pipeline_training is not supported {obstacle}")
    place, line = divide_layers(trunk, split, device)
    StagedTrunk(trunk, place)
    return line


def training_obstacle(trunk: nn.Module) -> str | None:
    """Return why a model cannot be trained in stages, or None; it continues "is not supported"."""
    if not isinstance(trunk, TrunkModel):
        return "for a model whose weights all train; set use_peft: true"
    if trunk.reward_branch is not None:
        return "with a reward adapter on the policy's trunk; score with a function, or with a model on a server"
    return base_obstacle(trunk, lambda name, _: name.startswith("value_head"))


def trains_in_stages(model: nn.Module) -> bool:
    """Return whether the layers of a model are divided over the processes of a pipeline."""
    return staged(model) is not None


def pack_outputs(
    model: nn.Module,
    packs: Sequence[Pack],
    roles: Sequence[str],
    temperature: float,
    states: Sequence[Tensor | None] | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[PackOutput]:
    """Yield the outputs of `roles` over each pack, without gradients, whether or not the model is in stages.

    Args:
        model: wrapped or not.
        packs: run one after another; the stages of a pipeline run them together.
        roles, temperature: as TrunkModel takes them.
        states: [N, H] of each pack at the cut, where they are known.
        poll: called before each forward; may raise to give up.
    """
    stage = staged(model)
    if stage is not None:
        poll()
        yield from stage.outputs(packs, roles, temperature)
        return
    for number, pack in enumerate(packs):
        poll()
        known = None if states is None else states[number]
        with torch.no_grad():
            output = model(pack=pack, states=known, roles=tuple(roles), temperature=temperature)
        yield output


def update_in_stages(
    model: nn.Module, packs: Sequence[Pack], roles: Sequence[str], loss_of: LossOf, temperature: float, entropy: bool
) -> None:
    """Run forward and backward over packs in the pipeline of a model (`trains_in_stages`).

    Every stage gets the gradients, and calls `loss_of` on each pack, so that all of them have loss and stats. The
    arguments are those of `StagedTrunk.update`.
    """
    stage = staged(model)
    outputs = stage.update(packs, roles, loss_of, temperature, entropy)
    if not stage.is_last:
        with torch.no_grad():
            for number, output in enumerate(outputs):
                loss_of(number, lambda output=output, **_: output)
    reduce_gradients(stage.trunk)


def rehearse_in_stages(model: nn.Module, pack: Pack, temperature: float, entropy: bool) -> bool:
    """Score and update on as many copies of a pack as are in flight at once, without effect; False if in no stages."""
    stage = staged(model)
    if stage is None:
        return False
    packs = [pack] * stage.num_stages
    stage.outputs(packs, ("policy", "value", "reference"), temperature)

    def loss_of(_: int, run: Callable[..., PackOutput]) -> Tensor:
        output = run()
        return output.logprobs.sum() + output.values.sum()

    stage.update(packs, ("policy", "value"), loss_of, temperature, entropy)
    stage.trunk.zero_grad(set_to_none=True)
    return True


@dataclass(frozen=True)
class _Call:
    """What all stages run together: the packs, and how."""

    packs: Sequence[Pack]
    roles: Sequence[str]
    temperature: float
    entropy_grad: bool
    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths)


class StagedTrunk(Stage):
    """This process's stage of a trunk. `outputs` and `update` are collective: all stages call them on the same packs.

    Args:
        trunk: without the frozen weights of other stages.
        place: of this process.
    """

    def __init__(self, trunk: TrunkModel, place: StagePlace):
        super().__init__(trunk, place)
        self.trunk = trunk

    def num_tokens(self, pack: Pack) -> int:
        """Return the tokens of a pack that cross between stages."""
        return token_grid(self.trunk, pack, self.trunk.padding_free).num_tokens

    @torch.no_grad()
    def outputs(self, packs: Sequence[Pack], roles: Sequence[str], temperature: float) -> list[PackOutput]:
        """Return the outputs of `roles` over each pack, on every stage."""
        step, found = SCORED_AT_ONCE * self.num_stages, []
        for first in range(0, len(packs), step):
            call = self._call(packs[first : first + step], roles, temperature)
            module = _StageModule(self, call, None)
            self.run(module, call.lengths, self._streams_at(call), has_gradients=False)
            found += self._shared(module.outputs, call)
        return found

    def base_logprobs(self, pack: Pack, temperature: float) -> Tensor:
        """Return the logprobs [R, C] of completions under the bare base, on every stage; collective."""
        kept, self.trunk.has_reference_adapter = self.trunk.has_reference_adapter, False
        try:
            return self.outputs([pack], ("reference",), temperature)[0].ref_logprobs
        finally:
            self.trunk.has_reference_adapter = kept

    def update(
        self,
        packs: Sequence[Pack],
        roles: Sequence[str],
        loss_of: LossOf,
        temperature: float = 1.0,
        entropy_grad: bool = False,
    ) -> list[PackOutput]:
        """Run forward and backward over the packs; return their outputs, without gradients, on every stage.

        Each process adds the gradients of its own layers, the last one also those of the value head, to `.grad`.

        Args:
            packs: the microbatches of the schedule.
            roles: "policy", "value" or both.
            loss_of: called on the last stage once per pack.
            temperature, entropy_grad: as TrunkModel takes them.
        """
        call = self._call(packs, roles, temperature, entropy_grad)
        module = _StageModule(self, call, loss_of)
        self.run(module, call.lengths, self._streams_at(call), has_gradients=True)
        return self._shared(module.outputs, call)

    def _call(
        self, packs: Sequence[Pack], roles: Sequence[str], temperature: float, entropy_grad: bool = False
    ) -> _Call:
        lengths = [self.num_tokens(pack) for pack in packs]
        return _Call(packs, tuple(roles), temperature, entropy_grad, lengths)

    def _streams_at(self, call: _Call) -> Callable[[int], Sequence[bool]]:
        return lambda layer: self._streams(layer, call.roles)

    def _streams(self, layer: int, roles: Sequence[str]) -> list[bool]:
        """Return which states enter a layer, by whether they get gradients."""
        # The layers below the cut run once for all roles, without gradient.
        return list(self.trunk.streams(roles).values()) if layer > self.trunk.cut else [False]

    def _shared(self, outputs: Sequence[PackOutput], call: _Call) -> list[PackOutput]:
        """Return the outputs of the last stage, on every stage."""
        places = [
            (number, name, pack.completion_mask.shape[:dims])
            for number, pack in enumerate(call.packs)
            for role in call.roles
            for name, dims in OUTPUTS[role].items()
        ]
        sizes = [shape.numel() for _, _, shape in places]
        flat = None
        if self.is_last:
            flat = torch.cat([getattr(outputs[number], name).detach().float().flatten() for number, name, _ in places])
        flat = self.from_last(flat, sum(sizes))
        found: list[dict[str, Tensor]] = [{} for _ in call.packs]
        for (number, name, shape), part in zip(places, flat.split(sizes), strict=True):
            found[number][name] = part.view(shape)
        return [PackOutput(**tensors) for tensors in found]


class _StageModule(nn.Module):
    """The forward of this stage as PipelineStage calls it: once per pack, in their order."""

    def __init__(self, stage: StagedTrunk, call: _Call, loss_of: LossOf | None):
        super().__init__()
        # Not a submodule: the schedule would look for wrappers among its modules.
        self.__dict__["stage"] = stage
        self.call, self.loss_of = call, loss_of
        self.outputs: list[PackOutput] = []
        self.num_done = 0

    def forward(self, *received: Tensor) -> Any:
        """Return the states for the next stage, padded to the longest pack; of the last stage the loss of a pack."""
        number, stage, call = self.num_done, self.stage, self.call
        self.num_done += 1
        length = call.lengths[number]
        states = None if stage.is_first else tuple(tensor[:length] for tensor in received)

        def run(*, pack: Pack | None = None, **others: Any) -> Any:
            others.pop("states", None)
            differs = [name for name, value in others.items() if value != getattr(call, name, None)]
            if differs or (pack is not None and pack is not call.packs[number]):
                raise ValueError(
                    "with pipeline_training compute_loss must call the model on the experience's pack, with roles"
                    f" {call.roles}, temperature {call.temperature} and entropy_grad {call.entropy_grad}, because the"
                    f" stages before have run it so; here {', '.join(differs) or 'the pack'} differs"
                )
            return stage.trunk(
                pack=call.packs[number],
                roles=call.roles,
                temperature=call.temperature,
                entropy_grad=call.entropy_grad,
                stage=StageInput(stage.layers, states, stage.is_last),
            )

        if not stage.is_last:
            return stage.sent(run(), call.longest)
        if self.loss_of is None:
            self.outputs.append(run())
            return torch.zeros((), device=stage.device)

        def kept(**keywords: Any) -> PackOutput:
            output = run(**keywords)
            self.outputs.append(PackOutput(*(None if x is None else x.detach() for x in output)))
            return output

        return self.loss_of(number, kept)
