"""Sampling on the policy itself, in this process: one decode loop over a key-value cache, token ids in and out.

Why not `generate` of transformers: it draws from one global random state, and carries finished rows to the end. Here a
row's randomness derives from its key alone, a finished row leaves the batch with its share of the cache, and one that
waits takes its place. turns.py has the loop; decoding.py has the draws, the rows and their cache.

The backend shares its weights with the trainer, so it serves the synchronous schedule only. A sharded base is gathered
once per call, so that each process runs as many forwards as its own rows need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import LogitsProcessorList

from onetrunk.models.speedups.merged import merged_policy, packed_weights
from onetrunk.parallel.sharding import gathered
from onetrunk.rollouts.base import KeptStates, SamplingParams, longest_row
from onetrunk.rollouts.decoding import SamplingCall, StateCapture, capturing, require_rows
from onetrunk.rollouts.episodes.rows import Answers, rollout_of_episodes
from onetrunk.rollouts.turns import NO_ANSWERS, DecodeLoop
from onetrunk.types import Rollout, RowKey


@dataclass(eq=False, repr=False)
class LocalBackend:
    """A `RolloutBackend` that samples from a causal language model in this process.

    A row's completion depends on its prompt, its key and the policy: not on the batch, its order or `max_rows`. (Float
    rounding differs between batch shapes by about 1e-6; it matters only if a draw falls that close to a boundary.)

    Args:
        model: a transformers causal LM or a PEFT model over one; may be left to `sync`.
        max_rows: most rows that decode at once; bounds the memory of the cache. None: all of them. As many again may
            keep their cache while they wait for an answer.
        logits_processor: applied to the float32 logits AFTER the temperature; its `input_ids` are the rows that still
            decode, padded on the left; they need not have equally many tokens. The logprobs are those after it, so a
            processor makes the sampler another policy than the one that trains: meant for evaluation and constraints.
        in_waves: continue the rows of episodes once all of them have their answers, so that batches, and with them
            the rounding of logprobs and states, do not depend on when answers come.
        progress: called as `progress(done_rows, total_rows, done_tokens)` whenever rows finish.
        poll: called before each token, and while all rows wait for answers; may raise to stop sampling.
    """

    model: nn.Module | None = None
    _: KW_ONLY
    max_rows: int | None = None
    logits_processor: LogitsProcessorList | None = None
    in_waves: bool = False
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
        keeps: KeptStates | None = None,
    ) -> Rollout:
        """Return one completion per prompt, in the order of the prompts.

        The model decodes in eval mode, without activation checkpointing; every module's mode is restored afterwards.

        Args:
            keys: tuples of equally many integers.
            keeps: states at the cut of the TrunkModel that samples, to be returned; None: none.

        Returns:
            n rows; `sampler_logprobs` are float32 on the CPU, after temperature (1 where it is 0), processors and
            truncation.
        """
        rollout = self.generate_turns(prompt_ids, params, keys, NO_ANSWERS, keeps=keeps)
        return replace(rollout, turn_ids=None)

    def generate_turns(
        self,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
        answers: Answers,
        *,
        keeps: KeptStates | None = None,
    ) -> Rollout:
        """Return one episode per prompt: `generate` with turns, and with the observations that `answers` gives.

        While a row waits for its answer, others decode in its place. Its cache is kept, so that of the observation
        only the new tokens run. The same tokens are sampled, more slowly, where rows start over: if the cache has
        layers whose rows cannot be put together, if a check shows that the model does not continue from a cache with
        several tokens, or if `max_rows` rows keep their cache already.

        Args:
            params: `max_completion_length` bounds the episode, observations included.
            keys: turn k > 0 of a row draws by (*key, k).
            answers: what follows a turn. The order in which answers come changes nothing.
            keeps: as in `generate`; observations have states as well.

        Returns:
            n rows with `turn_ids`. A row is not `stopped` if its observation left no room for a token.
        """
        model = require_inputs(self.model, prompt_ids, params, keys)
        width = max(map(len, prompt_ids), default=0) + params.max_completion_length
        capture = None if keeps is None else StateCapture((len(prompt_ids), width), keeps == "all")
        in_waves = self.in_waves and answers is not NO_ANSWERS
        call = SamplingCall(model, prompt_ids, params, keys, capture, last_logits_only(model), in_waves=in_waves)
        # A sharded base is whole in here, so rows may end at different steps on different processes.
        with gathered(model), torch.no_grad(), eval_mode(model), merged_policy(model), packed_weights(model):
            loop = DecodeLoop(call, answers, self.policy_version, self.max_rows, self.logits_processor, self.poll)
            # Last: the checks of merging and of the cache are forwards, which must not be captured.
            with capturing(capture, model):
                self._run(loop)
        states = None if capture is None else capture.states
        return replace(rollout_of_episodes(call.episodes, self.policy_version), states=states)

    def _run(self, loop: DecodeLoop) -> None:
        """Run a loop to its end, and report its progress."""
        done, num_tokens, episodes = 0, 0, loop.call.episodes
        for rows in loop.run():
            done += len(rows)
            num_tokens += sum(len(episodes[row].token_ids) for row in rows)
            if self.progress is not None:
                self.progress(done, len(episodes), num_tokens)


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
    if limit is not None and longest_row(longest, params) > limit:
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


def last_logits_only(model: nn.Module) -> dict[str, int | Tensor]:
    """Return the keywords with which a model computes the logits of the last column only; none if it has no such."""
    causal_lm = model.get_base_model() if isinstance(model, PeftModel) else model
    if "logits_to_keep" not in inspect.signature(causal_lm.forward).parameters:
        return {}
    weight = getattr(causal_lm.get_output_embeddings(), "weight", None)
    if weight is None or weight.device.type != "cpu" or weight.dtype == torch.float32:
        return {"logits_to_keep": 1}
    # In half precision on a CPU torch copies the head for each row of a strided column; an index copies the column.
    return {"logits_to_keep": torch.tensor([-1])}
