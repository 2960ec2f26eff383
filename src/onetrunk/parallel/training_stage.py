"""Training in pipeline stages, as far as all kinds of models share it: dividing the layers, the schedule, gradients.

Every process keeps the frozen weights of its own layers only; the first also the embedding, the last the head. The
schedule is 1F1B of torch.distributed.pipelining: as soon as the last stage has run the forward of one microbatch,
every stage alternates between a backward and a forward.

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

from onetrunk.models.base_model import backbone, decoder_layers
from onetrunk.models.loading import keep_identity
from onetrunk.parallel.cast_on_read import cast_now
from onetrunk.parallel.sharding import keep_whole_size, local_bytes, mark_divided, require_one_base
from onetrunk.parallel.stages import LayerSplit, naming_lost_stage
from onetrunk.parallel.tensor import process_mesh

STAGED = "onetrunk_staged"
# What stages do together, where one of them is lost.
WHEN = "the model scored or was updated"


@dataclass(frozen=True)
class StagePlace:
    """The place of this process in its pipeline.

    Args:
        layers: numbers of the layers of this stage.
        stage, num_stages: of the pipeline.
        group: the processes of the pipeline.
    """

    layers: range
    stage: int
    num_stages: int
    group: dist.ProcessGroup


# --- dividing the layers --------------------------------------------------------------------------------------------


def base_obstacle(model: PeftModel, may_train: Callable[[str, nn.Parameter], bool]) -> str | None:
    """Return why a base with adapters cannot be divided, or None; it continues "is not supported".

    Args:
        may_train: whether a parameter besides LoRA may train, by its name: that of a head.
    """
    if getattr(model.get_base_model(), "quantization_method", None) is not None:
        return "for a quantised base, whose layers load on one device at once; load it in bfloat16"
    others = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and ".lora_" not in name and not may_train(name, p)
    ]
    return f"with {others[0]} among what trains; train LoRA adapters only (no modules_to_save)" if others else None


def divide_layers(model: PeftModel, split: LayerSplit, device: torch.device) -> tuple[StagePlace, str]:
    """Drop the frozen weights of other stages, move the rest to `device`; return the place and a line for the user.

    Call it on all processes, after everything that reads base weights (the base's marks and fingerprint are taken
    here) and before the trainer wraps the model.

    Raises:
        RuntimeError: the processes loaded different bases.
    """
    base, whole_bytes = model.get_base_model(), local_bytes(model)
    keep_identity(base)
    keep_whole_size(base)
    require_one_base(model)
    mesh = process_mesh(split.num_stages)["tensor"]
    stage = mesh.get_local_rank()
    for number, layer in enumerate(decoder_layers(model)):
        if number not in split.layers(stage):
            drop_frozen(layer)
    _drop_ends(base, is_first=stage == 0, is_last=stage == split.num_stages - 1)
    cast_now(model)
    model.to(device)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, frozen + [name for name, _ in model.named_buffers()]
    )
    mark_divided(base)
    replicas = dist.get_world_size() // split.num_stages
    copies = "" if replicas == 1 else f", {replicas} copies"
    line = (
        f"pipelined training: the base is divided into stages of {', '.join(map(str, split.sizes))} layers{copies}:"
        f" {local_bytes(model) / 2**20:,.1f} of {whole_bytes / 2**20:,.1f} MiB of weights on the first process of"
        " each; adapters and heads are on every process"
    )
    return StagePlace(split.layers(stage), stage, split.num_stages, mesh.get_group()), line


def _drop_ends(base: nn.Module, is_first: bool, is_last: bool) -> None:
    """Drop the embedding and the language model's head, if there is one, where no forward reads them."""
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    is_tied = head is not None and embedding.weight is head.weight
    if not (is_first or (is_last and is_tied)):
        drop_frozen(embedding)
    if head is not None and not (is_last or (is_first and is_tied)):
        drop_frozen(head)


@torch.no_grad()
def drop_frozen(module: nn.Module) -> None:
    """Replace the frozen weights of a module by empty ones: to run it would be an error."""
    for path, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            # Frozen adapters, such as that of the reference, are saved whole.
            if "lora_" in f"{path}.{name}" or parameter.requires_grad:
                continue
            part._parameters[name] = nn.Parameter(
                torch.empty(0, dtype=parameter.dtype, device=parameter.device), requires_grad=False
            )


def staged(model: nn.Module) -> Any | None:
    """Return the stage of a model whose layers are divided, wrapped in DDP or not; None for any other model."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return vars(base).get(STAGED)


# --- running the stages ---------------------------------------------------------------------------------------------


class Stage:
    """This process's stage of a model. What runs microbatches is collective: all stages call it on the same ones.

    Args:
        model: without the frozen weights of other stages.
        place: of this process.
    """

    def __init__(self, model: PeftModel, place: StagePlace):
        self.layers, self.stage, self.num_stages, self.group = place.layers, place.stage, place.num_stages, place.group
        layer = decoder_layers(model)[self.layers.start]
        self.dtype = next(p.dtype for p in layer.parameters() if p.is_floating_point())
        self.device = next(p.device for p in model.parameters() if p.requires_grad)
        self.hidden_size = backbone(model).config.get_text_config().hidden_size
        # Where `staged` finds it.
        vars(model.get_base_model())[STAGED] = self

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def run(
        self,
        module: nn.Module,
        lengths: Sequence[int],
        streams_at: Callable[[int], Sequence[bool]],
        has_gradients: bool,
    ) -> None:
        """Run microbatches through all stages: their forwards, with gradients also their backwards by 1F1B.

        Args:
            module: runs this stage's forward of the next microbatch, once per microbatch in their order. It returns
                the states for the next stage (`sent`), and on the last stage the loss.
            lengths: tokens of each microbatch.
            streams_at: takes the number of a layer; returns for each tensor of states that the stage beginning with
                it receives whether it has a gradient.
            has_gradients: whether backwards run.
        """
        count = len(lengths)
        # With fewer microbatches than stages all of them are in flight anyway.
        kind = Schedule1F1B if has_gradients and count >= self.num_stages else ScheduleGPipe
        loss = {"loss_fn": lambda loss, _: loss, "scale_grads": False} if has_gradients else {}
        stage = self._pipeline_stage(module, max(lengths), streams_at, has_gradients)
        # The schedule divides these into microbatches; every stage knows the real ones.
        inputs = (torch.zeros(count, device=self.device),) if self.is_first else ()
        targets = torch.zeros(count, device=self.device) if self.is_last and has_gradients else None
        with naming_lost_stage(self.stage, self.num_stages, WHEN):
            try:
                kind(stage, count, **loss).step(*inputs, target=targets, return_outputs=False)
            except RuntimeError as error:
                # An error of the model's forward is raised as it was, without the wrapper of the library.
                if error.__cause__ is None:
                    raise
                raise error.__cause__ from None

    def _pipeline_stage(
        self, module: nn.Module, longest: int, streams_at: Callable[[int], Sequence[bool]], has_gradients: bool
    ) -> PipelineStage:
        def boundary(layer: int) -> tuple[Tensor, ...]:
            shape, place = (longest, self.hidden_size), {"dtype": self.dtype, "device": "meta"}
            return tuple(
                torch.empty(shape, **place, requires_grad=has_gradients and trains) for trains in streams_at(layer)
            )

        received, sent = boundary(self.layers.start), boundary(self.layers.stop)
        if self.is_first:
            received = (torch.empty(1, device="meta"),)
        if self.is_last:
            sent = (torch.empty((), device="meta", requires_grad=has_gradients),)
        return PipelineStage(
            module, self.stage, self.num_stages, self.device, input_args=received, output_args=sent, group=self.group
        )

    def sent(self, states: Sequence[Tensor], longest: int) -> Any:
        """Return states [N, H] as they go to the next stage: padded to the longest microbatch."""
        # autocast's wrapper returns float32; the states have the precision of the base.
        padded = [F.pad(out.to(self.dtype), (0, 0, 0, longest - len(out))) for out in states]
        return tuple(padded) if len(padded) > 1 else padded[0]

    def from_last(self, flat: Tensor | None, size: int) -> Tensor:
        """Return float32 numbers [size] that the last stage has, on every stage."""
        if flat is None:
            flat = torch.empty(size, device=self.device)
        with naming_lost_stage(self.stage, self.num_stages, WHEN):
            dist.broadcast(flat, dist.get_global_rank(self.group, self.num_stages - 1), group=self.group)
        return flat


@torch.no_grad()
def reduce_gradients(model: nn.Module) -> None:
    """Add the gradients of all processes; a weight that has one on any of them then has it on all.

    Each process has those of its own layers, and of its own rows if there are several pipelines.
    """
    stage = staged(model)
    with naming_lost_stage(stage.stage, dist.get_world_size(), WHEN):
        _reduce([p for p in model.parameters() if p.requires_grad])


def _reduce(trained: Sequence[nn.Parameter]) -> None:
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
