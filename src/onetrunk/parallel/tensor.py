"""Divide the matrices of the frozen base over processes (tensor parallelism), by the plans of transformers.

The processes of a group run every forward together on the same rows, each with its share of every matrix. Only frozen
weights are divided. What trains (adapters, heads) stays whole on every process: a LoRA layer uses the rows of lora_B
that belong to its share of a column-parallel matrix, or the columns of lora_A of a row-parallel one. So optimizer
state, clipping, checkpoints and the saved PEFT folder are those of an undivided run, and DDP reduces the gradients.

PEFT would divide the adapters too: its row-parallel layers do not run with transformers 5.23, and its files would
have to be gathered.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PeftModel
from peft.tuners import lora
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import PreTrainedModel

from onetrunk.models.adapters import find_tuner_layers
from onetrunk.models.base_model import active_dropout, backbone, output_head
from onetrunk.ops.logprobs import fused_logprobs_and_top1
from onetrunk.parallel.groups import process_mesh
from onetrunk.parallel.layout import Layout
from onetrunk.parallel.sharding import cast_now, is_divided, mark_divided, require_adapters, shard_frozen, share_frozen
from onetrunk.utils.versions import require_tensor_parallelism

COLUMNS, ROWS = "colwise", "rowwise"
# Styles of a plan that take and return whole states, so that an adapter on them is computed whole.
WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "rowwise_rep",
    "replicated_with_grad_allreduce",
)
STYLES = (COLUMNS, ROWS, *WHOLE, "embedding_rowwise", "embedding_colwise")


def distribute_frozen(model: PeftModel, layout: Layout | None, device: torch.device) -> str | None:
    """Shard or divide the frozen weights of a model in place, as the layout of the launch asks.

    Arguments, result and errors as in `shard_frozen`; one that tensor parallelism has divided already stays as it is.
    """
    if layout is None or layout.tensor == 1:
        return shard_frozen(model, layout, device)
    return None if is_divided(model) else divide_frozen(model, layout, device)


def divide_frozen(model: PeftModel, layout: Layout, device: torch.device) -> str:
    """Divide the frozen weights of a model in place, as `share_frozen`; return a line for the user."""
    require_tensor_parallelism()
    require_adapters(model, "tensor parallelism divides")
    base, size = model.get_base_model(), layout.tensor
    plan = _plan_of(base)
    _check_divisible(model, plan, size)
    mesh = process_mesh(size)["tensor"]
    share = _Share(mesh.get_group(), mesh.get_local_rank(), size, mesh)

    def divide() -> None:
        _divide(base, mesh, plan)
        for name, layer in _lora_layers(base):
            style = plan.get(f"{name}.base_layer")
            if style in (COLUMNS, ROWS):
                layer.forward = _DividedLora(layer, style, share)
        mark_divided(base)

    how = f"tensor parallelism: the frozen base is divided over {size} processes"
    return share_frozen(model, device, divide, how, layout.replicas)


def _divide(base: PreTrainedModel, mesh: DeviceMesh, plan: dict[str, str]) -> None:
    """Divide a base by a plan, layer by layer, so that one layer at a time is whole in its precision."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    modules = {name for name, _ in base.named_modules()}
    parts: dict[str, dict[str, str]] = {}
    for name, style in plan.items():
        layer = re.match(r"(.*\.\d+)\.", name)
        outside = name if name in modules else name.rpartition(".")[0]
        parts.setdefault(layer[1] if layer else outside, {})[name] = style
    for part, styles in parts.items():
        cast_now(base.get_submodule(part))
        apply_tensor_parallelism(base, mesh, styles)
        _drop_other_shares(base.get_submodule(part))
    base.tie_weights()
    cast_now(base)


def _plan_of(base: PreTrainedModel) -> dict[str, str]:
    """Return {name of a module or parameter: style} of the plan of transformers, in the order that it applies it."""
    patterns = dict(base.tp_plan or {})
    plan: dict[str, str] = {}
    # Without the second name of a tied weight.
    weights = {name for name, _ in base.named_parameters()}
    for name, module in base.named_modules():
        # PEFT moves a layer that it adapts to `base_layer`.
        if hasattr(module, "base_layer"):
            continue
        style = patterns.get(_pattern(name.removesuffix(".base_layer")))
        if style is not None:
            names = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
            plan |= {weight: style for weight in names if weight in weights}
            plan[name] = style
    return plan


def _pattern(name: str) -> str:
    """Return the name of a module as the plans of transformers have it: with `*` for the number of a layer."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _lora_layers(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    layers = set(find_tuner_layers(base))
    return ((name, module) for name, module in base.named_modules() if module in layers)


def _check_divisible(model: PeftModel, plan: dict[str, str], size: int) -> None:
    base = model.get_base_model()
    config, kind = base.config.get_text_config(), type(base).__name__
    advice = "launch with accelerate_configs/fsdp2.yaml, which shards any base"
    unknown = sorted(set(plan.values()) - set(STYLES))
    if not plan or unknown:
        why = f"its plan has {', '.join(unknown)}" if unknown else "transformers has no plan for it"
        raise ValueError(f"tensor parallelism is not supported for {kind}: {why}; {advice}")
    heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, number in heads.items():
        if number is not None and number % size:
            raise ValueError(
                f"{kind} has {name} {number}, which {size} processes cannot divide; set parallelism_config_tp_size to"
                f" a divisor of it, or {advice}"
            )
    if getattr(base, "quantization_method", None) is not None:
        raise ValueError(f"a quantised base is not supported by tensor parallelism; load it in bfloat16, or {advice}")
    _check_replicated(base, plan, advice)
    if any(layer.lora_variant or type(layer) is not lora.Linear for _, layer in _lora_layers(base)):
        raise ValueError(
            "tensor parallelism supports plain LoRA on linear layers; DoRA needs the norms of whole matrices: set"
            f" use_dora to false, or {advice}"
        )


def _check_replicated(base: PreTrainedModel, plan: dict[str, str], advice: str) -> None:
    """Raise ValueError for what the processes of a group would not have, or not compute, in the same way."""
    trained = [name for name, p in base.named_parameters() if p.requires_grad and plan.get(name)]
    copied = [name for name, module in base.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    wrapped = [name for name in copied if _pattern(name) in base.tp_plan]
    if trained or wrapped:
        raise ValueError(
            f"tensor parallelism divides {(trained + wrapped)[0]}, and it trains; train adapters only (no"
            f" modules_to_save or new tokens), or {advice}"
        )
    random = active_dropout(base)
    if random is not None:
        raise ValueError(
            f"tensor parallelism is not supported with dropout ({random}): each process of a group would draw it for"
            f" its own part of a layer; set lora_dropout and the dropouts of the model's config to 0, or {advice}"
        )


def _drop_other_shares(base: nn.Module) -> None:
    """Copy this process's share of each weight: a share that is a view would keep the whole weight in memory."""
    for module in base.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                local = parameter.to_local().detach().clone(memory_format=torch.contiguous_format)
                places = {"shape": parameter.shape, "stride": parameter.stride()}
                share = DTensor.from_local(
                    local, parameter.device_mesh, parameter.placements, run_check=False, **places
                )
                setattr(module, name, nn.Parameter(share, requires_grad=parameter.requires_grad))


@dataclass(frozen=True)
class _Share:
    """This process's place in its group; dimension n is divided as torch.chunk divides it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    mesh: DeviceMesh

    def places(self, n: int) -> tuple[int, int]:
        """Return (first, number) of this process's entries of a dimension n."""
        step = -(-n // self.size)
        first = min(self.rank * step, n)
        return first, min(step, n - first)

    def of(self, whole: Tensor, dim: int) -> Tensor:
        """Return this process's entries of a tensor that every process has whole.

        DDP averages gradients over all processes, and the other entries have none here: so this gradient is multiplied
        by the size of the group. One that is the same on all processes of the group stays as it is.
        """
        part = whole.narrow(dim, *self.places(whole.shape[dim]))
        if part.requires_grad:
            part.register_hook(lambda gradient: gradient * self.size)
        return part

    def copied(self, whole: Tensor) -> Tensor:
        """Return a tensor that all processes have; its gradient is summed over them."""
        return DTensor.from_local(whole, self.mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum over the processes; each gets the whole gradient."""
        return DTensor.from_local(part, self.mesh, [Partial()], run_check=False).full_tensor()


class _DividedLora:
    """The forward of a LoRA layer whose base matrix is divided; r numbers per token cross between processes.

    y = x W^T + s (x A^T) B^T. Column-parallel: y is divided, and so are the rows of B. Row-parallel: x is divided, and
    so are the columns of A. An object, because a deep copy of the layer must also copy its forward.
    """

    def __init__(self, layer: lora.Linear, style: str, share: _Share):
        self.layer, self.style, self.share = layer, style, share

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        output = layer.get_base_layer()(x, *args, **kwargs)
        if layer.disable_adapters:
            return output
        for name in layer.active_adapters:
            if name in layer.lora_A:
                output = output + self._update(x, name).to(output.dtype)
        return output

    def _update(self, x: Tensor, name: str) -> Tensor:
        layer, share = self.layer, self.share
        lora_a, lora_b, bias = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_B[name].bias
        x = layer.lora_dropout[name](x.to(lora_a.dtype))
        if self.style == ROWS:
            down = share.summed(F.linear(x, share.of(lora_a, dim=1)))
        else:
            down = share.copied(F.linear(x, lora_a))
            lora_b, bias = share.of(lora_b, dim=0), None if bias is None else share.of(bias, dim=0)
        return F.linear(down, lora_b, bias) * layer.scaling[name]


class FusedOutput(NamedTuple):
    """What the loss and the metrics of SFTTrainer read of a forward; all [B, T - 1], 0 where no token is learned."""

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    label_mask: Tensor


def keep_head_divided(base: PreTrainedModel) -> None:
    """Let the fused forward of TRL (`model(..., fused_lm_head=True)`) of a divided base leave its head divided.

    A forward without `fused_lm_head` stays
    as it is, and so does a base with a head that is whole.
    """
    if not isinstance(output_head(base).weight, DTensor):
        return
    whole = base.forward

    # The signature is read by `generate` and by Trainer.
    @functools.wraps(whole)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return label_logprobs(self, *args, **kwargs) if fused_lm_head else whole(*args, **kwargs)

    base.forward = MethodType(forward, base)


def label_logprobs(base: PreTrainedModel, *args: Any, labels: Tensor, **kwargs: Any) -> FusedOutput:
    """Return the logprobs of the labels, each predicted from the tokens before it.

    Args:
        labels: [B, T]; -100 where a token is not learned.
    """
    hidden = backbone(base)(*args, **{**kwargs, "use_cache": False}).last_hidden_state[:, :-1]
    targets = labels[:, 1:].to(hidden.device)
    mask = targets != -100
    head = output_head(base).local()
    with torch.autocast(hidden.device.type, enabled=False):
        found = fused_logprobs_and_top1(hidden[mask].to(head.weight.dtype), head, targets[mask])
    # Connected to the model also where no label counts, so that every process runs a backward.
    spread = [flat.new_zeros(mask.shape).masked_scatter(mask, flat) for flat in found]
    return FusedOutput(*spread, mask)
