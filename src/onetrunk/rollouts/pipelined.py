"""Sampling with the decoder's layers divided over several processes, all of them busy (pipelined generation).

Token t+1 of a row needs token t, so one batch keeps one stage busy at a time. Here several batches of different rows
are in flight at once: while one is in the last stage, others are in the stages before. Inspired by the public abstract
of Pipe-RLHF (DOI 10.7544/issn1000-1239.202550127); the design is our own.

The first stage has the queue of prompts. It sends a plan with every turn of a batch (which rows stay, which prompts
join) and its hidden states; each stage applies the plan to its own cache and passes it on; the last one draws, and
sends token ids back. All of it happens within one call, under one version of the policy, so no sample is stale.
Randomness derives from a row's key: a completion depends neither on the number of stages and batches nor on timing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor, nn

from onetrunk.models.base_model import decoder_layers
from onetrunk.models.speedups.fused_lora import casting_once
from onetrunk.models.speedups.memory_use import used_gib
from onetrunk.models.speedups.merged import merged_policy, packed_weights
from onetrunk.parallel.groups import staged
from onetrunk.parallel.sharding import gathered, is_divided, is_sharded, world_size
from onetrunk.parallel.stages import LayerSplit, StageLinks, StageModel, verify_split
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.decoding import (
    STOPPED,
    Completion,
    DecodeState,
    SamplingCall,
    distinct_prompts,
    free_places,
    left_padded,
    narrowed,
    on_device,
    rollout_of,
)
from onetrunk.rollouts.local import eval_mode, last_logits_only, require_inputs
from onetrunk.types import Rollout, RowKey

# In place of the number of a batch: nothing follows.
END = -1


@dataclass(eq=False, repr=False)
class PipelinedBackend:
    """A `RolloutBackend` whose decoder runs in stages, one in each process of a pipeline.

    `generate` and `sync` are collective: all processes of a pipeline call them, each with rows of its own, and each
    gets its own rows back. Every process holds the whole model, or a share of it that FSDP2 gathers for the call; it
    runs only the layers of its stage. Completions are those of LocalBackend, up to rounding (1e-6 in float32).

    Args:
        model: a causal LM, a PEFT model or a TrunkModel; may be left to `sync`.
        stages: consecutive processes that form one pipeline; None: all processes.
        batches: batches in flight; fewer than `stages` leave stages idle. None: one per stage.
        split: layers of each stage; None: modelled to be equally fast (`costs.decode_split`).
        max_rows: most rows that decode at once per process of the pipeline, all batches together; None: no bound.
            Each process has the cache of its share of the layers, so `stages` times as many rows need the same memory.
        progress: called on the first stage as `progress(done_rows, total_rows, done_tokens)`, rows of the pipeline.
        poll: called on every stage before each turn. Only the end of the process may stop a turn.
        shares_rows: whether the stages of a pipeline ask for the same rows, of which each gets all, because they also
            train together.
        links: to the other stages; None: made in the first call.
    """

    model: nn.Module | None = None
    _: KW_ONLY
    stages: int | None = None
    batches: int | None = None
    split: Sequence[int] | None = None
    max_rows: int | None = None
    progress: Callable[[int, int, int], None] | None = None
    poll: Callable[[], None] | None = None
    links: StageLinks | None = None
    shares_rows: bool = False
    policy_version: int = field(default=0, init=False)
    # Every stage calls `generate`, so none may give up alone.
    is_collective: bool = field(default=True, init=False)
    # Of each stage: the most memory that its process used after a turn, GiB.
    stage_gib: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        for name in ("stages", "batches", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; set it to 1 or more, or leave it out")

    @property
    def description(self) -> str:
        """What samples, for reports."""
        return f"a pipeline of {self.num_stages} processes"

    @property
    def num_stages(self) -> int:
        """Processes of one pipeline."""
        return self.stages or world_size()

    def split_of(self, model: nn.Module) -> LayerSplit:
        """Return which layers of a model each stage has."""
        return LayerSplit.of(model, self.num_stages, self.split)

    def check_policy(self, model: nn.Module) -> None:
        """Raise a ValueError unless a model can sample in these stages; call it before its base is sharded."""
        if is_divided(model):
            raise ValueError(
                "pipelined sampling is not supported with tensor parallelism, which has divided the layers already;"
                " set rollout_backend to 'local'"
            )
        verify_split(model, self.split_of(model))

    def report(self, model: nn.Module) -> str:
        """Return a line for the user: the layers and weights of each stage, and what every process has besides."""
        split, layers = self.split_of(model), decoder_layers(model)
        sizes = [
            sum(p.nbytes for i in split.layers(stage) for p in layers[i].parameters())
            for stage in range(split.num_stages)
        ]
        outer = sum(p.nbytes for p in model.parameters()) - sum(sizes)
        stages = ", ".join(f"{n} layers ({size / 2**20:,.1f} MiB)" for n, size in zip(split.sizes, sizes, strict=True))
        return (
            f"pipelined sampling: stages of {stages}; {self.batches or split.num_stages} batches in flight; embedding,"
            f" head and the rest ({outer / 2**20:,.1f} MiB) are on every process"
        )

    def sync(self, model: nn.Module, version: int) -> None:
        """Sample from `model` from now on, and stamp rollouts with `version`. The weights are shared, not copied."""
        self.model, self.policy_version = model, version

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        """Return one completion per prompt, in the order of this process's prompts. All stages call it together.

        Returns:
            n rows; `sampler_logprobs` are float32 on the CPU, after temperature (1 where it is 0) and truncation.
        """
        if self.links is None or self.links.num_stages != self.num_stages:
            self.links = StageLinks(self.num_stages)
        links = self.links
        row_owners, call = self._joined_call(links, prompt_ids, params, keys)
        layers, split = decoder_layers(call.model), self.split_of(call.model)
        own = [layers[i] for i in split.layers(links.stage)]
        stage = StageModel(call.model, split.layers(links.stage), call.last_only)
        with ExitStack() as stack:
            # A sharded base: each layer is gathered on all processes, and stays on the processes of its stage.
            stack.enter_context(gathered(call.model, own))
            stack.enter_context(torch.no_grad())
            stack.enter_context(eval_mode(call.model))
            # The check of merging runs all layers: collective if the base is sharded, impossible on a stage of it.
            is_whole = not (is_sharded(call.model) or staged(call.model))
            stack.enter_context(merged_policy(call.model, own) if is_whole else casting_once(call.model))
            stack.enter_context(packed_weights(call.model))
            stack.enter_context(stage.running())
            run = _StageRun(self, call, row_owners, stage, links)
            error = run.lead() if links.is_first else run.follow()
            links.flush()
        errors, memory = zip(*links.shared((error, run.most_gib)), strict=True)
        self.stage_gib = [max(pair) for pair in zip(memory, self.stage_gib or memory, strict=True)]
        message = next((message for message in errors if message is not None), None)
        if message is not None:
            raise RuntimeError(message)
        owners = [0] * links.num_stages if self.shares_rows else range(links.num_stages)
        shares = [run.rows_of(owner) for owner in owners] if links.is_last else None
        return rollout_of(prompt_ids, links.dealt(shares), self.policy_version)

    def metrics(self) -> dict[str, float]:
        """Return the most memory that each stage used, GiB."""
        return {f"memory/stage_{stage}_gib": gib for stage, gib in enumerate(self.stage_gib)}

    def _joined_call(
        self, links: StageLinks, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]
    ) -> tuple[list[int], SamplingCall]:
        """Return the stage of each row of all stages, and the call over these rows."""
        error, model = None, self.model
        try:
            model = require_inputs(model, prompt_ids, params, keys)
        except (ValueError, RuntimeError) as raised:
            # The others wait for this stage: they must learn of it.
            error = raised
        own = [(list(ids), tuple(key)) for ids, key in zip(prompt_ids, keys, strict=False)]
        settings = (params, self.policy_version, self.batches, self.max_rows, self.shares_rows)
        if self.shares_rows and not links.is_first:
            own = []
        stages = links.shared((own, settings, None if error is None else str(error)))
        if error is not None:
            raise error
        for stage, (_, theirs, message) in enumerate(stages):
            if message is not None:
                raise ValueError(f"stage {stage} of the pipeline: {message}")
            if theirs != settings:
                raise ValueError(
                    f"stage {stage} of the pipeline samples with {theirs} and stage {links.stage} with {settings}; all"
                    " processes must pass the same settings and have the same policy version"
                )
        joined = [(stage, *row) for stage, (rows, *_) in enumerate(stages) for row in rows]
        owners, prompts, all_keys = (list(column) for column in zip(*joined, strict=True)) if joined else ([], [], [])
        return owners, SamplingCall(model, prompts, params, all_keys, None, last_logits_only(model))


@dataclass(frozen=True)
class _Turn:
    """One forward of a batch: of its rows, the places of those that stay, and the rows that join."""

    batch: int
    staying: list[int]
    new: list[int]

    def encoded(self, capacity: int) -> Tensor:
        numbers = [self.batch, len(self.staying), len(self.new), *self.staying, *self.new]
        return torch.tensor(numbers + [0] * (3 + 2 * capacity - len(numbers)))

    @classmethod
    def decoded(cls, message: Tensor) -> _Turn:
        batch, staying, new, *places = message.tolist()
        return cls(batch, places[:staying], places[staying : staying + new])


class _StageRun:
    """The work of a stage in one call. Every stage has the same picture of the batches, and its own cache of them."""

    def __init__(
        self, backend: PipelinedBackend, call: SamplingCall, owners: list[int], stage: StageModel, links: StageLinks
    ):
        self.backend, self.owners, self.stage, self.links = backend, owners, stage, links
        self.call = replace(call, new_cache=stage.new_cache)
        self.device = next(call.model.parameters()).device
        self.hidden_size = call.model.config.get_text_config(decoder=True).hidden_size
        self.num_batches = links.max_turns = backend.batches or links.num_stages
        num_rows, prompts = len(call.prompt_ids), call.prompt_ids
        capacity = -(-num_rows // self.num_batches)
        if backend.max_rows is not None:
            capacity = min(capacity, backend.max_rows * links.num_stages // self.num_batches)
        self.capacity = max(1, capacity)
        # Longest first, so that memory runs out early if it does; equal prompts next to each other run once.
        self.waiting = deque(sorted(range(num_rows), key=lambda row: (-len(prompts[row]), prompts[row])))
        self.most_gib = 0.0
        self.states: dict[int, DecodeState] = {}
        # Of the last stage: rows that ended.
        self.completions: dict[int, Completion] = {}

    def rows_of(self, stage: int) -> list[Completion]:
        """Return the rows of a stage in their order; called on the last stage."""
        return [
            self.completions[row]
            for row, owner in enumerate(self.owners)
            if owner == stage and row in self.completions
        ]

    def lead(self) -> str | None:
        """Start the batches, and give each its next turn when its tokens are back; return an error message."""
        flight: deque[int] = deque()
        num_rows = len(self.owners)
        num_done, num_tokens, error = 0, 0, None
        for batch in range(self.num_batches):
            new = self._next_rows(self.capacity)
            if new:
                flight.append(self._begin_turn(_Turn(batch, [], new)))
        while flight:
            batch = flight.popleft()
            state = self.states[batch]
            tokens, status = self.links.next_tokens(len(state.rows))
            state.append(tokens.to(self.device, non_blocking=True))
            status = status.tolist()
            error = error or state.fault(status, self.backend.policy_version)
            ended = state.ended(status, self.call)
            lengths = [n for n, has_ended in zip(state.counts, ended, strict=True) if has_ended]
            if lengths:
                num_done, num_tokens = num_done + len(lengths), num_tokens + sum(lengths)
                if self.backend.progress is not None:
                    self.backend.progress(num_done, num_rows, num_tokens)
            staying = [place for place, has_ended in enumerate(ended) if not has_ended]
            room = free_places(state, len(staying), self.capacity) if staying else self.capacity
            new = self._next_rows(room) if error is None else []
            if error is None and (staying or new):
                flight.append(self._begin_turn(_Turn(batch, staying, new)))
            else:
                del self.states[batch]
        self.links.send_on(_Turn(END, [], []).encoded(self.capacity))
        return error

    def _next_rows(self, count: int) -> list[int]:
        return [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]

    def _begin_turn(self, turn: _Turn) -> int:
        self.links.send_on(turn.encoded(self.capacity), self._forward(turn, None))
        return turn.batch

    def follow(self) -> None:
        """Take the turns of the stage before, and pass them on, until it sends the end."""
        length = len(_Turn(END, [], []).encoded(self.capacity))
        while True:
            message, dtype = self.links.next_plan(length)
            turn = _Turn.decoded(message)
            if turn.batch == END:
                if not self.links.is_last:
                    self.links.send_on(message)
                return
            result = self._forward(turn, dtype)
            state = self.states[turn.batch]
            if self.links.is_last:
                self.links.send_back(self._draw(state, result))
            else:
                self.links.send_on(message, result)
                state.append(torch.zeros(len(state.rows), dtype=torch.int64, device=self.device))

    def _forward(self, turn: _Turn, dtype: torch.dtype | None) -> Tensor:
        """Apply a turn to its batch and run it; return its states, flat, or of the last stage its logits [b, V].

        Args:
            dtype: the type of the states that the stage before sends; None on the first stage.
        """
        if self.backend.poll is not None:
            self.backend.poll()
        state = self.states.pop(turn.batch, None)
        state = None if state is None else state.kept(turn.staying)
        first, copies = distinct_prompts(self.call, turn.new)
        new = left_padded(first, self.call) if first else None
        parts = [part for part in (state, new) if part is not None]
        received = self._received(parts, dtype)
        outputs = [self._run(part, states) for part, states in zip(parts, received, strict=True)]
        if not self.links.is_last:
            result = torch.cat([states.flatten() for states in outputs])
        if new is not None:
            if len(first) < len(turn.new):  # Rows with the same prompt share what it computed.
                new.select(copies)
                outputs[-1] = outputs[-1].index_select(0, on_device(copies, self.device))
            new.rows = list(turn.new)
            new.uniforms = self.call.uniforms(turn.new).to(self.device, non_blocking=True)
            if state is None:
                state = new
            else:
                state.join([new], self.call.params.pad_token_id)
        self.states[turn.batch] = state
        if self.links.is_last:
            result = torch.cat(outputs)
        self.most_gib = max(self.most_gib, used_gib(self.device))
        return result

    def _received(self, parts: Sequence[DecodeState], dtype: torch.dtype | None) -> list[Tensor | None]:
        """Return the states [b, t, H] of each part from the stage before; None on the first stage."""
        if dtype is None:
            return [None] * len(parts)
        shapes = [(len(part.rows), part.width - part.seen, self.hidden_size) for part in parts]
        counts = [math.prod(shape) for shape in shapes]
        pieces = self.links.next_states(sum(counts), dtype, self.device).split(counts)
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _run(self, state: DecodeState, received: Tensor | None) -> Tensor:
        """Run the columns that the cache has not seen; return the states, or of the last stage the logits."""
        new = slice(state.seen, state.width)
        with narrowed(self.call.model, state):
            output = self.stage(
                state.token_ids[:, new],
                received,
                state.cache,
                attention_mask=state.attention_mask[:, : state.width],
                position_ids=state.position_ids[:, new],
            )
        state.seen, state.given = state.width, None
        return output

    def _draw(self, state: DecodeState, logits: Tensor) -> Tensor:
        """Add a token to every row of the last stage; return tokens and status [2, b] on the CPU."""
        tokens, status = state.draw(logits, self.call.params)
        self.most_gib = max(self.most_gib, used_gib(self.device))
        for place, has_ended in enumerate(state.ended(status, self.call)):
            if has_ended:
                self.completions[state.rows[place]] = state.completion(place, status[place] == STOPPED)
        return torch.tensor([tokens, status])
