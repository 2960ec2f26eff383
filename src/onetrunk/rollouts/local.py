"""Sampling on the policy itself, in this process: one decode loop over a key-value cache, token ids in and out.

Why not `generate` of transformers: it draws from one global random state, and carries finished rows to the end. Here a
row's randomness derives from its key alone, and a finished row leaves the batch with its share of the cache. Prompts
are padded on the LEFT, so that the next token of every row is in the same column; positions come from the mask.

The backend shares its weights with the trainer, so it serves the synchronous schedule only. A sharded base is gathered
once per call, so that each process runs as many forwards as its own rows need.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessorList

from onetrunk.models.base import decoder_layers
from onetrunk.models.parallel import gathered, is_divided
from onetrunk.models.speedups.memory import free_memory, is_out_of_memory
from onetrunk.models.speedups.merged import merged_policy
from onetrunk.models.speedups.narrow import Positions
from onetrunk.models.speedups.packed import packed_weights
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts.base import SamplingParams
from onetrunk.types import Rollout, RowKey
from onetrunk.utils.randomness import generator_of

logger = logging.getLogger(__name__)

RUNNING, STOPPED, NOT_FINITE, NO_TOKEN_LEFT = range(4)
FAULTS = {
    NOT_FINITE: "policy logits are not finite at {}; look for a non-finite weight after the last update, or for an"
    " overflow in float16",
    NO_TOKEN_LEFT: "logits_processor left no token to draw, or a score that is not finite, at {}; let at least one"
    " token keep a finite score",
}


@dataclass(eq=False, repr=False)
class LocalBackend:
    """A `RolloutBackend` that samples from a causal language model in this process.

    A row's completion depends on its prompt, its key and the policy: not on the batch, its order or `max_rows`. (Float
    rounding differs between batch shapes by about 1e-6; it matters only if a draw falls within that of a boundary.)

    Args:
        model: a transformers causal LM or a PEFT model over one; may be left to `sync`.
        max_rows: most rows that decode at once; bounds the memory of the cache. None: all of them.
        logits_processor: applied to the float32 logits AFTER the temperature; its `input_ids` are the rows that still
            decode, padded on the left. The logprobs are those after it, so a processor makes the sampler another
            policy than the one that trains: meant for evaluation and constraints.
        progress: called as `progress(done_rows, total_rows, done_tokens)` whenever rows finish.
        poll: called before each token; may raise to stop sampling.
    """

    model: nn.Module | None = None
    _: KW_ONLY
    max_rows: int | None = None
    logits_processor: LogitsProcessorList | None = None
    progress: Callable[[int, int, int], None] | None = None
    poll: Callable[[], None] | None = None
    policy_version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(
                f"max_rows is {self.max_rows}; set it to 1 or more, or to None to decode all rows at once"
            )

    @property
    def description(self) -> str:
        """What samples, for reports."""
        return "this process"

    def sync(self, model: nn.Module, version: int) -> None:
        """Sample from `model` from now on, and stamp rollouts with `version`. The weights are shared, not copied."""
        self.model, self.policy_version = model, version

    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
        *,
        keeps_states: bool = False,
        keeps_last_state: bool = False,
    ) -> Rollout:
        """Return one completion per prompt, in the order of the prompts.

        The model decodes in eval mode, without activation checkpointing; every module's mode is restored afterwards.

        Args:
            keys: as many integers in each.
            keeps_states: return the states at the cut of the TrunkModel that samples.
            keeps_last_state: also that of a row's last token, which takes one more step of each row.

        Returns:
            n rows; `sampler_logprobs` are float32 on the CPU, after temperature (1 where it is 0) and processors.

        Raises:
            ValueError: an empty prompt, a missing or repeated key, or a prompt too long for the model's context.
            RuntimeError: no model yet, a model that keeps no cache, or logits that are not finite.
        """
        model = _require_inputs(self.model, prompt_ids, params, keys)
        done: dict[int, Completion] = {}
        num_tokens = 0
        width = max(map(len, prompt_ids), default=0) + params.max_completion_length
        capture = StateCapture((len(prompt_ids), width), keeps_last_state) if keeps_states else None
        # Merged first: its proof is a forward, which must not be captured.
        # A sharded base is whole in here, so rows may end at different steps on different processes.
        with gathered(model), torch.no_grad(), _eval_mode(model), merged_policy(model):
            with packed_weights(model), _capturing(capture, model):
                for finished in self._sample(model, prompt_ids, params, keys, capture):
                    done.update(finished)
                    num_tokens += sum(len(completion.token_ids) for completion in finished.values())
                    if self.progress is not None:
                        self.progress(len(done), len(prompt_ids), num_tokens)
        completions = [done[row] for row in range(len(prompt_ids))]
        return Rollout(
            prompt_ids=[list(ids) for ids in prompt_ids],
            completion_ids=[completion.token_ids for completion in completions],
            sampler_logprobs=[completion.logprobs for completion in completions],
            stopped=[completion.stopped for completion in completions],
            policy_version=self.policy_version,
            states=None if capture is None else capture.states,
        )

    def _sample(
        self,
        model: nn.Module,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
        capture: StateCapture | None,
    ) -> Iterator[dict[int, Completion]]:
        """Yield rows as they finish. If memory runs out, restart the unfinished rows, half as many at once."""
        unfinished = sorted(range(len(prompt_ids)), key=lambda row: -len(prompt_ids[row]))
        most = self.max_rows or max(len(unfinished), 1)
        while unfinished:
            message = None
            try:
                state = left_padded(unfinished[:most], prompt_ids, params, keys, model)
                for finished in self._decode(model, state, params, capture):
                    unfinished = [row for row in unfinished if row not in finished]
                    yield finished
            except RuntimeError as error:
                # The processes of a group decode in step, so one of them cannot decode fewer rows.
                if not is_out_of_memory(error) or is_divided(model):
                    raise
                message = str(error).splitlines()[0]
            if message is not None:  # Outside the `except` block, whose error holds tensors.
                state = None
                free_memory()
                most = self.max_rows = _half(min(most, len(unfinished)), message)

    def _decode(
        self, model: nn.Module, state: DecodeState, params: SamplingParams, capture: StateCapture | None
    ) -> Iterator[dict[int, Completion]]:
        """Sample the rows of `state` to their ends; yield {row: completion} as they finish."""
        stop_ids = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=state.token_ids.device)
        last_only = {"logits_to_keep": 1} if _keeps_logits(model) else {}
        keeps_last = capture is not None and capture.keeps_last
        staying = list(range(len(state.rows)))
        for t in range(params.max_completion_length + keeps_last):
            if self.poll is not None:
                self.poll()
            if capture is not None:
                capture.expected = state.next_tokens()
            logits = _next_logits(model, state, last_only)
            if keeps_last:
                # Rows that ended a step ago stayed for this forward, which computed the state of their last token.
                if not staying:
                    return
                logits = logits[staying]
                state.keep(staying)
            tokens, logprobs = self._pick(logits, state, params.temperature, t)
            state.append(tokens, logprobs, t)
            status = _status(tokens, logprobs, logits, stop_ids)
            for row, code in zip(state.rows, status, strict=True):
                if code in FAULTS:
                    place = f"row {row}, token {t} (policy version {self.policy_version})"
                    raise RuntimeError(FAULTS[code].format(place))
            at_limit = t + 1 == params.max_completion_length
            leaving = [i for i, code in enumerate(status) if code == STOPPED or at_limit]
            staying = [i for i, code in enumerate(status) if code != STOPPED and not at_limit]
            if leaving:
                yield {state.rows[i]: state.completion(i, t + 1, status[i] == STOPPED) for i in leaving}
            if not keeps_last:
                if not staying:
                    return
                state.keep(staying)

    def _pick(self, logits: Tensor, state: DecodeState, temperature: float, t: int) -> tuple[Tensor, Tensor]:
        """Return completion token number t of every row and its logprob, both [b]."""
        scores = logits / temperature if temperature > 0 else logits
        if self.logits_processor is not None:
            scores = self.logits_processor(state.token_ids[:, : state.width], scores)
        logprobs = scores.log_softmax(-1)
        tokens = inverse_cdf(logprobs, state.uniforms[:, t]) if temperature > 0 else logprobs.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _require_inputs(
    model: nn.Module | None, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]
) -> nn.Module:
    """Return `model`, or raise the error of the call."""
    if model is None:
        raise RuntimeError(
            "LocalBackend has no model; pass one to LocalBackend(model) or call sync(model, version) first"
        )
    if len(keys) != len(prompt_ids):
        raise ValueError(f"{len(prompt_ids)} prompts came with {len(keys)} keys; give one key per prompt")
    if params.temperature > 0 and len(set(keys)) != len(keys):
        raise ValueError("two rows have the same key and would draw the same random numbers; give each row its own")
    for row, ids in enumerate(prompt_ids):
        if len(ids) == 0:
            raise ValueError(
                f"prompt {row} is empty; give it at least one token, such as the beginning-of-sequence id"
            )
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)  # models without positional limit lack it
    longest, added = max(map(len, prompt_ids), default=0), params.max_completion_length
    if limit is not None and longest + added > limit:
        raise ValueError(
            f"a prompt of {longest} tokens and max_completion_length {added} exceed the model's {limit} positions; "
            "shorten the longest prompts or lower max_completion_length"
        )
    return model


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _half(num_rows: int, error: str) -> int:
    if num_rows == 1:
        raise RuntimeError(
            f"the memory does not hold the decoding of one row ({error}); lower max_completion_length, or load the"
            " base in 4 bit"
        )
    most = -(-num_rows // 2)
    logger.warning(
        "the memory did not hold %d rows that decode at once (%s); from now on at most %d, with the same completions."
        " Set max_rollout_rows to avoid the attempt",
        num_rows,
        error,
        most,
    )
    return most


def _keeps_logits(model: nn.Module) -> bool:
    causal_lm = model.get_base_model() if isinstance(model, PeftModel) else model
    return "logits_to_keep" in inspect.signature(causal_lm.forward).parameters


def _next_logits(model: nn.Module, state: DecodeState, last_only: dict[str, int]) -> Tensor:
    """Run the columns that the cache has not seen; return float32 logits [b, V] of the next token."""
    new = slice(state.seen, state.width)
    # Prompts are padded, and of the last layer only the last column is read.
    is_prefill = state.seen == 0 and isinstance(model, TrunkModel)
    with model.narrow.at(state.prompt_positions()) if is_prefill else nullcontext():
        outputs = model(
            input_ids=state.token_ids[:, new],
            attention_mask=state.attention_mask[:, : state.width],
            position_ids=state.position_ids[:, new],
            past_key_values=state.cache,
            use_cache=True,  # Trainer sets config.use_cache to False
            **last_only,
        )
    state.seen = state.width
    cached = state.cache.get_seq_length()
    if cached != state.seen:
        raise RuntimeError(
            f"{type(model).__name__} left {cached} of {state.seen} tokens in the key-value cache that it was given; "
            "use an architecture that supports DynamicCache, or a rollout backend of your own"
        )
    return outputs.logits[:, -1].float()


def _status(tokens: Tensor, logprobs: Tensor, logits: Tensor, stop_ids: Tensor) -> list[int]:
    """Return RUNNING, STOPPED, NOT_FINITE or NO_TOKEN_LEFT for each row; the only wait for the device in a step."""
    status = torch.where(torch.isin(tokens, stop_ids), STOPPED, RUNNING)
    status = status.masked_fill(~logprobs.isfinite(), NO_TOKEN_LEFT)
    is_finite = logits.sum(-1, dtype=torch.float64).isfinite()  # float64: the sum of float32 numbers can't overflow.
    return status.masked_fill(~is_finite, NOT_FINITE).tolist()


@dataclass(frozen=True)
class Completion:
    """A finished row; `logprobs` are on the CPU."""

    token_ids: list[int]
    logprobs: Tensor
    stopped: bool


@dataclass
class DecodeState:
    """The b rows that still decode; P prompt and C completion columns.

    Args:
        rows: their b indices in the call of `generate`.
        token_ids: [b, P + C] int64; padding, prompt, completion so far.
        attention_mask: [b, P + C] int64, 0 at padding; read up to `width`.
        position_ids: [b, P + C] int64.
        uniforms: [b, C] float64.
        logprobs: [b, C] float32, filled as far as the completion is.
        cache: keys and values of the first `seen` columns.
        seen: columns that went through the model.
        width: columns that are filled.
    """

    rows: list[int]
    token_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    uniforms: Tensor
    logprobs: Tensor
    cache: DynamicCache
    seen: int
    width: int

    def next_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [b], positions [b, t] and bool [b, t], False at padding, of the columns not seen yet."""
        new = slice(self.seen, self.width)
        rows = torch.tensor(self.rows, device=self.token_ids.device)
        return rows, self.position_ids[:, new], self.attention_mask[:, new].bool()

    def prompt_positions(self) -> Positions:
        """Return the positions of the prompts' tokens, of which only the last column is read."""
        mask = self.attention_mask[:, : self.width].bool()
        last = torch.arange(1, len(mask) + 1, device=mask.device) * self.width - 1
        return Positions.at(mask, last)

    def append(self, tokens: Tensor, logprobs: Tensor, t: int) -> None:
        """Add completion token number t of every row."""
        self.token_ids[:, self.width] = tokens
        self.logprobs[:, t] = logprobs
        self.width += 1

    def completion(self, i: int, length: int, stopped: bool) -> Completion:
        """Return row i with its first `length` completion tokens."""
        token_ids = self.token_ids[i, self.width - length : self.width].tolist()
        return Completion(token_ids, self.logprobs[i, :length].cpu(), stopped)

    def keep(self, staying: list[int]) -> None:
        """Drop every row but those at the indices `staying`."""
        if len(staying) == len(self.rows):
            return
        index = torch.tensor(staying, device=self.token_ids.device)
        self.rows = [self.rows[i] for i in staying]
        for name in ("token_ids", "attention_mask", "position_ids", "uniforms", "logprobs"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        # Unlike batch_select_indices, reorder_cache also exists for the states of linear-attention layers.
        self.cache.reorder_cache(index)


def left_padded(
    rows: list[int], prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey], model: nn.Module
) -> DecodeState:
    """Return the state of `rows` (indices into `prompt_ids` and `keys`) before their first completion token."""
    prompt_width = max(len(prompt_ids[row]) for row in rows)
    shape = (len(rows), prompt_width + params.max_completion_length)
    token_ids = torch.full(shape, params.pad_token_id)
    attention_mask = torch.ones(shape, dtype=torch.int64)
    for i, row in enumerate(rows):
        start = prompt_width - len(prompt_ids[row])
        token_ids[i, start:prompt_width] = torch.tensor(prompt_ids[row])
        attention_mask[i, :start] = 0
    uniforms = np.zeros((len(rows), params.max_completion_length))
    if params.temperature > 0:
        uniforms = np.stack([row_uniforms(keys[row], params.max_completion_length) for row in rows])
    device = next(model.parameters()).device
    return DecodeState(
        rows=rows,
        token_ids=token_ids.to(device),
        attention_mask=attention_mask.to(device),
        position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0).to(device),
        uniforms=torch.from_numpy(uniforms).to(device),
        logprobs=torch.zeros(len(rows), params.max_completion_length, device=device),
        cache=DynamicCache(config=model.config),
        seen=0,
        width=prompt_width,
    )


def row_uniforms(key: RowKey, count: int) -> np.ndarray:
    """Return `count` float64 uniforms in [0, 1), one per completion token; a longer list starts with a shorter one.

    Args:
        key: non-negative integers below 2**32. Keys of one length never collide; (1, 2) and (1, 2, 0) do.
        count: tokens.
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
    expected: tuple[Tensor, Tensor, Tensor] | None = None
    states: Tensor | None = None

    def take(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the layer's input; a pre-hook."""
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        if self.states is None:
            self.states = hidden.new_zeros(*self.shape, hidden.shape[-1])
        rows, positions, is_token = self.expected
        rows = rows[:, None].expand_as(positions)[is_token]
        self.states.index_put_((rows, positions[is_token]), hidden[is_token])


def _capturing(capture: StateCapture | None, model: nn.Module) -> AbstractContextManager:
    if capture is None:
        return nullcontext()
    layer = decoder_layers(model.get_base_model())[model.cut]
    return layer.register_forward_pre_hook(capture.take, with_kwargs=True)
