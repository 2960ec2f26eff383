"""Decoding by a compiled step: a static cache, fixed shapes, and on a GPU one CUDA graph in place of many kernels.

Each row has a slot of the cache, in which its tokens begin at column 0; what it attends to is decided by a mask per
row. So a row that joins, ends or moves changes no shape. A step runs the first b slots, for a few sizes b, and
`torch.compile` makes one graph for each. Rows that ended stay frozen until the host reads their status.

Prompts run eagerly, since their shapes differ. The tokens of a row are those of the eager loop, up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LogitsProcessorList
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from onetrunk.models.base import decoder_layers
from onetrunk.models.parallel import is_divided, is_sharded
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.decoding import Completion, DecodeState, SamplingCall, capturing, next_logits, prefill
from onetrunk.rollouts.draws import FAULTS, FULL, RUNNING, STOPPED, draw, status_of, truncation

logger = logging.getLogger(__name__)

# The cache has a multiple of so many columns.
COLUMNS = 64
# A step runs all slots, or these shares of them.
SHARES = (1, 2, 4, 8)
# Steps between two reads of the rows' status. A GPU does not wait for the host meanwhile; a CPU would only run rows
# that have ended.
CHECK_EVERY = {"cuda": 8}
# Largest difference of logits that rounding explains, relative to the largest logit.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
HALF_TOLERANCE = 5e-2
# What compiles a traced step.
COMPILER = "inductor"
# Graphs of one function that torch keeps: sizes, times the lengths and models of a process.
GRAPHS = 256


class SlotLayer(CacheLayerMixin):
    """The keys and values [B, heads, L, D] of one layer. A step writes those of a slot at the slot's own place.

    Args:
        places: [B] int64, the column that each slot writes next; shared by all layers.
        length: L.
        window: tokens that a token attends to, itself included; None: all.
    """

    is_compileable = True

    def __init__(self, places: Tensor, length: int, window: int | None):
        super().__init__()
        self.places, self.length, self.window = places, length, window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots in the shape of these keys and values [b, heads, t, D]."""
        for name, states in (("keys", key_states), ("values", value_states)):
            _, heads, _, width = states.shape
            slots = states.new_zeros(len(self.places), heads, self.length, width)
            setattr(self, name, _static(slots))
        self.is_initialized = True

    def fill(self, slots: Tensor, layer: DynamicLayer, padding: Tensor, width: int) -> None:
        """Take the keys and values of `width` left-padded columns for the slots [n]; `padding` [n] have no token."""
        if not self.is_initialized:
            self.lazy_initialization(layer.keys, layer.values)
        kept = layer.keys.shape[-2]  # A sliding layer keeps the last columns only.
        columns = torch.arange(width, device=padding.device) + padding[:, None] - (width - kept)
        columns = columns.clamp(0, kept - 1)[:, None, :, None]
        for name in ("keys", "values"):
            states = getattr(layer, name)
            taken = states.gather(2, columns.expand(-1, states.shape[1], -1, states.shape[3]))
            getattr(self, name)[slots, :, :width] = taken

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per slot for the first b slots, and return all that they have: [b, heads, L, D]."""
        b = key_states.shape[0]
        slots = torch.arange(b, device=key_states.device)
        places = self.places[:b]
        self.keys[slots, :, places] = key_states[:, :, 0]
        self.values[slots, :, places] = value_states[:, :, 0]
        return self.keys[:b], self.values[:b]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of what is attended to."""
        return self.length, 0

    def get_seq_length(self) -> int:
        """Return 0: the slots have lengths of their own, and positions and masks are given."""
        return 0

    def get_max_length(self) -> int:
        """Return the columns of a slot."""
        return self.length


@dataclass
class Slots:
    """The B slots; H columns of text and C completion tokens at most. A slot without a row is not RUNNING.

    Args:
        tokens: [B] the last token of each row, which has not run.
        places: [B] its position.
        counts: [B] completion tokens so far.
        status: [B] RUNNING, or why the row ended.
        rows: [B] indices in the call of `generate`; 0 without a row.
        text: [B, H] prompt and completion.
        uniforms: [B, C] float64.
        logprobs: [B, C] float32.
    """

    tokens: Tensor
    places: Tensor
    counts: Tensor
    status: Tensor
    rows: Tensor
    text: Tensor
    uniforms: Tensor
    logprobs: Tensor

    @classmethod
    def empty(cls, size: int, columns: int, count: int, device: torch.device) -> Slots:
        tokens, places, counts, rows = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(4))
        return cls(
            *(_static(tensor) for tensor in (tokens, places, counts)),
            status=_static(torch.full((size,), FULL, device=device)),
            rows=_static(rows),
            text=_static(torch.zeros(size, columns, dtype=torch.int64, device=device)),
            uniforms=_static(torch.zeros(size, count, dtype=torch.float64, device=device)),
            logprobs=_static(torch.zeros(size, count, device=device)),
        )

    def clear(self, slots: list[int]) -> None:
        """Leave `slots` without a row."""
        index = torch.tensor(slots, device=self.rows.device)
        self.status.index_fill_(0, index, FULL)
        self.rows.index_fill_(0, index, 0)
        self.places.index_fill_(0, index, 0)


class LayerInput:
    """A hook that hands the input of a layer to the step in which it runs."""

    def __init__(self) -> None:
        self.is_on = False
        self.hidden: Tensor | None = None

    def take(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the layer's input; a pre-hook."""
        if self.is_on:
            self.hidden = args[0] if args else kwargs["hidden_states"]


class CompiledDecoder:
    """Decodes the rows of `generate` calls on one model with a compiled step.

    Args:
        model: as LocalBackend has it. A hook stays on its first adapted layer until `close`.
        last_only: keywords that limit its logits to the last column.

    Attributes:
        processor: as LocalBackend has it; it makes the host read the rows' status at every step.
        version: of the policy, for error messages.
    """

    def __init__(self, model: nn.Module, last_only: dict[str, int]):
        self.model, self.last_only = model, last_only
        self.processor: LogitsProcessorList | None = None
        self.version = 0
        self.base = model.get_base_model() if isinstance(model, PeftModel) else model
        self.device = next(model.parameters()).device
        self.size = self.length = 0
        self.occupied: dict[int, int] = {}
        self.autocast: tuple[bool, torch.dtype] = (False, torch.float32)
        self.input = LayerInput()
        self.hook = None
        if isinstance(model, TrunkModel):
            self.hook = decoder_layers(self.base)[model.cut].register_forward_pre_hook(
                self.input.take, with_kwargs=True
            )
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        compiling = {"backend": COMPILER, "fullgraph": True, "dynamic": False, "mode": mode}
        self.compiled_forward, self.compiled_draw = (
            torch.compile(function, **compiling) for function in (self._forward, self._draw_first)
        )

    def close(self) -> None:
        """Remove the hook from the model."""
        if self.hook is not None:
            self.hook.remove()

    def obstacle(self) -> str | None:
        """Return why this model cannot decode in slots, or None: a forward with and without them gives the same."""
        if is_divided(self.model) or is_sharded(self.model):
            return "its matrices are divided among processes"
        kinds = {type(layer).__name__ for layer in _layers_of(self.base) if type(layer) not in _WINDOWED}
        if kinds:
            return f"its cache has layers of other kinds than keys and values ({', '.join(sorted(kinds))})"
        attention = self.base.config.get_text_config(decoder=True)._attn_implementation
        if attention not in ("sdpa", "eager"):
            return f"its attention {attention!r} takes no mask per row; load it with attn_implementation sdpa"
        try:
            difference, largest, dtype = self._trial()
        except (ValueError, RuntimeError, IndexError, TypeError, AttributeError, KeyError) as error:
            return f"a trial failed ({first_line(error)})"
        finally:
            self.release()
            self.size = self.length = 0
        if difference <= TOLERANCE.get(dtype, HALF_TOLERANCE) * largest:
            return None
        return f"a static cache changes its logits by {difference:.2g}"

    def _trial(self) -> tuple[float, float, torch.dtype]:
        """Return the largest difference of logits with and without slots, the largest logit, and the dtype."""
        vocab = self.model.get_input_embeddings().weight.shape[0]
        ids = [token % vocab for token in range(3, 9)]
        call = SamplingCall(
            self.model, [ids, ids[:4]], SamplingParams(3, temperature=0), [(0,), (1,)], None, self.last_only
        )
        self.start(call, 2)
        state, logits = self.admit(call, [0, 1])
        state.append(logits.argmax(-1), torch.zeros(2, device=logits.device))
        expected = next_logits(call, state)
        found = self._run(self._forward, 2)[0]
        return (found - expected).abs().max().item(), expected.abs().max().item(), state.cache.layers[0].keys.dtype

    def decode(self, call: SamplingCall, rows: Sequence[int], most: int, poll: Any) -> Iterator[dict[int, Completion]]:
        """Sample `rows` to their ends, at most `most` at once; yield {row: completion} as they finish."""
        waiting, steps = list(rows), 0
        every = 1 if self.processor is not None else CHECK_EVERY.get(self.device.type, 1)
        self.start(call, most)
        limits = torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=4 * GRAPHS)
        try:
            while waiting or self.occupied:
                if poll is not None:
                    poll()
                free = most - len(self.occupied)
                if waiting and (not self.occupied or free * call.refill_share >= most):
                    self.admit(call, waiting[:free])
                    del waiting[:free]
                    if finished := self._collect(call):  # A first token may be the last.
                        yield finished
                with limits:
                    self._step(call)
                steps += 1
                if steps % every == 0:
                    if finished := self._collect(call):
                        yield finished
                    if not waiting:
                        self._move_to_front()
        finally:
            self.release()

    def start(self, call: SamplingCall, most: int) -> None:
        """Allocate the slots. Their number and length only grow, so that graphs are used again."""
        count = call.params.max_completion_length
        longest = max(len(ids) for ids in call.prompt_ids) + count
        self.size, self.length = max(self.size, most), max(self.length, -(-longest // COLUMNS) * COLUMNS)
        self.sizes = sorted({-(-self.size // share) for share in SHARES})
        self.slots = Slots.empty(self.size, self.length, count, self.device)
        layers = [SlotLayer(self.slots.places, self.length, _WINDOWED[type(x)](x)) for x in _layers_of(self.base)]
        self.cache = Cache(layers=layers)
        self.temperature = _static(torch.tensor(call.params.temperature or 1.0, device=self.device))
        self.is_greedy = call.params.temperature == 0
        self.warpers = truncation(call.params)
        self.stop_ids = _static(torch.tensor(call.params.stop_token_ids or (-1,), device=self.device))
        self.limit = count
        self.occupied, self.ended = {}, set()

    def release(self) -> None:
        """Free the slots."""
        self.occupied, self.ended = {}, set()
        self.slots = self.cache = None

    def admit(self, call: SamplingCall, rows: Sequence[int]) -> tuple[DecodeState, Tensor]:
        """Run the prompts of `rows`, give each row a slot and its first token; return what `prefill` returns."""
        with capturing(call.capture, self.model), self._noting_autocast():
            state, logits = prefill(call, rows)
        free = [slot for slot in range(self.size) if slot not in self.occupied][: len(rows)]
        self.occupied |= dict(zip(free, rows, strict=True))
        slots, index = self.slots, torch.tensor(free, device=self.device)
        lengths = torch.tensor([len(call.prompt_ids[row]) for row in rows], device=self.device)
        padding = state.width - lengths
        for layer, filled in zip(self.cache.layers, state.cache.layers, strict=True):
            layer.fill(index, filled, padding, state.width)
        columns = torch.arange(state.width, device=self.device) + padding[:, None]
        slots.text[index, : state.width] = state.token_ids.gather(1, columns.clamp(max=state.width - 1))
        slots.rows[index] = torch.tensor(rows, device=self.device)
        slots.places[index], slots.counts[index], slots.status[index] = lengths - 1, 0, RUNNING
        slots.uniforms[index] = state.uniforms
        self._draw(index, logits, self._processed(logits, range(len(free)), free, call))
        return state, logits

    @contextmanager
    def _noting_autocast(self) -> Iterator[None]:
        """Note whether the model's own forward runs the base under autocast, as accelerate makes it."""

        def note(_module: nn.Module, _args: Any) -> None:
            kind = self.device.type
            self.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

        handle = self.base.register_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def _step(self, call: SamplingCall) -> None:
        """Run the last tokens of the rows in the first b slots, and draw the next ones."""
        b = self._size_for(max(self.occupied) + 1)
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        logits, hidden = self._run(self.compiled_forward, b)
        if call.capture is not None:
            self._capture(call, b, hidden)
        running = [slot for slot in self.occupied if slot not in self.ended]
        self.compiled_draw(b, logits, self._processed(logits, running, running, call))

    def _size_for(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def _run(self, forward: Any, b: int) -> tuple[Tensor, Tensor | None]:
        enabled, dtype = self.autocast
        self.input.is_on = True
        try:
            with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
                return forward(b)
        finally:
            self.input.is_on = False

    def _forward(self, b: int) -> tuple[Tensor, Tensor | None]:
        """Return the logits [b, V] after the last tokens of the first b slots, and the states at the cut."""
        places = self.slots.places[:b]
        outputs = self.base(
            input_ids=self.slots.tokens[:b, None],
            attention_mask=self._masks(places),
            position_ids=places[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **self.last_only,
        )
        hidden, self.input.hidden = self.input.hidden, None
        return outputs.logits[:, -1].float(), hidden

    def _masks(self, places: Tensor) -> Tensor | dict[str, Tensor]:
        """Return what a slot attends to, [b, 1, 1, L]; by kind of layer where a model has several."""
        config = self.base.config.get_text_config(decoder=True)
        windows = [layer.window for layer in self.cache.layers]
        kinds = getattr(config, "layer_types", None) or []
        masks = {window: self._mask(places, window, config._attn_implementation) for window in set(windows)}
        if len(masks) == 1:
            return masks[windows[0]]
        return {kind: masks[window] for kind, window in zip(kinds, windows, strict=True)}

    def _mask(self, places: Tensor, window: int | None, attention: str) -> Tensor:
        columns = torch.arange(self.length, device=places.device)
        visible = columns <= places[:, None]
        if window is not None:
            visible = visible & (columns > places[:, None] - window)
        visible = visible[:, None, None]
        if attention == "sdpa":
            return visible
        dtype = self.cache.layers[0].keys.dtype
        return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)

    def _draw_first(self, b: int, logits: Tensor, scores: Tensor | None) -> None:
        self._draw(torch.arange(b, device=logits.device), logits, scores)

    def _draw(self, index: Tensor, logits: Tensor, scores: Tensor | None) -> None:
        """Add a token to the running rows among the slots `index` [b].

        Args:
            index: of slots.
            logits: [b, V] float32.
            scores: [b, V] logits after temperature and processors; None: there is no processor.
        """
        slots = self.slots
        if scores is None:
            scores = logits if self.is_greedy else logits / self.temperature
        before, counts, places = slots.status[index], slots.counts[index], slots.places[index]
        is_running = before == RUNNING
        column = counts.clamp(max=self.limit - 1)
        tokens, logprobs = draw(scores, None if self.is_greedy else slots.uniforms[index, column], self.warpers)
        status = status_of(tokens, logprobs, logits, self.stop_ids)
        status = torch.where((status == RUNNING) & (counts + 1 >= self.limit), FULL, status)
        slots.status[index] = torch.where(is_running, status, before)
        slots.logprobs[index, column] = torch.where(is_running, logprobs, slots.logprobs[index, column])
        slots.tokens[index] = torch.where(is_running, tokens, slots.tokens[index])
        places = places + is_running
        slots.text[index, places] = torch.where(is_running, tokens, slots.text[index, places])
        slots.places[index], slots.counts[index] = places, counts + is_running

    def _processed(
        self, logits: Tensor, places: Sequence[int], slots: Sequence[int], call: SamplingCall
    ) -> Tensor | None:
        """Return logits [b, V] after temperature and, for the rows at `places` (their `slots`), the processor."""
        if self.processor is None:
            return None
        scores = logits / self.temperature
        if not len(slots):
            return scores
        index, at = (torch.tensor(list(numbers), device=self.device) for numbers in (slots, places))
        lengths = self.slots.places[index] + 1
        columns = torch.arange(int(lengths.max()), device=self.device) + lengths[:, None] - lengths.max()
        text = self.slots.text[index].gather(1, columns.clamp(min=0))
        text = text.masked_fill(columns < 0, call.params.pad_token_id)
        return scores.index_copy(0, at, self.processor(text, scores[at]))

    def _capture(self, call: SamplingCall, b: int, hidden: Tensor) -> None:
        """Keep the states of the tokens that just ran; a row's last token only if the call wants it."""
        rows, places, states = self.slots.rows[:b], self.slots.places[:b], call.capture.states
        counts = self.slots.counts[:b] > 0
        wanted = (self.slots.status[:b] == RUNNING) | (call.keeps_last & counts & (places > 0))
        # A slot without a row writes what is there at (0, 0), where no completion has a token.
        states[rows, places] = torch.where(wanted[:, None], hidden[:, 0].to(states.dtype), states[rows, places])

    def _collect(self, call: SamplingCall) -> dict[int, Completion]:
        """Read the rows' status; return those that ended since the last time, and free their slots."""
        slots = self.slots
        status, counts = torch.stack([slots.status, slots.counts]).tolist()
        ended = [slot for slot in self.occupied if status[slot] != RUNNING]
        for slot in ended:
            if status[slot] in FAULTS:
                place = f"row {self.occupied[slot]}, token {counts[slot] - 1} (policy version {self.version})"
                raise RuntimeError(FAULTS[status[slot]].format(place))
        finished = {}
        for slot in ended:
            if slot not in self.ended:
                row, count = self.occupied[slot], counts[slot]
                start = len(call.prompt_ids[row])
                token_ids = slots.text[slot, start : start + count].tolist()
                logprobs = slots.logprobs[slot, :count].cpu().clone()
                finished[row] = Completion(token_ids, logprobs, status[slot] == STOPPED)
        # With the state of its last token wanted, a row stays until that token has run.
        leaving = [slot for slot in ended if not call.keeps_last or slot in self.ended]
        self.ended = set(ended) - set(leaving)
        if leaving:
            slots.clear(leaving)
            for slot in leaving:
                del self.occupied[slot]
        return finished

    def _move_to_front(self) -> None:
        """Move the rows to the first slots if a smaller size then holds them."""
        if not self.occupied:
            return
        size_now, size_then = (self._size_for(n) for n in (max(self.occupied) + 1, len(self.occupied)))
        if size_then == size_now:
            return
        old = sorted(self.occupied)
        index = torch.tensor(old, device=self.device)
        tensors = [getattr(self.slots, f.name) for f in fields(Slots)]
        for tensor in [*tensors, *(t for layer in self.cache.layers for t in (layer.keys, layer.values))]:
            tensor[: len(old)] = tensor[index]
        self.slots.clear(list(range(len(old), self.size)))
        new = {slot: place for place, slot in enumerate(old)}
        self.occupied = {new[slot]: row for slot, row in self.occupied.items()}
        self.ended = {new[slot] for slot in self.ended}


def is_compile_error(error: BaseException) -> bool:
    """Return whether `torch.compile` cannot compile something, or has no compiler."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message after its type."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _static(tensor: Tensor) -> Tensor:
    """Return `tensor`, marked as one that keeps its address during a call: a CUDA graph then takes it as it is."""
    torch._dynamo.mark_static_address(tensor, guard=False)
    return tensor


_WINDOWED = {DynamicLayer: lambda layer: None, DynamicSlidingWindowLayer: lambda layer: layer.sliding_window}


def _layers_of(base: nn.Module) -> list[Any]:
    """Return the layers of the cache that transformers makes for a model."""
    return DynamicCache(config=base.config).layers
