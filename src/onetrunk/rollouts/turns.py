"""The decode loop of the local backend: rows begin, end their turns, wait for answers, and continue from their cache.

A row that ends its turn leaves the batch with its share of the cache. Once its observation is there, only the tokens
that the cache lacks run: the last one that was sampled and the observation. A completion without turns is the case in
which every answer is there at once and ends the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.cache_utils import DynamicLayer

from onetrunk.rollouts.decoding import (
    EMPTY_LAYERS,
    STOPPED,
    DecodeState,
    SamplingCall,
    free_places,
    left_padded,
    next_logits,
    on_device,
    prefill,
)
from onetrunk.rollouts.episodes.rows import Answers

# Tokens of the others after which a row that has its answer continues, even if it is the only one.
PATIENCE = 8
# Seconds between two polls while all rows wait for answers.
POLL_SECONDS = 0.1
# Layers that keep every column, so that padding between tokens can be hidden by the mask and moved away afterwards.
# A sliding window counts it, and linear attention runs through it.
LAYERS_OF_ALL_COLUMNS = (DynamicLayer, *EMPTY_LAYERS)


class _NoAnswers:
    """Ends every row after its first turn."""

    def begin(self, row: int, token_ids: list[int], stopped: bool) -> Future[list[int] | None]:
        over: Future[list[int] | None] = Future()
        over.set_result(None)
        return over

    def poll(self) -> None: ...


NO_ANSWERS = _NoAnswers()


class Continuation(Enum):
    """How rows continue after observations: from caches, padded or with equally many tokens; or from the start."""

    PADDED, EVEN, ANEW = range(3)

    @classmethod
    def of(cls, call: SamplingCall) -> Continuation:
        """Return the way that the layers of the model allow, after a check with two short rows."""
        weight = call.model.get_input_embeddings().weight
        ids = torch.linspace(0, weight.shape[0] - 1, 15).long().tolist()
        whole, pad_token_id = [ids[:9], ids[9:]], call.params.pad_token_id

        def state_of(rows: list[list[int]]) -> tuple[DecodeState, Tensor]:
            proof = replace(call, prompt_ids=rows, keys=[(0,), (1,)], capture=None)
            state = left_padded([0, 1], proof)
            return state, next_logits(proof, state)

        state, expected = state_of(whole)
        if not state.can_be_joined:
            return cls.ANEW
        way = cls.PADDED if all(type(layer) in LAYERS_OF_ALL_COLUMNS for layer in state.cache.layers) else cls.EVEN
        lengths = (5, 2) if way is cls.PADDED else (3, 3)
        state, _ = state_of([row[:-n] for row, n in zip(whole, lengths, strict=True)])
        state.extend([row[-n:] for row, n in zip(whole, lengths, strict=True)], pad_token_id)
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        try:
            error = (next_logits(replace(call, capture=None), state) - expected).norm() / expected.norm()
        except (ValueError, RuntimeError, IndexError, TypeError, AttributeError):
            return cls.ANEW
        return way if error <= max(1e-3, 8 * torch.finfo(dtype).eps) else cls.ANEW


class DecodeLoop:
    """The rows of a call: those that decode, and those that wait to begin, for an answer, or for a place.

    Args:
        call: the rows; what they have so far is in `call.episodes`.
        answers: what follows a turn.
        version: the policy version that messages name.
        max_rows, logits_processor, poll: as in LocalBackend.
    """

    def __init__(
        self,
        call: SamplingCall,
        answers: Answers,
        version: int,
        max_rows: int | None,
        logits_processor: LogitsProcessorList | None,
        poll: Callable[[], None] | None,
    ):
        self.call, self.answers, self.version = call, answers, version
        self.logits_processor, self.poll = logits_processor, poll
        prompts = call.prompt_ids
        # Longest first, so that memory runs out early if it does; equal prompts next to each other run once.
        self.waiting = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), prompts[row]))
        self.most = max_rows or max(len(prompts), 1)
        self.continuation = Continuation.ANEW if answers is NO_ANSWERS or not prompts else Continuation.of(call)
        self.state: DecodeState | None = None
        # Indices of the rows of `state` that continue, if rows stay for the state of their last token.
        self.staying: list[int] = []
        self.asking: dict[int, Future[list[int] | None]] = {}
        self.ready: list[int] = []
        # Rows of `ready` that are over; only the state of their last token is missing.
        self.closing: set[int] = set()
        # Caches of rows of `asking` and `ready`.
        self.parked: list[DecodeState] = []
        self.steps_waited = 0

    def run(self) -> Iterator[list[int]]:
        """Sample all rows to their ends; yield those that are over, as they are."""
        while self.waiting or self.state is not None or self.asking or self.ready:
            if self.poll is not None:
                self.poll()
            if self._all_wait:
                wait(self.asking.values(), POLL_SECONDS, ALL_COMPLETED if self.call.in_waves else FIRST_COMPLETED)
            over = self._take_answers(list(self.asking))
            if over:
                self._close(over)
                yield over
            logits = None
            if self.state is not None:
                logits = next_logits(self.call, self.state)
                if self.call.keeps_last:
                    # Rows that ended a step ago stayed for this forward, which computed the state of their last token.
                    places = on_device(self.staying, logits.device)
                    self.state, logits = self.state.kept(self.staying), logits.index_select(0, places)
            logits = self._refill(logits)
            if self.state is None:
                continue
            over = self._draw(logits)
            if over:
                yield over

    def _draw(self, logits: Tensor) -> list[int]:
        """Add a token to every row; let those go that end their turns, and return the rows that are over."""
        scores, state, params = None, self.state, self.call.params
        if self.logits_processor is not None:
            scores = logits / params.temperature if params.temperature > 0 else logits
            scores = self.logits_processor(state.token_ids[:, : state.width], scores)
        _, status = state.draw(logits, params, scores)
        fault = state.fault(status, self.version)
        if fault is not None:
            raise RuntimeError(fault)
        has_ended = state.ended(status, self.call)
        ended = [i for i, has in enumerate(has_ended) if has]
        for i in ended:
            self._ask(i, status[i] == STOPPED)
        over = self._take_answers([state.rows[i] for i in ended])
        leaving = [i for i in ended if state.rows[i] not in over]
        self._park(leaving)
        if not self.call.keeps_last:
            leaving = ended
        remaining = [i for i in range(len(has_ended)) if i not in leaving]
        self.staying = [place for place, i in enumerate(remaining) if not has_ended[i]]
        self.state = state.kept(remaining)
        return over

    def _ask(self, i: int, stopped: bool) -> None:
        """Add the turn at index i to its row's episode, and begin to answer it."""
        row, completion = self.state.rows[i], self.state.completion(i, stopped)
        episode = self.call.episodes[row]
        episode.add_turn(completion.token_ids, completion.logprobs, stopped)
        self.asking[row] = self.answers.begin(row, completion.token_ids, stopped)

    @property
    def _all_wait(self) -> bool:
        return self.state is None and not self.waiting and not self.ready

    def _take_answers(self, rows: Iterable[int]) -> list[int]:
        """Take the answers that are there (in waves: all or none); return the rows that are over."""
        if self.call.in_waves and not (self._all_wait and all(answer.done() for answer in self.asking.values())):
            return []
        answered = [row for row in rows if self.asking[row].done()]
        over = []
        for row in answered:
            goes_on = self.call.episodes[row].add_answer(self.asking.pop(row).result())
            (self.ready if goes_on else over).append(row)
        return over

    def _close(self, over: list[int]) -> None:
        """Drop the caches of rows that are over, or let their last tokens run."""
        if self.call.keeps_last:
            self.ready += over
            self.closing.update(over)
        else:
            self._unparked(over)

    def _park(self, indices: list[int]) -> None:
        """Keep the caches of rows that leave the batch, as far as there is room. They lack the last token."""
        room = self.most - sum(len(parked.rows) for parked in self.parked)
        if self.continuation is not Continuation.ANEW and indices[:room]:
            parked = self.state.part(indices[:room])
            parked.width = parked.seen
            parked.counts = [count - 1 for count in parked.counts]
            self.parked.append(parked)

    def _unparked(self, rows: Sequence[int]) -> list[DecodeState]:
        """Return the caches that are kept of `rows`, and keep them no longer; none of a row with a new context."""
        taken, kept = [], []
        for parked in self.parked:
            leaving = [i for i, row in enumerate(parked.rows) if row in rows]
            if leaving:
                going_on = [i for i in leaving if not self.call.episodes[parked.rows[i]].begins_anew]
                taken += [parked.part(going_on)] if going_on else []
            kept.append(parked.kept([i for i in range(len(parked.rows)) if i not in leaving]))
        self.parked = [parked for parked in kept if parked is not None]
        return taken

    def _refill(self, logits: Tensor | None) -> Tensor | None:
        """Give free places to rows that have their answers, then to rows that begin; return the logits of all."""
        rows = self._next_rows()
        if not rows:
            return logits
        parked = self._unparked(rows)
        parts = self._continued(parked) if parked else []
        begun = [row for row in rows if not any(row in part.rows for part, _ in parts)]
        if begun:
            parts.append(prefill(self.call, begun))
        if self.state is not None:
            parts = [(self.state, logits), *parts]
        (self.state, logits), *others = parts
        if others:
            self.state.join([state for state, _ in others], self.call.params.pad_token_id)
            logits = torch.cat([logits, *(new_logits for _, new_logits in others)])
        if self.closing.isdisjoint(rows):
            return logits
        going_on = [i for i, row in enumerate(self.state.rows) if row not in self.closing]
        self.state = self.state.kept(going_on)
        return logits.index_select(0, on_device(going_on, logits.device))

    def _next_rows(self) -> list[int]:
        """Return the rows that get a place now, and take them off the lists."""
        room = self.most
        if self.state is not None:
            room = free_places(self.state, len(self.state.rows), self.most)
            self.steps_waited += bool(self.ready)
            if self.steps_waited > PATIENCE and self.state.can_be_joined:
                room = self.most - len(self.state.rows)
        if not room:
            return []
        self.steps_waited = 0
        rows = self.ready[:room]
        begun = self.waiting[: room - len(rows)]
        del self.ready[: len(rows)], self.waiting[: len(begun)]
        return rows + begun

    def _continued(self, parked: Sequence[DecodeState]) -> list[tuple[DecodeState, Tensor]]:
        """Run the tokens that these caches lack; return states and the logits [b, V] of the first tokens of turns."""
        pad_token_id, episodes = self.call.params.pad_token_id, self.call.episodes
        state = parked[0]
        if parked[1:]:
            state.join(parked[1:], pad_token_id)
        tokens = [episodes[row].token_ids[count:] for row, count in zip(state.rows, state.counts, strict=True)]
        groups: dict[int, list[int]] = {}
        for i, ids in enumerate(tokens):
            groups.setdefault(0 if self.continuation is Continuation.PADDED else len(ids), []).append(i)
        parts = []
        for group in groups.values():
            part = state if len(groups) == 1 else state.part(group)
            part.extend([tokens[i] for i in group], pad_token_id)
            logits = next_logits(self.call, part)
            if len({len(tokens[i]) for i in group}) > 1:
                part.close_gaps()
            part.begin_turn(self.call)
            parts.append((part, logits))
        return parts
