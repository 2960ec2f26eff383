"""The rows that decode: how they draw their tokens, their key-value cache, and how rows join it and leave it.

A row draws with uniforms from its key alone, by the inverse of the cumulative distribution. Rows are padded on the
LEFT, so that the next token of every row is in the same column, also after rows with shorter or longer prompts have
joined; positions come from the mask.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from onetrunk.models.base_model import backbone, decoder_layers
from onetrunk.models.speedups.token_grid import Positions, known_masks
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.episodes.rows import EpisodeTokens, rows_of
from onetrunk.types import Rollout, RowKey
from onetrunk.utils.randomness import generator_of
from onetrunk.utils.versions import cache_keyword, empty_cache_layers

# Layers that keep nothing.
EMPTY_LAYERS = empty_cache_layers()
# Layers whose rows can be put together; models with others decode one batch after another.
JOINABLE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    *EMPTY_LAYERS,
)
# Rows that wait join when one in this many places is free, so that several prompts run together.
REFILL_SHARE = 4
# A row continues; its last token was a stop token; its logits are wrong (two ways).
RUNNING, STOPPED, NOT_FINITE, NO_TOKEN_LEFT = range(4)
FAULTS = {
    NOT_FINITE: "policy logits are not finite at {}; look for a non-finite weight after the last update, or for an"
    " overflow in float16",
    NO_TOKEN_LEFT: "logits_processor left no token to draw, or a score that is not finite, at {}; let at least one"
    " token keep a finite score",
}


def row_uniforms(key: RowKey, count: int) -> np.ndarray:
    """Return `count` float64 uniforms in [0, 1), one per completion token; a longer list starts with a shorter one.

    Args:
        key: non-negative integers below 2**32. Keys of one length never collide; (1, 2) and (1, 2, 0) do.
    """
    return generator_of(key).random(count)


def inverse_cdf(logprobs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row: the first whose cumulative probability exceeds the row's uniform.

    The float64 cumulative sum is compared with uniform * total, so float32 probabilities that do not add up to 1 leave
    no gap at the end. Tokens of probability 0 are never drawn, whatever a parallel sum rounds to.

    Args:
        logprobs: [b, V], log-softmax; -inf at excluded tokens. Each row has a probability above 0.
        uniforms: [b] float64 in [0, 1).

    Returns:
        [b] int64 token ids.
    """
    probs = logprobs.exp()
    cdf = probs.cumsum(-1, dtype=torch.float64)
    possible = probs > 0
    hit = possible & (cdf > uniforms[:, None] * cdf[:, -1:])
    first_hit = hit.byte().argmax(-1)
    last_possible = probs.shape[-1] - 1 - possible.flip(-1).byte().argmax(-1)
    return torch.where(hit.any(-1), first_hit, last_possible)


def truncation(params: SamplingParams) -> tuple[LogitsProcessor, ...]:
    """Return what gives tokens that `params` excludes the score -inf, in order; empty if it excludes none."""
    if not params.truncates:
        return ()
    top_k = (TopKLogitsWarper(params.top_k),) if params.top_k else ()
    return (*top_k, TopPLogitsWarper(params.top_p)) if params.top_p < 1 else top_k


def draw(scores: Tensor, uniforms: Tensor | None, warpers: tuple[LogitsProcessor, ...] = ()) -> tuple[Tensor, Tensor]:
    """Return a token of every row and its logprob, both [b].

    Args:
        scores: [b, V] float32 logits, after temperature and processors.
        uniforms: [b] float64; None: the most probable token.
        warpers: what `truncation` returned; logprobs are normalised over the tokens that the warpers leave.
    """
    for warp in warpers:
        scores = warp(None, scores)
    logprobs = scores.log_softmax(-1)
    tokens = logprobs.argmax(-1) if uniforms is None else inverse_cdf(logprobs, uniforms)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def status_of(tokens: Tensor, logprobs: Tensor, logits: Tensor, stop_ids: Tensor) -> Tensor:
    """Return RUNNING, STOPPED, NOT_FINITE or NO_TOKEN_LEFT for each row, [b] int64."""
    status = torch.where(torch.isin(tokens, stop_ids), STOPPED, RUNNING)
    status = status.masked_fill(~logprobs.isfinite(), NO_TOKEN_LEFT)
    is_finite = logits.sum(-1, dtype=torch.float64).isfinite()  # float64: the sum of float32 numbers can't overflow.
    return status.masked_fill(~is_finite, NOT_FINITE)


@dataclass(frozen=True)
class Completion:
    """A finished row; `logprobs` are on the CPU."""

    token_ids: list[int]
    logprobs: Tensor
    stopped: bool


@dataclass(frozen=True)
class SamplingCall:
    """The arguments of one call of `generate` or `generate_turns`.

    Args:
        prompt_ids, keys: one of each for the n rows.
        capture: takes the states at the cut, or None.
        last_only: keywords that limit the model's logits to the last column.
        new_cache: makes the cache of rows that begin; None: one of all layers.
        in_waves: as in LocalBackend.
    """

    model: nn.Module
    prompt_ids: Sequence[list[int]]
    params: SamplingParams
    keys: Sequence[RowKey]
    capture: StateCapture | None
    last_only: dict[str, Any]
    new_cache: Callable[[], DynamicCache] | None = None
    in_waves: bool = False

    @property
    def keeps_last(self) -> bool:
        """Whether a row that ended stays for one more forward, which computes the state of its last token."""
        return self.capture is not None and self.capture.keeps_last

    @cached_property
    def cache_keyword(self) -> str:
        return cache_keyword(backbone(self.model))

    @cached_property
    def episodes(self) -> list[EpisodeTokens]:
        """What the n rows have so far."""
        return rows_of(self.prompt_ids, self.params, self.keys)

    def uniforms(self, rows: Sequence[int]) -> Tensor:
        """Return the uniforms [b, C] of the next turns of `rows`, float64; 0 before the turn."""
        uniforms = np.zeros((len(rows), self.params.max_completion_length))
        if self.params.temperature > 0:
            for i, row in enumerate(rows):
                episode = self.episodes[row]
                uniforms[i, len(episode.token_ids) :] = row_uniforms(episode.turn_key, episode.room)
        return torch.from_numpy(uniforms)


@dataclass
class DecodeState:
    """The b rows that decode now; W columns, and C completion tokens at most.

    Args:
        rows: their b indices in the call of `generate`.
        counts: completion tokens of each row so far, observations included.
        token_ids: [b, W] int64; padding, prompt, completion so far.
        attention_mask: [b, W] int64, 0 at padding; read up to `width`.
        position_ids: [b, W] int64.
        uniforms: [b, C] float64.
        places: [b] int64, `counts` on the device.
        cache: keys and values of the first `seen` columns.
        seen: columns that went through the model.
        width: columns that are filled.
        pads: padding columns of each row among those that are filled.
        given: [b, t] bool on the CPU, False at padding, of the columns not seen yet; None: one token of every row.
        drawn: tokens and logprobs that each row has drawn in its turn.
    """

    rows: list[int]
    counts: list[int]
    token_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    uniforms: Tensor
    places: Tensor
    cache: DynamicCache
    seen: int
    width: int
    pads: list[int]
    given: Tensor | None
    drawn: list[list[tuple[int, float]]]

    @property
    def device(self) -> torch.device:
        return self.token_ids.device

    def next_tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return rows and positions [b * t] of the columns not seen yet, and the indices that are not padding.

        None instead of the indices: there is no padding.
        """
        positions = self.position_ids[:, self.seen : self.width]
        rows = on_device(self.rows, self.device)[:, None].expand_as(positions)
        real = None if self.given is None else self.prompt_positions().real
        return rows.flatten(), positions.flatten(), real

    def prompt_positions(self) -> Positions:
        """Return the positions of the tokens that are given and not seen yet; only the last column is read."""
        num_rows, width = self.given.shape
        return Positions.at(self.given, torch.arange(1, num_rows + 1, device=self.device) * width - 1)

    def begin_turn(self, call: SamplingCall) -> None:
        """Let the rows draw their next turns, after all that they have so far."""
        self.counts = [len(call.episodes[row].token_ids) for row in self.rows]
        self.places = on_device(self.counts, self.device)
        self.uniforms = call.uniforms(self.rows).to(self.device, non_blocking=True)
        self.drawn = [[] for _ in self.rows]

    def extend(self, tokens: Sequence[list[int]], pad_token_id: int) -> None:
        """Add given tokens to every row, b lists of one or more, padded on the left."""
        new, count = max(map(len, tokens)), self.uniforms.shape[1]
        token_ids = torch.full((len(tokens), new + count), pad_token_id)
        mask = torch.ones_like(token_ids)
        for i, ids in enumerate(tokens):
            token_ids[i, new - len(ids) : new] = torch.tensor(ids)
            mask[i, : new - len(ids)] = 0
            self.pads[i] += new - len(ids)
        self.given = mask[:, :new].bool() if new > 1 else None
        token_ids, mask = (x.to(self.device, non_blocking=True) for x in (token_ids, mask))
        self.token_ids = torch.cat([self.token_ids[:, : self.width], token_ids], dim=1)
        self.attention_mask = torch.cat([self.attention_mask[:, : self.width], mask], dim=1)
        self.position_ids = positions_of(self.attention_mask)
        self.width += new

    def close_gaps(self) -> None:
        """Move padding between tokens to the beginnings of the rows; the cache has keys of all columns, seen ones."""
        order = self.attention_mask[:, : self.width].argsort(dim=1, stable=True)
        for name in ("token_ids", "attention_mask"):
            columns = getattr(self, name)
            columns[:, : self.width] = columns.gather(1, order)
        self.position_ids = positions_of(self.attention_mask)
        for layer in self.cache.layers:
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                for name in ("keys", "values"):
                    old = getattr(layer, name)
                    setattr(layer, name, old.gather(-2, order[:, None, :, None].expand(old.shape)))

    def append(self, tokens: Tensor) -> None:
        """Add the next completion token of every row."""
        self.token_ids[:, self.width] = tokens
        self.places = self.places + 1
        self.counts = [count + 1 for count in self.counts]
        self.width += 1

    def draw(
        self, logits: Tensor, params: SamplingParams, scores: Tensor | None = None
    ) -> tuple[list[int], list[int]]:
        """Add the next token of every row; return the b tokens and their status (`status_of`).

        Args:
            logits: [b, V] float32.
            scores: [b, V] to draw from; None: the logits divided by the temperature.
        """
        if scores is None:
            scores = logits / params.temperature if params.temperature > 0 else logits
        uniforms = self.uniforms.gather(1, self.places[:, None])[:, 0] if params.temperature > 0 else None
        tokens, logprobs = draw(scores, uniforms, truncation(params))
        self.append(tokens)
        status = status_of(tokens, logprobs, logits, on_device(params.stop_token_ids, self.device))
        # The only wait for the device in a step; float64 holds token ids exactly.
        numbers = torch.stack([x.double() for x in (tokens, status, logprobs)]).tolist()
        tokens, status = ([int(x) for x in row] for row in numbers[:2])
        for own, *drawn in zip(self.drawn, tokens, numbers[2], strict=True):
            own.append(tuple(drawn))
        return tokens, status

    def fault(self, status: Sequence[int], version: int) -> str | None:
        """Return the message for the first row whose logits are wrong; None if all are well."""
        for row, count, code in zip(self.rows, self.counts, status, strict=True):
            if code in FAULTS:
                return FAULTS[code].format(f"row {row}, token {count - 1} (policy version {version})")
        return None

    def ended(self, status: Sequence[int], call: SamplingCall) -> list[bool]:
        """Return for each row whether its turn has stopped or is as long as it may be."""
        longest = [len(call.episodes[row].token_ids) + call.episodes[row].turn_room for row in self.rows]
        return [code == STOPPED or n == most for code, n, most in zip(status, self.counts, longest, strict=True)]

    def completion(self, i: int, stopped: bool) -> Completion:
        """Return what row i has drawn in its turn."""
        token_ids, logprobs = zip(*self.drawn[i], strict=True)
        return Completion(list(token_ids), torch.tensor(logprobs), stopped)

    @property
    def can_be_joined(self) -> bool:
        """Whether rows with caches like this one can be put together."""
        return all(type(layer) in JOINABLE_LAYERS for layer in self.cache.layers)

    def kept(self, staying: list[int]) -> DecodeState | None:
        """Return this state without the rows that are not at the indices `staying`; None if no row is left."""
        if staying and len(staying) < len(self.rows):
            self.select(staying)
        return self if staying else None

    def part(self, indices: list[int]) -> DecodeState:
        """Return a copy of the rows at `indices`."""
        part = copy.copy(self)
        part.cache = copy.copy(self.cache)
        part.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer in part.cache.layers:
            # Layers of linear attention have dictionaries of states.
            vars(layer).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
        part.select(indices)
        return part

    def select(self, indices: list[int]) -> None:
        """Replace the rows by those at `indices`, in their order; one may come several times."""
        index = on_device(indices, self.device)
        self.rows, self.counts, self.pads = ([x[i] for i in indices] for x in (self.rows, self.counts, self.pads))
        self.drawn = [list(self.drawn[i]) for i in indices]
        for name in ("token_ids", "attention_mask", "position_ids", "uniforms", "places"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        # Unlike batch_select_indices, reorder_cache also exists for the states of linear-attention layers.
        self.cache.reorder_cache(index)

    def join(self, others: Sequence[DecodeState], pad_token_id: int) -> None:
        """Add the rows of `others`. All columns that are filled went through the model.

        Columns that are padding in every row are dropped, so fewer than the longest prompt and 2 C are ever filled.
        """
        states = (self, *others)
        width, count = max(state.width for state in states), self.uniforms.shape[1]
        masks = [F.pad(state.attention_mask[:, : state.width], (width - state.width, 0)) for state in states]
        mask = torch.cat(masks)
        pads = [pad + width - state.width for state in states for pad in state.pads]
        unused = min(pads)
        tokens = [
            F.pad(state.token_ids[:, : state.width], (width - state.width, count), value=pad_token_id)
            for state in states
        ]
        self.token_ids = torch.cat(tokens)[:, unused:].contiguous()
        self.attention_mask = F.pad(mask[:, unused:], (0, count), value=1)
        self.position_ids = positions_of(self.attention_mask)
        for name in ("uniforms", "places"):
            setattr(self, name, torch.cat([getattr(state, name) for state in states]))
        join_caches([state.cache for state in states], unused)
        for name in ("rows", "counts", "drawn"):
            setattr(self, name, [x for state in states for x in getattr(state, name)])
        self.pads = [pad - unused for pad in pads]
        self.seen = self.width = width - unused


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return whole numbers as a tensor on a device, which is not waited for."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def positions_of(attention_mask: Tensor) -> Tensor:
    """Return [b, W]: the first token of a row has position 0, its padding too."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def join_caches(caches: Sequence[DynamicCache], unused: int) -> None:
    """Add the rows of the others to the first cache; the last columns are the same, the first `unused` are dropped.

    Args:
        caches: with layers in JOINABLE_LAYERS. A row has zeros where it has no keys; its mask hides them.
        unused: columns, counted from the first one of the longest cache.
    """
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        if isinstance(layers[0], DynamicLayer):
            _join_keys(layers, unused)
        if isinstance(layers[0], LinearAttentionCacheLayerMixin):
            for name in ("conv_states", "recurrent_states"):
                states = [getattr(layer, name) for layer in layers]
                for i, own in states[0].items():
                    states[0][i] = None if own is None else torch.cat([of_layer[i] for of_layer in states])


def _join_keys(layers: Sequence[DynamicLayer], unused: int) -> None:
    own = layers[0]
    if not own.is_initialized:  # A layer that reads the keys of another one.
        return
    columns = max(layer.get_seq_length() for layer in layers) - unused
    # A sliding layer keeps the last columns only.
    kept = min(max(layer.keys.shape[-2] for layer in layers), columns)
    for name in ("keys", "values"):
        parts = [getattr(layer, name)[..., -kept:, :] for layer in layers]
        setattr(own, name, torch.cat([F.pad(part, (0, 0, kept - part.shape[-2], 0)) for part in parts]))
    if isinstance(own, DynamicSlidingWindowLayer):
        own.cumulative_length = columns


def prefill(call: SamplingCall, rows: Sequence[int]) -> tuple[DecodeState, Tensor]:
    """Run all that `rows` have so far; return their state and the logits [b, V] of the first tokens of their turns.

    Rows with the same tokens run once, and share what was computed.
    """
    first, copies = distinct_prompts(call, rows)
    state = left_padded(first, call)
    logits = next_logits(call, state)
    if len(first) < len(rows):
        state.select(copies)
        logits = logits.index_select(0, on_device(copies, logits.device))
        if call.capture is not None:
            call.capture.copy([first[place] for place in copies], rows)
    state.rows = list(rows)
    state.begin_turn(call)
    return state, logits


def distinct_prompts(call: SamplingCall, rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first rows of `rows` with their tokens, and for each of `rows` the place of its tokens in them."""
    places: dict[tuple[int, ...], int] = {}
    copies = [places.setdefault(tuple(call.episodes[row].context), len(places)) for row in rows]
    return [rows[copies.index(place)] for place in range(len(places))], copies


def free_places(state: DecodeState, num_rows: int, most: int) -> int:
    """Return how many rows may join a state that keeps `num_rows` rows; `most` rows decode at once."""
    free = most - num_rows
    return free if free * REFILL_SHARE >= most and state.can_be_joined else 0


def require_rows(prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> None:
    """Raise ValueError for an empty prompt, or for rows without a key of their own."""
    if len(keys) != len(prompt_ids):
        raise ValueError(f"{len(prompt_ids)} prompts came with {len(keys)} keys; give one key per prompt")
    if params.temperature > 0 and len(set(keys)) != len(keys):
        raise ValueError("two rows have the same key and would draw the same random numbers; give each row its own")
    for row, ids in enumerate(prompt_ids):
        if len(ids) == 0:
            raise ValueError(
                f"prompt {row} is empty; give it at least one token, such as the beginning-of-sequence id"
            )


def rollout_of(prompt_ids: Sequence[list[int]], completions: Sequence[Completion], version: int) -> Rollout:
    """Return the completions of prompts as a rollout of a policy version."""
    return Rollout(
        prompt_ids=[list(ids) for ids in prompt_ids],
        completion_ids=[completion.token_ids for completion in completions],
        sampler_logprobs=[completion.logprobs for completion in completions],
        stopped=[completion.stopped for completion in completions],
        policy_version=version,
    )


def left_padded(rows: list[int], call: SamplingCall) -> DecodeState:
    """Return the state of `rows` before the first tokens of their turns, without counts and uniforms."""
    device, num_rows = next(call.model.parameters()).device, len(rows)
    empty = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)
    state = DecodeState(
        rows=rows,
        counts=[0] * num_rows,
        token_ids=empty,
        attention_mask=empty,
        position_ids=empty,
        uniforms=torch.zeros(num_rows, call.params.max_completion_length, dtype=torch.float64, device=device),
        places=torch.zeros(num_rows, dtype=torch.int64, device=device),
        cache=DynamicCache(config=call.model.config) if call.new_cache is None else call.new_cache(),
        seen=0,
        width=0,
        pads=[0] * num_rows,
        given=None,
        drawn=[[] for _ in rows],
    )
    state.extend([call.episodes[row].context for row in rows], call.params.pad_token_id)
    return state


@contextmanager
def narrowed(model: nn.Module, state: DecodeState) -> Iterator[None]:
    """For the forward of the columns not seen yet: say what is padding, and that the last column alone is read."""
    is_given = state.given is not None and isinstance(model, TrunkModel)
    is_narrow = model.narrow.at(state.prompt_positions()) if is_given else nullcontext()
    with is_narrow, known_masks(is_padded=any(state.pads)):
        yield


def next_logits(call: SamplingCall, state: DecodeState) -> Tensor:
    """Run the columns that the cache has not seen; return float32 logits [b, V] of the next token."""
    if call.capture is not None:
        call.capture.expected = state.next_tokens()
    new = slice(state.seen, state.width)
    with narrowed(call.model, state):
        outputs = call.model(
            input_ids=state.token_ids[:, new],
            attention_mask=state.attention_mask[:, : state.width],
            position_ids=state.position_ids[:, new],
            use_cache=True,  # Trainer sets config.use_cache to False
            **{call.cache_keyword: state.cache},
            **call.last_only,
        )
    state.seen, state.given = state.width, None
    cached = state.cache.get_seq_length()
    if cached != state.seen:
        raise RuntimeError(
            f"{type(call.model).__name__} left {cached} of {state.seen} tokens in the key-value cache that it was"
            " given; use an architecture that supports DynamicCache, or a rollout backend of your own"
        )
    return outputs.logits[:, -1].float()


@dataclass
class StateCapture:
    """The states [n, T, H] that enter a layer while rows are sampled, prompts included.

    Args:
        shape: (n, T); T is the longest prompt plus the longest completion.
        keeps_last: whether rows stay until their last token has run.
        expected: `DecodeState.next_tokens` of the next forward.
        states: None before the first forward.
    """

    shape: tuple[int, int]
    keeps_last: bool
    expected: tuple[Tensor, Tensor, Tensor | None] | None = None
    states: Tensor | None = None

    def take(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the layer's input; a pre-hook."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if self.states is None:
            self.states = hidden.new_zeros(*self.shape, hidden.shape[-1])
        rows, positions, real = self.expected
        hidden = hidden.flatten(0, 1)
        if real is not None:
            rows, positions, hidden = (x.index_select(0, real) for x in (rows, positions, hidden))
        self.states.index_put_((rows, positions), hidden)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give each row of `targets` the states of the row of `sources` at its place: their prompts are the same."""
        pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source != target]
        source, target = (on_device(numbers, self.states.device) for numbers in zip(*pairs, strict=True))
        self.states[target] = self.states[source]


def capturing(capture: StateCapture | None, model: nn.Module) -> AbstractContextManager:
    """Let `capture` take the states of the forwards in the block; None: take none."""
    if capture is None:
        return nullcontext()
    layer = decoder_layers(model.get_base_model())[model.cut]
    return layer.register_forward_pre_hook(capture.take, with_kwargs=True)
