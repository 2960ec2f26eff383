"""Train a trunk whose layers are divided over the processes of a pipeline, so that none of them holds the whole base.

The schedule is 1F1B of torch.distributed.pipelining, with packs as microbatches: as soon as the last stage has run the
forward of one pack, every stage alternates between a backward and a forward.

What trains (adapters, heads) stays whole on every process, as with FSDP2 and tensor parallelism. A stage computes the
gradients of its own layers; `reduce_gradients` adds the gradients of all processes. So optimizer state, clipping,
checkpoints and the saved PEFT folder equal those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from onetrunk.costs import SCORED_AT_ONCE
from onetrunk.models.base_model import backbone, decoder_layers
from onetrunk.models.trunk import PackOutput, StageInput, TrunkModel
from onetrunk.parallel.groups import STAGED, process_mesh, staged
from onetrunk.parallel.sharding import cast_now, mark_divided, share_frozen
from onetrunk.parallel.stages import LayerSplit
from onetrunk.types import Pack

# The outputs of each role, by the number of their dimensions: [R, C] for the completions, or [R], one per row.
OUTPUTS = {
    "policy": {"logprobs": 2, "entropy": 2},
    "value": {"values": 2, "next_values": 1},
    "reference": {"ref_logprobs": 2},
}
# Takes the number of a pack and a model that runs the rest of its forward; returns the pack's loss.
LossOf = Callable[[int, Callable[..., PackOutput]], Tensor]


# --- keeping one stage ----------------------------------------------------------------------------------------------


def keep_stage(trunk: TrunkModel, split: LayerSplit, device: torch.device) -> str:
    """Drop the frozen weights of other stages, and move the rest, as `share_frozen`; return a line for the user."""

    def keep() -> None:
        stage = StagedTrunk(trunk, split, device)
        for number, layer in enumerate(decoder_layers(trunk)):
            if number not in stage.layers:
                drop_frozen(layer)
        _drop_ends(trunk.get_base_model(), stage.is_first, stage.is_last)
        cast_now(trunk)
        mark_divided(trunk.get_base_model())

    how = f"pipelined training: the base is divided into stages of {', '.join(map(str, split.sizes))} layers"
    return share_frozen(trunk, device, keep, how, dist.get_world_size() // split.num_stages)


def _drop_ends(base: nn.Module, is_first: bool, is_last: bool) -> None:
    """Drop the embedding and the language model's head where no forward reads them."""
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    is_tied = embedding.weight is head.weight
    if not (is_first or (is_last and is_tied)):
        drop_frozen(embedding)
    if not (is_last or (is_first and is_tied)):
        drop_frozen(head)


@torch.no_grad()
def drop_frozen(module: nn.Module) -> None:
    """Replace the frozen weights of a module by empty ones: to run it would be an error."""
    for path, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            # Frozen adapters, such as the reference, are saved whole.
            if "lora_" in f"{path}.{name}" or parameter.requires_grad:
                continue
            empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            part.register_parameter(name, nn.Parameter(empty, requires_grad=False))


@torch.no_grad()
def reduce_gradients(model: nn.Module) -> None:
    """Add the gradients of all processes; a weight that has one on any of them then has it on all.

    A process has the gradients of its own layers, and of its own rows if there are several pipelines.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    has_gradient = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    dist.all_reduce(has_gradient)
    reduced = [p for p, count in zip(trained, has_gradient.tolist(), strict=True) if count]
    if not reduced:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in reduced])
    dist.all_reduce(flat)
    for parameter, gradient in zip(reduced, flat.split([p.numel() for p in reduced]), strict=True):
        parameter.grad = gradient.view_as(parameter).to(parameter.dtype)


# --- packs through all stages ---------------------------------------------------------------------------------------


def update_in_stages(
    model: nn.Module, packs: Sequence[Pack], loss_of: LossOf, temperature: float, entropy: bool
) -> None:
    """Run forward and backward over packs in the pipeline of a model; every stage gets all gradients.

    The arguments are those of `StagedTrunk.update`.
    """
    stage = staged(model)
    stage.update(packs, loss_of, temperature, entropy)
    reduce_gradients(stage.model)


def rehearse_in_stages(model: nn.Module, pack: Pack, temperature: float, entropy: bool) -> None:
    """Score and update on as many copies of a pack as are in flight at once, without effect."""
    stage = staged(model)
    packs = [pack] * stage.num_stages
    stage.outputs(packs, ("policy", "value", "reference"), temperature)

    def loss_of(_: int, run: Callable[..., PackOutput]) -> Tensor:
        return run().logprobs.sum()

    stage.update(packs, loss_of, temperature, entropy)
    stage.model.zero_grad(set_to_none=True)


class StagedTrunk:
    """This process's stage of a trunk. `outputs` and `update` are collective: all stages pass the same packs."""

    def __init__(self, trunk: TrunkModel, split: LayerSplit, device: torch.device):
        mesh = process_mesh(split.num_stages)["tensor"]
        self.model, self.device = trunk, device
        self.group, self.stage, self.num_stages = mesh.get_group(), mesh.get_local_rank(), split.num_stages
        self.layers = split.layers(self.stage)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.num_stages - 1
        layer = decoder_layers(trunk)[self.layers.start]
        self.dtype = next(p.dtype for p in layer.parameters() if p.is_floating_point())
        self.hidden_size = backbone(trunk).config.get_text_config().hidden_size
        # Where `staged` finds it.
        vars(trunk.get_base_model())[STAGED] = self

    def outputs(self, packs: Sequence[Pack], roles: Sequence[str], temperature: float) -> list[PackOutput]:
        """Return the outputs of `roles` over each pack, on every stage."""
        step, outputs = SCORED_AT_ONCE * self.num_stages, []
        for first in range(0, len(packs), step):
            outputs += self._run(_Packs(self, packs[first : first + step], tuple(roles), temperature))
        return outputs

    def base_logprobs(self, pack: Pack, temperature: float) -> Tensor:
        """Return the logprobs [R, C] of completions under the bare base, on every stage; collective."""
        kept, self.model.has_reference_adapter = self.model.has_reference_adapter, False
        try:
            return self.outputs([pack], ("reference",), temperature)[0].ref_logprobs
        finally:
            self.model.has_reference_adapter = kept

    def update(
        self, packs: Sequence[Pack], loss_of: LossOf, temperature: float = 1.0, entropy_grad: bool = False
    ) -> list[PackOutput]:
        """Run forward and backward over the packs; return their outputs, without gradients, on every stage.

        Args:
            loss_of: called once per pack. Each process adds the gradients of its own layers, the last one also those
                of the head, to `.grad`. The other stages call it after the backwards on the outputs of the last
                stage, so that all stages have loss and metrics.
        """
        outputs = self._run(_Packs(self, packs, ("policy",), temperature, entropy_grad), loss_of)
        if not self.is_last:
            with torch.no_grad():
                for number, output in enumerate(outputs):
                    loss_of(number, lambda output=output, **_: output)
        return outputs

    def _run(self, batches: _Packs, loss_of: LossOf | None = None) -> list[PackOutput]:
        """Run packs through all stages, and with a loss backwards; return their outputs on every stage."""
        module = _StageModule(self, batches, loss_of)
        count, has_gradients = len(batches.packs), loss_of is not None
        # With fewer packs than stages all of them are in flight anyway.
        kind = Schedule1F1B if has_gradients and count >= self.num_stages else ScheduleGPipe
        loss = {"loss_fn": lambda loss, _: loss, "scale_grads": False} if has_gradients else {}
        # The schedule divides these into microbatches; every stage knows the packs.
        inputs = (torch.zeros(count, device=self.device),) if self.is_first else ()
        targets = torch.zeros(count, device=self.device) if self.is_last and has_gradients else None
        with torch.set_grad_enabled(has_gradients):
            stage = self._pipeline_stage(module, batches, has_gradients)
            try:
                kind(stage, count, **loss).step(*inputs, target=targets, return_outputs=False)
            except RuntimeError as error:
                # An error of the model's forward is raised as it was, without the wrapper of the library.
                if error.__cause__ is None:
                    raise
                raise error.__cause__ from None
        return self._from_last(module.outputs, [batches.shapes(number) for number in range(count)])

    def _pipeline_stage(self, module: nn.Module, batches: _Packs, has_gradients: bool) -> PipelineStage:
        def boundary(layer: int) -> tuple[Tensor, ...]:
            shape = (max(batches.lengths), self.hidden_size)
            flags = [has_gradients and trains for trains in batches.streams(layer)]
            return tuple(torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=flag) for flag in flags)

        received, sent = boundary(self.layers.start), boundary(self.layers.stop)
        if self.is_first:
            received = (torch.empty(1, device="meta"),)
        if self.is_last:
            sent = (torch.empty((), device="meta", requires_grad=has_gradients),)
        return PipelineStage(
            module, self.stage, self.num_stages, self.device, input_args=received, output_args=sent, group=self.group
        )

    @torch.no_grad()
    def _from_last(
        self, outputs: Sequence[dict[str, Tensor]], shapes: Sequence[dict[str, Sequence[int]]]
    ) -> list[PackOutput]:
        """Return the outputs of the last stage in float32, on every stage."""
        places = [(number, name, torch.Size(shape)) for number, x in enumerate(shapes) for name, shape in x.items()]
        sizes = [shape.numel() for _, _, shape in places]
        flat = torch.empty(sum(sizes), device=self.device)
        if self.is_last:
            flat = torch.cat([outputs[number][name].float().flatten() for number, name, _ in places])
        dist.broadcast(flat, dist.get_global_rank(self.group, self.num_stages - 1), group=self.group)
        joined: list[dict[str, Tensor]] = [{} for _ in shapes]
        for (number, name, shape), part in zip(places, flat.split(sizes), strict=True):
            joined[number][name] = part.view(shape)
        return [PackOutput(**tensors) for tensors in joined]


class _StageModule(nn.Module):
    """The forward of this stage as PipelineStage calls it: once per pack, in their order."""

    def __init__(self, stage: StagedTrunk, batches: _Packs, loss_of: LossOf | None):
        super().__init__()
        # Not submodules: the schedule would look for wrappers among its modules.
        self.__dict__.update(stage=stage, batches=batches)
        self.loss_of = loss_of
        self.outputs: list[dict[str, Tensor]] = []
        self.num_done = 0

    def forward(self, *received: Tensor) -> Any:
        """Return the states for the next stage, padded to the longest; of the last stage the loss of a pack."""
        number, stage, batches = self.num_done, self.stage, self.batches
        self.num_done += 1
        states = None if stage.is_first else tuple(tensor[: batches.lengths[number]] for tensor in received)
        if not stage.is_last:
            longest = max(batches.lengths)
            # autocast's wrapper returns float32; the states have the precision of the base.
            computed = [out.to(stage.dtype) for out in batches.forward(number, states, {})]
            sent = [F.pad(out, (0, 0, 0, longest - len(out))) for out in computed]
            return tuple(sent) if len(sent) > 1 else sent[0]

        def model(**asked: Any) -> PackOutput:
            output = batches.forward(number, states, asked)
            self.outputs.append({name: getattr(output, name).detach() for name in batches.shapes(number)})
            return output

        if self.loss_of is not None:
            return self.loss_of(number, model)
        model()
        return torch.zeros((), device=stage.device)


@dataclass
class _Packs:
    """The packs that all stages run together, and how the trunk runs over them."""

    stage: StagedTrunk
    packs: Sequence[Pack]
    roles: tuple[str, ...]
    temperature: float
    entropy_grad: bool = False

    def __post_init__(self) -> None:
        self.lengths = [self.stage.model.grid_of(pack).num_tokens for pack in self.packs]

    def forward(self, number: int, states: tuple[Tensor, ...] | None, asked: dict[str, Any]) -> Any:
        """Return the states [N, H] after the layers of this stage; of the last stage the PackOutput.

        `asked` are the keywords with which a loss calls the model; ValueError if other stages have run it otherwise.
        """
        keywords = {
            "pack": self.packs[number],
            "roles": self.roles,
            "temperature": self.temperature,
            "entropy_grad": self.entropy_grad,
        }
        differs = [
            name
            for name, value in asked.items()
            if name != "states" and value is not keywords.get(name) and (name == "pack" or value != keywords.get(name))
        ]
        if differs:
            raise ValueError(
                "with pipeline_training compute_loss must call the model on the experience's pack, with roles"
                f" {self.roles}, temperature {self.temperature} and entropy_grad {self.entropy_grad}, because the"
                f" stages before have run it so; here {', '.join(differs)} differs"
            )
        return self.stage.model(**keywords, stage=StageInput(self.stage.layers, states, self.stage.is_last))

    def streams(self, layer: int) -> Sequence[bool]:
        """Return for each tensor of states that enters a layer whether it has a gradient."""
        # The layers below the cut run once for all roles, without gradient.
        trunk = self.stage.model
        return list(trunk.streams(self.roles).values()) if layer > trunk.cut else [False]

    def shapes(self, number: int) -> dict[str, Sequence[int]]:
        """Return the shapes of a pack's outputs."""
        mask = self.packs[number].completion_mask
        shapes = {name: mask.shape[:dims] for role in self.roles for name, dims in OUTPUTS[role].items()}
        if "value" in self.roles:
            places, ends = self.packs[number].places, self.stage.model.values_turn_ends
            num_values = len(places.sampled) + (len(places.ended) if ends else 0)
            shapes["value_states"] = (num_values, self.stage.hidden_size)
        return shapes
