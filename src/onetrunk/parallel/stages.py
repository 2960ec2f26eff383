"""The layers of a decoder, divided into stages that several processes run one after the other.

A stage runs its layers in the model's own forward (`cut.only_between`), on the hidden states of the stage before and
with a key-value cache of its own layers only. transformers' own pipeline decodes wrongly here: its later stages take
the offsets of masks from a layer of the cache that they never fill.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from onetrunk.costs import ModelShape, decode_split
from onetrunk.models.base_model import backbone, computes, decoder_layers, probe_inputs
from onetrunk.models.frozen_prefix import StageRun, only_between
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.cast_on_read import cast_now
from onetrunk.parallel.groups import process_mesh
from onetrunk.parallel.sharding import begin_sharing, ignore_frozen, keep_whole_size, mark_divided, share_line

# What gloo and torch.distributed say when the connection to another process breaks or its answer does not come.
BROKEN = re.compile(
    r"gloo|Connection (closed|reset) by peer|NCCL|ProcessGroup|Socket Timeout|Timed out (waiting|after)|Broken pipe"
)


class StageLost(RuntimeError):
    """The connection to another stage broke.

    Args:
        stage: of this process.
        peer: names the other stage.
        when: what the stages did together, a clause.
    """

    def __init__(self, stage: int, peer: str, when: str):
        super().__init__(
            f"stage {stage} of the pipeline (process {dist.get_rank()}) lost {peer} while {when}; look at the output"
            " of that process, whose end came first, then resume the run from its last checkpoint"
        )


def is_broken_link(error: BaseException) -> bool:
    """Return whether an error says by itself that the connection to another process broke, or gave no answer."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(BROKEN.search(str(error))) and dist.is_initialized()


@contextlib.contextmanager
def naming_lost_stage(stage: int, num_stages: int, when: str) -> Iterator[None]:
    """Turn an error about a broken connection to another stage of the pipeline into StageLost.

    Args:
        stage, num_stages: of this process. Of two stages the other one is named.
        when: as StageLost takes it.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, StageLost) or not is_broken_link(error):
            raise
        other = 1 - stage
        peer = "another stage" if num_stages > 2 else f"stage {other} (process {dist.get_rank() + other - stage})"
        raise StageLost(stage, peer, when) from error


@dataclass(frozen=True)
class LayerSplit:
    """Which layers each stage has: consecutive ones, `sizes` of them.

    Args:
        sizes: number of layers of each stage, in their order; all layers together.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, stages: int, sizes: Sequence[int] | None = None) -> LayerSplit:
        """Return the split of a model into stages: the given sizes, or those that are modelled to be equally fast.

        Raises:
            ValueError: the sizes do not fit the model, or there are more stages than layers.
        """
        num_layers = len(decoder_layers(model))
        if sizes is None:
            config = backbone(model).config.get_text_config()
            return cls(decode_split(ModelShape.from_config(config), stages))
        if len(sizes) != stages or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"pipeline_split is {list(sizes)}, and the {num_layers} layers of the model are divided into {stages}"
                f" stages; give {stages} numbers of layers, 1 or more each, that add up to {num_layers}, or leave it"
                " out"
            )
        return cls(tuple(sizes))

    @classmethod
    def even(cls, model: nn.Module, stages: int, sizes: Sequence[int] | None = None) -> LayerSplit:
        """Return the given sizes, or stages with equally many layers, the first ones with one more if need be.

        Raises:
            ValueError: as `of`.
        """
        num_layers = len(decoder_layers(model))
        if sizes is None and stages > num_layers:
            raise ValueError(f"{num_layers} layers cannot be divided into {stages} stages; launch fewer processes")
        whole, rest = divmod(num_layers, stages)
        return cls.of(model, stages, sizes or [whole + (stage < rest) for stage in range(stages)])

    @property
    def num_stages(self) -> int:
        return len(self.sizes)

    def layers(self, stage: int) -> range:
        """Return the numbers of the layers of a stage."""
        first = sum(self.sizes[:stage])
        return range(first, first + self.sizes[stage])


class StageCache(DynamicCache):
    """The keys and values of the layers of one stage. Masks get their offsets from its first layer, which is filled.

    Args:
        config: of the model.
        layers: numbers of the layers, by which the model addresses them.
    """

    def __init__(self, config: Any, layers: range):
        super().__init__(config=config)
        self.first = layers.start
        self.layers = self.layers[layers.start : layers.stop]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values to the layer that has this number in the model; return all that it has."""
        return super().update(key_states, value_states, layer_idx - self.first, *args, **kwargs)


class StageModel:
    """The forwards of one stage. Use it inside `running`.

    Args:
        model: the whole model, or one whose other layers are not there in full; its layers outside the stage never
            run.
        layers: numbers of the layers of the stage.
        last_only: keywords that limit the model's logits to the last column.
    """

    def __init__(self, model: nn.Module, layers: range, last_only: dict[str, int] | None = None):
        self.model = model
        self.layers = layers
        self.last_only = last_only or {}
        self.is_first = layers.start == 0
        self.is_last = layers.stop == len(decoder_layers(model))
        # [b, H] states that the last token of each row leaves at the last layer, after the final norm.
        self.last_hidden: Tensor | None = None
        self._run: StageRun | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let forwards of the model inside the block run the layers of this stage only."""
        layers = decoder_layers(self.model)
        with contextlib.ExitStack() as stack:
            self._run = stack.enter_context(only_between(layers, self.layers.start, self.layers.stop))
            if self.is_last:
                stack.enter_context(backbone(self.model).register_forward_hook(self._keep_last))
            yield
        self._run = self.last_hidden = None

    def _keep_last(self, _body: nn.Module, _args: Any, output: Any) -> None:
        self.last_hidden = output.last_hidden_state[:, -1]

    def new_cache(self) -> StageCache:
        """Return an empty cache for the layers of this stage."""
        return StageCache(self.model.config, self.layers)

    def __call__(self, tokens: Tensor, received: Tensor | None, **inputs: Any) -> Tensor:
        """Return the states [b, t, H] after the stage; of the last stage the float32 logits [b, V] of the next token.

        Args:
            tokens: [b, t] int64, which the first stage reads.
            received: [b, t, H] states of the stage before; None for the first one.
            inputs: attention_mask, position_ids and past_key_values of the model.
        """
        self._run.received = received
        # Embeddings of later stages are never read: the stand-in for the layer before hands in the states.
        own = {"input_ids": tokens} if self.is_first else {"inputs_embeds": received}
        if self.is_last:
            return self.model(**own, **inputs, use_cache=True, **self.last_only).logits[:, -1].float()
        # Through the forward of the trunk, which accelerate wraps in autocast.
        body_only = {"body_only": True} if isinstance(self.model, TrunkModel) else {}
        run = self.model if body_only else backbone(self.model)
        run(**own, **inputs, use_cache=True, **body_only)
        return self._run.computed


def stage_obstacle(model: nn.Module) -> str | None:
    """Return why a model cannot decode in stages, or None: its cache, as far as its config says."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", None):
        return "its layers share keys and values"
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    return f"its cache holds more than keys and values ({kinds.pop().__name__})" if kinds else None


@torch.no_grad()
def verify_split(model: nn.Module, split: LayerSplit) -> None:
    """Prove with 8 tokens that the stages of a split, one after the other, decode as the whole model does.

    Call it before the base is sharded.

    Raises:
        ValueError: they don't.
    """
    obstacle = stage_obstacle(model)
    if obstacle is not None:
        raise ValueError(f"{type(backbone(model)).__name__} cannot run in pipeline stages: {obstacle}; {_REMEDY}")
    ids = probe_inputs(model)["input_ids"]
    ids = torch.cat([ids, ids.flip(1)])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    # Two forwards: of a prompt, and of a token after it.
    parts = [slice(0, ids.shape[1] - 1), slice(ids.shape[1] - 1, None)]
    inputs = [(ids[:, p], {"attention_mask": mask[:, : p.stop], "position_ids": positions[:, p]}) for p in parts]

    def whole() -> Tensor:
        cache = DynamicCache(config=model.config)
        for tokens, others in inputs:
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, **others).logits
        return logits[:, -1]

    def in_stages() -> Tensor:
        states: list[Tensor | None] = [None] * len(parts)
        for stage in range(split.num_stages):
            run = StageModel(model, split.layers(stage))
            cache = run.new_cache()
            with run.running():
                states = [
                    run(tokens, received, past_key_values=cache, **others)
                    for (tokens, others), received in zip(inputs, states, strict=True)
                ]
        return states[-1]

    if not computes(in_stages, expected=whole()):
        raise ValueError(
            f"the layers of {type(backbone(model)).__name__} cannot run in stages (one returns or reads more than its"
            f" hidden states); {_REMEDY}"
        )


_REMEDY = "set rollout_backend to 'local', or sample on a server (use_vllm), without pipeline_training"


# --- keeping one stage -------------------------------------------------------------------------------------------


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


def base_obstacle(model: nn.Module, may_train: Callable[[str, nn.Parameter], bool]) -> str | None:
    """Return why a base with adapters cannot be divided, or None; it continues "is not supported".

    Args:
        may_train: whether a parameter besides LoRA may train, by its name: that of a head.
    """
    if not isinstance(model, PeftModel):
        return "for a model whose weights all train; set use_peft: true"
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
    base, whole_bytes = model.get_base_model(), begin_sharing(model)
    keep_whole_size(base)
    mesh = process_mesh(split.num_stages)["tensor"]
    stage = mesh.get_local_rank()
    for number, layer in enumerate(decoder_layers(model)):
        if number not in split.layers(stage):
            drop_frozen(layer)
    _drop_ends(base, is_first=stage == 0, is_last=stage == split.num_stages - 1)
    cast_now(model)
    mark_divided(base)
    model.to(device)
    ignore_frozen(model)
    how = f"pipelined training: the base is divided into stages of {', '.join(map(str, split.sizes))} layers"
    line = share_line(model, how, whole_bytes, dist.get_world_size() // split.num_stages)
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
