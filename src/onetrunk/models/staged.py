"""Train a trunk whose layers are divided over the processes of a pipeline, so that none of them holds the whole base.

Every process keeps the frozen weights of its own layers only; the first also the embedding, the last the head. The
schedule is 1F1B of torch.distributed.pipelining: a microbatch is a pack, and as soon as the last stage has run one
forward, every stage alternates between a backward and a forward.

What trains (adapters, heads) stays whole on every process, as with FSDP2 and tensor parallelism. A stage computes the
gradients of its own layers; `reduce_gradients` adds those of all processes. So optimizer state, clipping, checkpoints
and the saved PEFT folder are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from onetrunk.models.base import backbone, decoder_layers
from onetrunk.models.late_cast import cast_now
from onetrunk.models.parallel import local_bytes, mark_divided, require_one_base
from onetrunk.models.pipeline import LayerSplit
from onetrunk.models.sources import keep_identity
from onetrunk.models.speedups.padding_free import token_grid
from onetrunk.models.tensor_parallel import process_mesh
from onetrunk.models.trunk import PackOutput, StageInput, TrunkModel
from onetrunk.types import Pack

STAGED = "onetrunk_staged"
# Packs of one forward-only schedule, per stage: hidden states of all of them are in memory at once.
SCORED_AT_ONCE = 4
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

    Call it on all processes, after everything that reads base weights (the base's marks and fingerprint are taken
    here) and before the trainer wraps the model.

    Raises:
        ValueError: the trunk cannot be trained in stages; the message says why.
        RuntimeError: the processes loaded different bases.
    """
    obstacle = training_obstacle(trunk)
    if obstacle is not None:
        raise ValueError(f"pipeline_training is not supported {obstacle}")
    base, whole_bytes = trunk.get_base_model(), local_bytes(trunk)
    keep_identity(base)
    require_one_base(trunk)
    mesh = process_mesh(split.num_stages)["tensor"]
    stage = mesh.get_local_rank()
    layers, every = split.layers(stage), decoder_layers(trunk)
    for number, layer in enumerate(every):
        if number not in layers:
            _drop(layer)
    is_first, is_last = stage == 0, stage == split.num_stages - 1
    is_tied = base.get_input_embeddings().weight is base.get_output_embeddings().weight
    if not (is_first or (is_last and is_tied)):
        _drop(base.get_input_embeddings())
    if not (is_last or (is_first and is_tied)):
        _drop(base.get_output_embeddings())
    cast_now(trunk)
    trunk.to(device)
    frozen = [name for name, p in trunk.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        trunk, frozen + [name for name, _ in trunk.named_buffers()]
    )
    mark_divided(base)
    vars(base)[STAGED] = StagedTrunk(trunk, layers, stage, split.num_stages, mesh.get_group())
    replicas = dist.get_world_size() // split.num_stages
    copies = "" if replicas == 1 else f", {replicas} copies"
    return (
        f"pipelined training: the base is divided into stages of {', '.join(map(str, split.sizes))} layers{copies}:"
        f" {local_bytes(trunk) / 2**20:,.1f} of {whole_bytes / 2**20:,.1f} MiB of weights on the first process of"
        " each; adapters and heads are on every process"
    )


def training_obstacle(trunk: nn.Module) -> str | None:
    """Return why a model cannot be trained in stages, or None; it continues "is not supported"."""
    if not isinstance(trunk, TrunkModel):
        return "for a model whose weights all train; set use_peft: true"
    base = trunk.get_base_model()
    if getattr(base, "quantization_method", None) is not None:
        return "for a quantised base, whose layers load on one device at once; load it in bfloat16"
    if trunk.reward_branch is not None:
        return "with a reward adapter on the policy's trunk; score with a function, or with a model on a server"
    others = [
        name
        for name, p in trunk.named_parameters()
        if p.requires_grad and ".lora_" not in name and not name.startswith("value_head")
    ]
    return f"with {others[0]} among what trains; train LoRA adapters only (no modules_to_save)" if others else None


@torch.no_grad()
def _drop(module: nn.Module) -> None:
    """Replace the frozen weights of a module by empty ones: to run it would be an error."""
    for path, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            # Frozen adapters, such as that of the reference, are saved whole.
            if "lora_" in f"{path}.{name}" or parameter.requires_grad:
                continue
            part._parameters[name] = nn.Parameter(
                torch.empty(0, dtype=parameter.dtype, device=parameter.device), requires_grad=False
            )


def staged(model: nn.Module) -> StagedTrunk | None:
    """Return the stage of a model that `keep_stage` has divided, wrapped in DDP or not; None for any other."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return vars(base).get(STAGED)


def pack_outputs(
    model: nn.Module, packs: Sequence[Pack], roles: Sequence[str], temperature: float
) -> list[PackOutput]:
    """Return the outputs of `roles` over each pack, without gradients, whether or not the model is in stages."""
    stage = staged(model)
    if stage is not None:
        return stage.outputs(packs, roles, temperature)
    with torch.no_grad():
        return [model(pack=pack, roles=roles, temperature=temperature) for pack in packs]


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


class StagedTrunk:
    """This process's stage of a trunk. `outputs` and `update` are collective: all stages call them on the same packs.

    Args:
        trunk: without the frozen weights of other stages.
        layers: numbers of the layers of this stage.
        stage, num_stages: the place in the pipeline.
        group: the processes of the pipeline.
    """

    def __init__(self, trunk: TrunkModel, layers: range, stage: int, num_stages: int, group: dist.ProcessGroup):
        # The base refers to this object: a copy of the model must not follow it back.
        self.trunk, self.layers, self.stage, self.num_stages, self.group = trunk, layers, stage, num_stages, group
        self.dtype = next(p.dtype for p in decoder_layers(trunk)[layers.start].parameters() if p.is_floating_point())
        self.device = next(trunk.value_head.parameters()).device
        self.hidden_size = backbone(trunk).config.get_text_config().hidden_size

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def num_tokens(self, pack: Pack) -> int:
        """Return the tokens of a pack that cross between stages."""
        return token_grid(self.trunk, pack, self.trunk.padding_free).num_tokens

    def num_received(self, roles: Sequence[str]) -> int:
        """Return how many states of each token the stage before hands over: one, or above the cut one per stream."""
        return len(self._streams(self.layers.start, roles))

    @torch.no_grad()
    def run(
        self, pack: Pack, roles: Sequence[str], temperature: float, received: tuple[Tensor, ...] | None
    ) -> PackOutput | tuple[Tensor, ...]:
        """Run one pack through this stage alone; return the states [N, H] for the next one, or the last one's outputs.

        Args:
            pack, roles, temperature: as TrunkModel takes them.
            received: `num_received` states [N, H] of the stage before; None on the first stage.
        """
        result = self.trunk(
            pack=pack, roles=roles, temperature=temperature, stage=StageInput(self.layers, received, self.is_last)
        )
        return result if self.is_last else self.as_sent(result)

    def as_sent(self, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return states in the precision of the base: autocast's wrapper of the forward returns float32."""
        return tuple(tensor.to(self.dtype) for tensor in states)

    def known_outputs(
        self, packs: Sequence[Pack], roles: Sequence[str], outputs: Sequence[PackOutput]
    ) -> list[PackOutput]:
        """Return on every stage the outputs of packs that the last one has from `run`; collective."""
        return self._shared(outputs, self._call(packs, roles, temperature=1.0)) if packs else []

    @torch.no_grad()
    def outputs(self, packs: Sequence[Pack], roles: Sequence[str], temperature: float) -> list[PackOutput]:
        """Return the outputs of `roles` over each pack, on every stage."""
        step, found = SCORED_AT_ONCE * self.num_stages, []
        for first in range(0, len(packs), step):
            call = self._call(packs[first : first + step], roles, temperature)
            module = _StageModule(self, call, None)
            stage = self._pipeline_stage(module, call, has_gradients=False)
            _run(ScheduleGPipe(stage, len(call.packs)), self._first_input(call), None)
            found += self._shared(module.outputs, call)
        return found

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
        stage = self._pipeline_stage(module, call, has_gradients=True)
        # With fewer microbatches than stages all of them are in flight anyway.
        schedule = Schedule1F1B if len(packs) >= self.num_stages else ScheduleGPipe
        targets = torch.zeros(len(packs), device=self.device) if self.is_last else None
        run = schedule(stage, len(packs), loss_fn=lambda loss, _: loss, scale_grads=False)
        _run(run, self._first_input(call), targets)
        return self._shared(module.outputs, call)

    def _call(
        self, packs: Sequence[Pack], roles: Sequence[str], temperature: float, entropy_grad: bool = False
    ) -> _Call:
        lengths = [self.num_tokens(pack) for pack in packs]
        return _Call(packs, tuple(roles), temperature, entropy_grad, lengths)

    def _first_input(self, call: _Call) -> tuple[Tensor, ...]:
        # The schedule divides the inputs of the first stage into microbatches; the packs are known to every stage.
        return (torch.zeros(len(call.packs), device=self.device),) if self.is_first else ()

    def _pipeline_stage(self, module: _StageModule, call: _Call, has_gradients: bool) -> PipelineStage:
        received = self._boundary(self.layers.start, call, has_gradients)
        sent = self._boundary(self.layers.stop, call, has_gradients)
        if self.is_first:
            received = (torch.empty(1, device="meta"),)
        if self.is_last:
            sent = (torch.empty((), device="meta", requires_grad=has_gradients),)
        return PipelineStage(
            module, self.stage, self.num_stages, self.device, input_args=received, output_args=sent, group=self.group
        )

    def _boundary(self, layer: int, call: _Call, has_gradients: bool) -> tuple[Tensor, ...]:
        """Return the shapes of what crosses to the stage that begins with a layer: equal ones for all packs."""
        return tuple(
            torch.empty(
                call.longest,
                self.hidden_size,
                dtype=self.dtype,
                device="meta",
                requires_grad=has_gradients and trains,
            )
            for trains in self._streams(layer, call.roles)
        )

    def _streams(self, layer: int, roles: Sequence[str]) -> list[bool]:
        """Return which states enter a layer, by whether they get gradients."""
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
        if self.is_last:
            flat = torch.cat([getattr(outputs[number], name).detach().float().flatten() for number, name, _ in places])
        else:
            flat = torch.empty(sum(sizes), device=self.device)
        dist.broadcast(flat, dist.get_global_rank(self.group, self.num_stages - 1), group=self.group)
        found: list[dict[str, Tensor]] = [{} for _ in call.packs]
        for (number, name, shape), part in zip(places, flat.split(sizes), strict=True):
            found[number][name] = part.view(shape)
        return [PackOutput(**tensors) for tensors in found]


def _run(schedule: Any, inputs: tuple[Tensor, ...], targets: Tensor | None) -> None:
    """Run a schedule; an error of the model's forward is raised as it was, without the wrapper of the library."""
    try:
        schedule.step(*inputs, target=targets, return_outputs=False)
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None


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
            sent = [F.pad(states, (0, 0, 0, call.longest - length)) for states in stage.as_sent(run())]
            return tuple(sent) if len(sent) > 1 else sent[0]
        if self.loss_of is None:
            self.outputs.append(run())
            return torch.zeros((), device=stage.device)

        def kept(**keywords: Any) -> PackOutput:
            output = run(**keywords)
            self.outputs.append(PackOutput(*(None if x is None else x.detach() for x in output)))
            return output

        return self.loss_of(number, kept)


@torch.no_grad()
def reduce_gradients(model: nn.Module) -> None:
    """Add the gradients of all processes; a weight that has one on any of them then has it on all.

    Each process has those of its own layers, and of its own rows if there are several pipelines.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    has_gradient = torch.tensor([p.grad is not None for p in trained], device=trained[0].device, dtype=torch.float32)
    dist.all_reduce(has_gradient)
    reduced = [p for p, count in zip(trained, has_gradient.tolist(), strict=True) if count]
    if not reduced:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in reduced])
    dist.all_reduce(flat)
    for parameter, gradient in zip(reduced, flat.split([p.numel() for p in reduced]), strict=True):
        # The value head is float32 also beside adapters in float64.
        parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
