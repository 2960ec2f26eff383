"""The layers of a decoder, divided into stages that consecutive processes run one after the other; and their messages.

A stage runs its layers in the model's own forward (`only_between`), on the hidden states of the stage before and with
a key-value cache of its own layers only. transformers' own pipeline decodes wrongly here: its later stages take the
offsets of masks from a layer of the cache that they never fill.

Plans and tokens are small and read by the host, so they travel over gloo; hidden states travel over the backend of
their device (NCCL on GPUs) and never wait for the host. Between two processes messages of a group arrive in the order
in which they were sent, so none needs a tag.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from onetrunk.costs import ModelShape, decode_split
from onetrunk.models.base_model import backbone, computes, decoder_layers, probe_inputs
from onetrunk.models.frozen_layers import StageRun, only_between
from onetrunk.models.trunk import TrunkModel
from onetrunk.parallel.sharding import world_size
from onetrunk.utils.versions import cache_keyword

T = TypeVar("T")

# The types of states that a message can announce, by their place here.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REMEDY = "set rollout_backend to 'local', or sample on a server (use_vllm), without pipeline_training"


@dataclass(frozen=True)
class LayerSplit:
    """Which layers each stage has: consecutive ones, `sizes` of them.

    Args:
        sizes: number of layers of each stage, in their order; all layers together.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, stages: int, sizes: Sequence[int] | None = None) -> LayerSplit:
        """Return the split of a model into stages: the given sizes, or those that are modelled to be equally fast."""
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
        last_only: keywords that limit the model's logits to the last column.
    """

    def __init__(self, model: nn.Module, layers: range, last_only: dict[str, Any] | None = None):
        self.model = model
        self.layers = layers
        self.last_only = last_only or {}
        self.cache_keyword = cache_keyword(backbone(model))
        self.is_first = layers.start == 0
        self.is_last = layers.stop == len(decoder_layers(model))
        self._run: StageRun | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let forwards of the model inside the block run the layers of this stage only."""
        with only_between(decoder_layers(self.model), self.layers.start, self.layers.stop) as self._run:
            yield
        self._run = None

    def new_cache(self) -> StageCache:
        """Return an empty cache for the layers of this stage."""
        return StageCache(self.model.config, self.layers)

    def __call__(self, tokens: Tensor, received: Tensor | None, cache: StageCache, **inputs: Any) -> Tensor:
        """Return the states [b, t, H] after the stage; of the last stage the float32 logits [b, V] of the next token.

        Args:
            tokens: [b, t] int64, which the first stage reads.
            received: [b, t, H] states of the stage before; None for the first one.
            inputs: attention_mask and position_ids of the model.
        """
        self._run.received = received
        # Embeddings of later stages are never read: the stand-in for the layer before hands in the states.
        own = {"input_ids": tokens} if self.is_first else {"inputs_embeds": received}
        own |= {self.cache_keyword: cache}
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
    """Check with 8 tokens that the stages of a split, one after the other, decode as the whole model does.

    Call it before the base is sharded.
    """
    obstacle = stage_obstacle(model)
    if obstacle is not None:
        raise ValueError(f"{type(backbone(model)).__name__} cannot run in pipeline stages: {obstacle}; {REMEDY}")
    ids = probe_inputs(model)["input_ids"]
    ids = torch.cat([ids, ids.flip(1)])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    # Two forwards: of a prompt, and of a token after it.
    parts = [slice(0, ids.shape[1] - 1), slice(ids.shape[1] - 1, None)]
    inputs = [(ids[:, p], {"attention_mask": mask[:, : p.stop], "position_ids": positions[:, p]}) for p in parts]

    def whole() -> Tensor:
        cache, keyword = DynamicCache(config=model.config), cache_keyword(backbone(model))
        for tokens, others in inputs:
            logits = model(input_ids=tokens, use_cache=True, **{keyword: cache}, **others).logits
        return logits[:, -1]

    def in_stages() -> Tensor:
        states: list[Tensor | None] = [None] * len(parts)
        for stage in range(split.num_stages):
            run = StageModel(model, split.layers(stage))
            cache = run.new_cache()
            with run.running():
                states = [
                    run(tokens, received, cache, **others)
                    for (tokens, others), received in zip(inputs, states, strict=True)
                ]
        return states[-1]

    if not computes(in_stages, expected=whole()):
        raise ValueError(
            f"the layers of {type(backbone(model)).__name__} cannot run in stages (one returns or reads more than its"
            f" hidden states); {REMEDY}"
        )


@functools.cache
def _groups_of(_world: dist.ProcessGroup, num_stages: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of this process's pipeline for plans and for states. The first call is collective."""
    ranks = [list(range(first, first + num_stages)) for first in range(0, world_size(), num_stages)]
    control, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")
    states, _ = dist.new_subgroups_by_enumeration(ranks)
    return control, states


class StageLinks:
    """This process's place in its pipeline, and its links to the other stages.

    Args:
        num_stages: 2 or more; divides the number of processes.

    Raises:
        ValueError: there is one stage, or the number of processes is not a multiple of the stages.
    """

    def __init__(self, num_stages: int):
        if num_stages == 1 or world_size() % num_stages:
            raise ValueError(
                f"{num_stages} pipeline stages and {world_size()} processes: the number of processes must be a"
                " multiple of pipeline_stages, which is 2 or more"
            )
        self.num_stages = num_stages
        self.stage = dist.get_rank() % num_stages
        self.first_process = dist.get_rank() - self.stage
        # What was sent must stay in memory until it has arrived: at most two messages of each turn under way.
        self.max_turns = 1
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._control, self._states = _groups_of(dist.group.WORLD, num_stages)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def shared(self, item: T) -> list[T]:
        """Return the items of all stages, in their order."""
        items: list[Any] = [None] * self.num_stages
        dist.all_gather_object(items, item, group=self._control)
        return items

    def dealt(self, items: Sequence[T] | None) -> T:
        """Return this stage's share of `items`, which the last stage has: one for each stage."""
        share: list[Any] = [None]
        last = self.first_process + self.num_stages - 1
        dist.scatter_object_list(share, None if items is None else list(items), src=last, group=self._control)
        return share[0]

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

    def _send(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        self._sent.append((dist.isend(tensor, self.first_process + stage, group=group), tensor))
        # gloo does not say whether a message has arrived. In a turn that is over it has, so this does not wait.
        while len(self._sent) > 2 * (self.max_turns + 1):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._sent[0][0].wait()
        self._sent.popleft()

    def _receive(self, tensor: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        dist.recv(tensor, self.first_process + stage, group=group)
