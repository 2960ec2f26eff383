"""Train a model whose layers are divided over the processes of a pipeline, so that none of them holds the whole base.

`Stage` runs microbatches through the stages, for any kind of model: a microbatch of `StagedTrunk` is a pack, and one
of `StagedScorer` (a reward adapter) is a block of rows. The schedule is 1F1B of torch.distributed.pipelining: as soon
as the last stage has run the forward of one microbatch, every stage alternates between a backward and a forward.

What trains (adapters, heads) stays whole on every process, as with FSDP2 and tensor parallelism. A stage computes the
gradients of its own layers; `reduce_gradients` adds the gradients of all processes. So optimizer state, clipping,
checkpoints and the saved PEFT folder equal those of one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from transformers.modeling_outputs import SequenceClassifierOutput

from onetrunk.costs import SCORED_AT_ONCE
from onetrunk.models.base_model import active_dropout, backbone, computes, decoder_layers, probe_inputs
from onetrunk.models.frozen_layers import only_between
from onetrunk.models.reward_model import score_layer
from onetrunk.models.speedups.token_grid import token_grid
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
# input_ids and attention_mask [b, T] of a microbatch.
Rows = dict[str, Tensor]
# Takes the number of a microbatch and a model that runs the rest of its forward; returns the microbatch's loss.
LossOf = Callable[[int, Callable[..., Any]], Tensor]


# --- keeping one stage ----------------------------------------------------------------------------------------------


def keep_stage(model: PeftModel, split: LayerSplit, device: torch.device) -> str:
    """Drop the frozen weights of other stages, and move the rest, as `share_frozen`; return a line for the user."""
    obstacle = training_obstacle(model)
    if obstacle is not None:
        raise ValueError(f"pipeline_training is not supported {obstacle}")
    if not isinstance(model, TrunkModel):
        verify_stages(model, split)

    def keep() -> None:
        stage = (StagedTrunk if isinstance(model, TrunkModel) else StagedScorer)(model, split, device)
        for number, layer in enumerate(decoder_layers(model)):
            if number not in stage.layers:
                drop_frozen(layer)
        _drop_ends(model.get_base_model(), stage.is_first, stage.is_last)
        cast_now(model)
        mark_divided(model.get_base_model())

    how = f"pipelined training: the base is divided into stages of {', '.join(map(str, split.sizes))} layers"
    return share_frozen(model, device, keep, how, dist.get_world_size() // split.num_stages)


def training_obstacle(model: nn.Module) -> str | None:
    """Return why a model cannot be trained in stages, or None; it continues "is not supported"."""
    if not isinstance(model, PeftModel):
        return "for a model whose weights all train; set use_peft: true"
    if getattr(model.get_base_model(), "quantization_method", None) is not None:
        return "for a quantised base, whose layers load on one device at once; load it in bfloat16"
    is_trunk = isinstance(model, TrunkModel)
    if is_trunk and model.reward_branch is not None:
        return "with a reward adapter on the policy's trunk; score with a function, or with a model on a server"
    head = set((model.value_head if is_trunk else score_layer(model)).parameters())
    others = [n for n, p in model.named_parameters() if p.requires_grad and ".lora_" not in n and p not in head]
    if others:
        return f"with {others[0]} among what trains; train LoRA adapters only (no modules_to_save)"
    dropout = active_dropout(model)
    if dropout is not None:
        return f"with dropout ({dropout}), which every stage would draw for itself; set it to 0"
    return None


def _drop_ends(base: nn.Module, is_first: bool, is_last: bool) -> None:
    """Drop the embedding and the language model's head, if it has one, where no forward reads them."""
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
        # The value head is float32 also next to adapters in float64.
        parameter.grad = gradient.view_as(parameter).to(parameter.dtype)


# --- microbatches through all stages --------------------------------------------------------------------------------


class Microbatches(Protocol):
    """What all stages run together."""

    # Tokens of each microbatch.
    lengths: Sequence[int]
    # Type of the model's output.
    output_type: type

    def forward(self, number: int, states: tuple[Tensor, ...] | None, asked: dict[str, Any]) -> Any:
        """Return the states [N, H] after the layers of this stage; of the last stage the model's output.

        `asked` are the keywords with which a loss calls the model; ValueError if other stages have run it otherwise.
        """

    def streams(self, layer: int) -> Sequence[bool]:
        """Return for each tensor of states that enters a layer whether it has a gradient."""

    def shapes(self, number: int) -> dict[str, Sequence[int]]:
        """Return the shapes of the outputs."""


class Stage:
    """This process's stage of a model. `run` is collective: all stages call it on the same microbatches."""

    def __init__(self, model: PeftModel, split: LayerSplit, device: torch.device):
        mesh = process_mesh(split.num_stages)["tensor"]
        self.model, self.device = model, device
        self.group, self.stage, self.num_stages = mesh.get_group(), mesh.get_local_rank(), split.num_stages
        self.layers = split.layers(self.stage)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.num_stages - 1
        layer = decoder_layers(model)[self.layers.start]
        self.dtype = next(p.dtype for p in layer.parameters() if p.is_floating_point())
        self.hidden_size = backbone(model).config.get_text_config().hidden_size
        # Where `staged` finds it.
        vars(model.get_base_model())[STAGED] = self

    def run(self, batches: Microbatches, loss_of: LossOf | None = None) -> list[dict[str, Tensor]]:
        """Run microbatches through all stages; return the outputs of each, without gradients, on every stage.

        Args:
            loss_of: called once per microbatch, and backwards run; None: forwards only. Each process adds the
                gradients of its own layers, the last one also those of the head, to `.grad`. The other stages call it
                after the backwards on the outputs of the last stage, so that all stages have loss and metrics.
        """
        module = _StageModule(self, batches, loss_of)
        count, has_gradients = len(batches.lengths), loss_of is not None
        # With fewer microbatches than stages all of them are in flight anyway.
        kind = Schedule1F1B if has_gradients and count >= self.num_stages else ScheduleGPipe
        loss = {"loss_fn": lambda loss, _: loss, "scale_grads": False} if has_gradients else {}
        # The schedule divides these into microbatches; every stage knows the real ones.
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
        outputs = self._from_last(module.outputs, [batches.shapes(number) for number in range(count)])
        if has_gradients and not self.is_last:
            with torch.no_grad():
                for number, output in enumerate(outputs):
                    loss_of(number, lambda output=output, **_: batches.output_type(**output))
        return outputs

    def _pipeline_stage(self, module: nn.Module, batches: Microbatches, has_gradients: bool) -> PipelineStage:
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
    ) -> list[dict[str, Tensor]]:
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
        return joined


class _StageModule(nn.Module):
    """The forward of this stage as PipelineStage calls it: once per microbatch, in their order."""

    def __init__(self, stage: Stage, batches: Microbatches, loss_of: LossOf | None):
        super().__init__()
        # Not submodules: the schedule would look for wrappers among its modules.
        self.__dict__.update(stage=stage, batches=batches)
        self.loss_of = loss_of
        self.outputs: list[dict[str, Tensor]] = []
        self.num_done = 0

    def forward(self, *received: Tensor) -> Any:
        """Return the states for the next stage, padded to the longest; of the last stage the loss of a microbatch."""
        number, stage, batches = self.num_done, self.stage, self.batches
        self.num_done += 1
        states = None if stage.is_first else tuple(tensor[: batches.lengths[number]] for tensor in received)
        if not stage.is_last:
            longest = max(batches.lengths)
            # autocast's wrapper returns float32; the states have the precision of the base.
            computed = [out.to(stage.dtype) for out in batches.forward(number, states, {})]
            sent = [F.pad(out, (0, 0, 0, longest - len(out))) for out in computed]
            return tuple(sent) if len(sent) > 1 else sent[0]

        def model(**asked: Any) -> Any:
            output = batches.forward(number, states, asked)
            self.outputs.append({name: getattr(output, name).detach() for name in batches.shapes(number)})
            return output

        if self.loss_of is not None:
            return self.loss_of(number, model)
        model()
        return torch.zeros((), device=stage.device)


# --- the trunk ------------------------------------------------------------------------------------------------------


def update_in_stages(
    model: nn.Module, packs: Sequence[Pack], roles: Sequence[str], loss_of: LossOf, temperature: float, entropy: bool
) -> None:
    """Run forward and backward over packs in the pipeline of a model; every stage gets all gradients.

    The arguments are those of `StagedTrunk.update`.
    """
    stage = staged(model)
    stage.update(packs, roles, loss_of, temperature, entropy)
    reduce_gradients(stage.model)


def rehearse_in_stages(model: nn.Module, pack: Pack, temperature: float, entropy: bool) -> None:
    """Score and update on as many copies of a pack as are in flight at once, without effect."""
    stage = staged(model)
    packs = [pack] * stage.num_stages
    stage.outputs(packs, ("policy", "value", "reference"), temperature)

    def loss_of(_: int, run: Callable[..., PackOutput]) -> Tensor:
        output = run()
        return output.logprobs.sum() + output.values.sum()

    stage.update(packs, ("policy", "value"), loss_of, temperature, entropy)
    stage.model.zero_grad(set_to_none=True)


class StagedTrunk(Stage):
    """This process's stage of a trunk. `outputs` and `update` are collective: all stages pass the same packs."""

    def outputs(self, packs: Sequence[Pack], roles: Sequence[str], temperature: float) -> list[PackOutput]:
        """Return the outputs of `roles` over each pack, on every stage."""
        step, outputs = SCORED_AT_ONCE * self.num_stages, []
        for first in range(0, len(packs), step):
            outputs += self.run(_Packs(self, packs[first : first + step], tuple(roles), temperature))
        return [PackOutput(**tensors) for tensors in outputs]

    def base_logprobs(self, pack: Pack, temperature: float) -> Tensor:
        """Return the logprobs [R, C] of completions under the bare base, on every stage; collective."""
        kept, self.model.has_reference_adapter = self.model.has_reference_adapter, False
        try:
            return self.outputs([pack], ("reference",), temperature)[0].ref_logprobs
        finally:
            self.model.has_reference_adapter = kept

    def update(
        self,
        packs: Sequence[Pack],
        roles: Sequence[str],
        loss_of: LossOf,
        temperature: float = 1.0,
        entropy_grad: bool = False,
    ) -> list[PackOutput]:
        """Run forward and backward over the packs; return their outputs, without gradients, on every stage."""
        batches = _Packs(self, packs, tuple(roles), temperature, entropy_grad)
        return [PackOutput(**tensors) for tensors in self.run(batches, loss_of)]


@dataclass
class _Packs:
    """Packs as microbatches, and how the trunk runs over them."""

    stage: StagedTrunk
    packs: Sequence[Pack]
    roles: tuple[str, ...]
    temperature: float
    entropy_grad: bool = False
    output_type = PackOutput

    def __post_init__(self) -> None:
        trunk = self.stage.model
        self.lengths = [token_grid(trunk, pack, trunk.padding_free).num_tokens for pack in self.packs]

    def forward(self, number: int, states: tuple[Tensor, ...] | None, asked: dict[str, Any]) -> Any:
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
        # The layers below the cut run once for all roles, without gradient.
        trunk = self.stage.model
        return list(trunk.streams(self.roles).values()) if layer > trunk.cut else [False]

    def shapes(self, number: int) -> dict[str, Sequence[int]]:
        mask = self.packs[number].completion_mask
        shapes = {name: mask.shape[:dims] for role in self.roles for name, dims in OUTPUTS[role].items()}
        trunk = self.stage.model
        if "value" in self.roles and trunk.value_head_kind == "shared":
            shapes["value_states"] = (int(mask.sum()), trunk.value_head.hidden_size)
        return shapes


# --- a reward adapter -----------------------------------------------------------------------------------------------


class StagedScorer(Stage):
    """This process's stage of a reward adapter. It replaces the forward of the base, which is collective from now on.

    Every stage runs the forward of the sequence-classification model itself, with the layers of other stages and the
    embedding replaced by stand-ins, so masks, positions and the place of the score are the model's own. A forward
    without gradients, as in an evaluation, goes through the pipeline too: all stages call it on the same rows.
    """

    def __init__(self, model: PeftModel, split: LayerSplit, device: torch.device):
        super().__init__(model, split, device)
        base = model.get_base_model()
        self.num_parameters = base.num_parameters(exclude_embeddings=True)
        self.layer_forward = LayerForward(model, self.layers)
        self._updating: _Blocks | None = None
        base.forward = self._forward

    def scores(self, rows: Rows) -> Tensor:
        """Return the scores [n, 1] of rows, float32 and without gradients, on every stage."""
        num_rows = len(rows["input_ids"])
        size = -(-num_rows // min(num_rows, SCORED_AT_ONCE * self.num_stages))
        blocks = [{name: tensor[i : i + size] for name, tensor in rows.items()} for i in range(0, num_rows, size)]
        return torch.cat([outputs["logits"] for outputs in self.run(_Blocks(self, blocks))])

    def update(self, blocks: Sequence[Rows], loss_of: LossOf) -> list[SequenceClassifierOutput]:
        """Run forward and backward over blocks of rows; return their outputs, without gradients, on every stage.

        Args:
            loss_of: as in `run`; it calls the model once, on the block.
        """
        self._updating = _Blocks(self, blocks, has_gradients=True)
        try:
            return [SequenceClassifierOutput(**outputs) for outputs in self.run(self._updating, loss_of)]
        finally:
            self._updating = None

    def _forward(self, input_ids: Tensor, attention_mask: Tensor, **others: Any) -> Any:
        """Take the place of the base's forward."""
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self._updating is not None:
            return self.layer_forward(self._updating.states, **rows, **others)
        return SequenceClassifierOutput(logits=self.scores(rows))


@dataclass
class _Blocks:
    """Blocks of rows as microbatches."""

    stage: StagedScorer
    blocks: Sequence[Rows]
    has_gradients: bool = False
    output_type = SequenceClassifierOutput

    def __post_init__(self) -> None:
        self.lengths = [block["input_ids"].numel() for block in self.blocks]
        self.cut = lowest_trained_layer(self.stage.model)
        # [b, T, H] of the block that runs.
        self.states: Tensor | None = None

    def forward(self, number: int, states: tuple[Tensor, ...] | None, asked: dict[str, Any]) -> Any:
        stage, block = self.stage, self.blocks[number]
        self.states = None if states is None else states[0].view(*block["input_ids"].shape, stage.hidden_size)
        # Through the forward of the adapter, which accelerate wraps in autocast. It calls `StagedScorer._forward`.
        output = stage.model(**block) if self.has_gradients else stage.layer_forward(self.states, **block)
        if stage.is_last:
            return output
        # What nothing below trains from gets no gradient, whatever the model's own forward asks for.
        return ((output.detach() if stage.layers.stop <= self.cut else output).flatten(0, 1),)

    def streams(self, layer: int) -> Sequence[bool]:
        return [layer > self.cut]

    def shapes(self, number: int) -> dict[str, Sequence[int]]:
        return {"logits": (len(self.blocks[number]["input_ids"]), 1)}


class LayerForward:
    """The forward of a sequence-classification model in which only some of its layers run."""

    def __init__(self, model: PeftModel, layers: range):
        base = model.get_base_model()
        self.layers, self.every = layers, decoder_layers(base)
        self.embedding, self.whole = base.get_input_embeddings(), base.forward

    def __call__(self, states: Tensor | None, **inputs: Any) -> Any:
        """Return the states [b, T, H] after the layers; with the last layer among them, the model's output.

        Args:
            states: of the layer before the first one; None if they begin at layer 0.
        """
        with only_between(self.every, self.layers.start, self.layers.stop, states) as run, self._embedded(states):
            output = self.whole(**inputs)
        return output if self.layers.stop == len(self.every) else run.computed

    @contextlib.contextmanager
    def _embedded(self, states: Tensor | None) -> Iterator[None]:
        """Let the embedding, whose weight later stages do not have, return tensors of the right kind."""
        if states is None:
            yield
            return
        self.embedding.forward = lambda _: states.detach()
        try:
            yield
        finally:
            del self.embedding.forward


def lowest_trained_layer(model: PeftModel) -> int:
    """Return the number of the lowest decoder layer with a trained weight; with none, the number of layers."""
    layers = decoder_layers(model)
    trained = (number for number, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters()))
    return next(trained, len(layers))


@torch.no_grad()
def verify_stages(model: PeftModel, split: LayerSplit) -> None:
    """Prove with 8 tokens that the stages of a split, one after the other, score as the whole model does."""
    ids = probe_inputs(model)["input_ids"]
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, -3:] = 0
    rows = {"input_ids": torch.cat([ids, ids.flip(1)]), "attention_mask": mask.to(ids.device)}

    def in_stages() -> Tensor:
        states: Any = None
        for stage in range(split.num_stages):
            states = LayerForward(model, split.layers(stage))(states, **rows)
        return states.logits

    if not computes(in_stages, expected=model.get_base_model()(**rows).logits):
        raise ValueError(
            f"pipeline_training is not supported for {type(model.get_base_model()).__name__}: a layer returns or reads"
            " more than its hidden states; launch with accelerate_configs/fsdp2.yaml, which shards any base"
        )
