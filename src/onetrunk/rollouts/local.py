"""Sampling on the policy itself, in this process: one decode loop over a key-value cache, token ids in and out.

Why not `generate` of transformers: it draws from one global random state, and carries finished rows to the end. Here a
row's randomness derives from its key alone, a finished row leaves the batch with its share of the cache, and one that
waits takes its place. decoding.py has the draws, the rows and their cache.

The backend shares its weights with the trainer, so it serves the synchronous schedule only. A sharded base is gathered
once per call, so that each process runs as many forwards as its own rows need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import LogitsProcessorList

from onetrunk.models.speedups.merged import merged_policy, packed_weights
from onetrunk.parallel.sharding import gathered
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.decoding import (
    STOPPED,
    Completion,
    DecodeState,
    SamplingCall,
    StateCapture,
    capturing,
    free_places,
    next_logits,
    prefill,
    require_rows,
    rollout_of,
)
from onetrunk.types import Rollout, RowKey


@dataclass(eq=False, repr=False)
class LocalBackend:
    """A `RolloutBackend` that samples from a causal language model in this process.

    A row's completion depends on its prompt, its key and the policy: not on the batch, its order or `max_rows`. (Float
    rounding differs between batch shapes by about 1e-6; it matters only if a draw falls that close to a boundary.)

    Args:
        model: a transformers causal LM or a PEFT model over one; may be left to `sync`.
        max_rows: most rows that decode at once; bounds the memory of the cache. None: all of them.
        logits_processor: applied to the float32 logits AFTER the temperature; its `input_ids` are the rows that still
            decode, padded on the left; they need not have equally many tokens. The logprobs are those after it, so a
            processor makes the sampler another policy than the one that trains: meant for evaluation and constraints.
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
            keys: tuples of equally many integers.
            keeps_states: return the states at the cut of the TrunkModel that samples.
            keeps_last_state: also return the state of a row's last token, which takes one more step per row.

        Returns:
            n rows; `sampler_logprobs` are float32 on the CPU, after temperature (1 where it is 0), processors and
            truncation.
        """
        model = require_inputs(self.model, prompt_ids, params, keys)
        done: dict[int, Completion] = {}
        num_tokens = 0
        width = max(map(len, prompt_ids), default=0) + params.max_completion_length
        capture = StateCapture((len(prompt_ids), width), keeps_last_state) if keeps_states else None
        call = SamplingCall(model, prompt_ids, params, keys, capture, last_logits_only(model))
        # Longest first, so that memory runs out early if it does; equal prompts next to each other run once.
        order = sorted(range(len(prompt_ids)), key=lambda row: (-len(prompt_ids[row]), prompt_ids[row]))
        most = self.max_rows or max(len(order), 1)
        # Merged first: its proof is a forward, which must not be captured.
        # A sharded base is whole in here, so rows may end at different steps on different processes.
        with (
            gathered(model),
            torch.no_grad(),
            eval_mode(model),
            merged_policy(model),
            packed_weights(model),
            capturing(capture, model),
        ):
            for finished in self._decode(call, order, most):
                done.update(finished)
                num_tokens += sum(len(completion.token_ids) for completion in finished.values())
                if self.progress is not None:
                    self.progress(len(done), len(prompt_ids), num_tokens)
        completions = [done[row] for row in range(len(prompt_ids))]
        return rollout_of(prompt_ids, completions, self.policy_version, None if capture is None else capture.states)

    def _decode(self, call: SamplingCall, rows: Sequence[int], most: int) -> Iterator[dict[int, Completion]]:
        """Sample `rows` to their ends, at most `most` at once; yield {row: completion} as they finish."""
        waiting, state = list(rows), None
        staying: list[int] = []
        while waiting or state is not None:
            if self.poll is not None:
                self.poll()
            logits = None
            if state is not None:
                logits = next_logits(call, state)
                if call.keeps_last:
                    # Rows that ended a step ago stayed for this forward, which computed the state of their last token.
                    state, logits = state.kept(staying), logits[staying]
            room = most if state is None else free_places(state, len(state.rows), most)
            if waiting and room:
                new, new_logits = prefill(call, waiting[:room])
                del waiting[:room]
                if state is None:
                    state, logits = new, new_logits
                else:
                    state.join(new, call.params.pad_token_id)
                    logits = torch.cat([logits, new_logits])
            if state is None:  # The forward ran the last tokens.
                return
            finished, staying = self._draw(call, state, logits)
            if finished:
                yield finished
            if not call.keeps_last:
                state = state.kept(staying)

    def _draw(self, call: SamplingCall, state: DecodeState, logits: Tensor) -> tuple[dict[int, Completion], list[int]]:
        """Add a token to every row; return the rows that are finished, and the indices of the others."""
        scores, params = None, call.params
        if self.logits_processor is not None:
            scores = logits / params.temperature if params.temperature > 0 else logits
            scores = self.logits_processor(state.token_ids[:, : state.width], scores)
        status = state.draw(logits, params, scores)[1].tolist()  # The only wait for the device in a step.
        fault = state.fault(status, self.policy_version)
        if fault is not None:
            raise RuntimeError(fault)
        has_ended = state.ended(status, params.max_completion_length)
        leaving = [i for i, ended in enumerate(has_ended) if ended]
        finished = {state.rows[i]: state.completion(i, status[i] == STOPPED) for i in leaving}
        return finished, [i for i, ended in enumerate(has_ended) if not ended]


def require_inputs(
    model: nn.Module | None, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]
) -> nn.Module:
    """Return `model`, or raise the error of the call."""
    if model is None:
        raise RuntimeError("the backend has no model; pass one to it or call sync(model, version) first")
    require_rows(prompt_ids, params, keys)
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
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block, and restore every module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def last_logits_only(model: nn.Module) -> dict[str, int]:
    """Return the keywords with which a model computes the logits of the last column only; none if it has no such."""
    causal_lm = model.get_base_model() if isinstance(model, PeftModel) else model
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(causal_lm.forward).parameters else {}
