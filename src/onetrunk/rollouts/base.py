"""The protocol of a rollout backend, and the settings of one call.

A backend takes and returns token ids only. It may sample in this process, in another one or on a server.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

from onetrunk.types import Rollout, RowKey
from onetrunk.utils.options import require_truncation

SampledRole = Literal["policy", "reference"]
# Which states at the cut come with the completions: those of all tokens, or of all but each row's last, which would
# take one more step. No sampler but LocalBackend has them.
KeptStates = Literal["all", "all but last"]
# Seconds between two polls of a thread that waits for a rollout.
POLL_S = 0.2

# In a thread that samples ahead of the updates: `sampler`, which may be closed.
_thread = threading.local()


class Closed(Exception):
    """The run is over: nobody will take what is being sampled."""


def mark_thread(sampler: Any) -> None:
    """Note that this thread samples ahead of the updates for a sampler with `is_closed`; None: it does not."""
    _thread.sampler = sampler


def marker() -> Callable[[], None]:
    """Return what makes another thread count as this one in `samples_ahead`; to be called there."""
    return partial(mark_thread, getattr(_thread, "sampler", None))


def samples_ahead() -> bool:
    """Return whether this thread samples ahead of the updates; raise Closed if nobody will take what it samples."""
    sampler = getattr(_thread, "sampler", None)
    if sampler is not None and sampler.is_closed:
        raise Closed
    return sampler is not None


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one `generate` call, the same for every row.

    With `top_k` or `top_p` a token is drawn from a part of the vocabulary: its probability is p/S, where S is what the
    part has of the whole, and that is the logprob which a backend reports. As in vLLM and transformers, both apply
    after temperature, first `top_k`; tokens that are as probable as the last one of `top_k` stay too.

    Args:
        max_completion_length: most tokens to sample, the stop token included; at least 1.
        temperature: divides the logits; 0 means greedy decoding.
        stop_token_ids: a completion ends with the first of these; empty: only the length ends it.
        pad_token_id: pads shorter prompts on the left; may be one of `stop_token_ids`.
        top_p: draw from the fewest, most probable tokens that have at least this probability together; 1: from all.
        top_k: draw from the k most probable tokens; 0: from all. Greedy decoding needs neither and ignores both.
        max_turn_length: most tokens of one turn of an episode, which continues after it; None: max_completion_length.
        max_context_length: most tokens that a turn and what it reads have together, if contexts are compacted.

    Raises:
        ValueError: a value is outside its range.
    """

    max_completion_length: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    top_p: float = 1.0
    top_k: int = 0
    max_turn_length: int | None = None
    max_context_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_completion_length", "max_turn_length", "max_context_length"):
            most = getattr(self, name)
            if most is not None and most < 1:
                raise ValueError(f"{name} is {most}; set it to 1 token or more")
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise ValueError(
                f"temperature is {self.temperature}; set it to a finite number above 0, or to 0 for greedy decoding"
            )
        if not isinstance(self.stop_token_ids, tuple):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r}; give a tuple of token ids, such as (2,)")
        if min(self.stop_token_ids, default=0) < 0:
            raise ValueError(f"stop_token_ids is {self.stop_token_ids}; token ids are 0 or more")
        if self.pad_token_id < 0:
            raise ValueError(
                f"pad_token_id is {self.pad_token_id}; token ids are 0 or more (the end-of-sequence id serves as well)"
            )
        require_truncation(self.top_p, self.top_k)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def identity(self) -> dict[str, Any]:
        """Return the settings for the key of a kept completion, those of episodes not among them.

        `top_p` and `top_k` only where tokens are excluded.
        """
        of_episodes = ("max_turn_length", "max_context_length")
        left_out = of_episodes if self.truncates else (*of_episodes, "top_p", "top_k")
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def longest_row(longest_prompt: int, settings: Any) -> int:
    """Return the most tokens that the model reads at once: a prompt and its completion, or a context.

    Args:
        settings: SamplingParams or PPOConfig, with max_completion_length and max_context_length.
    """
    row, context = longest_prompt + settings.max_completion_length, settings.max_context_length
    return row if context is None else min(row, max(context, longest_prompt + 1))


@runtime_checkable
class RolloutBackend(Protocol):
    """Anything with `generate` and `sync`. `isinstance` checks that the two exist, not their arguments.

    A backend may also have `has_own_weights` (it rounds differently from the trainer, so samples are weighted),
    `is_collective` (no process may give up a call alone) and `metrics()`, which the trainer logs.

    A backend of your own is a plain class. This one always returns the same tokens, as a fake in a test would:

        >>> import torch
        >>> class CannedBackend:
        ...     def __init__(self, completion):
        ...         self.completion, self.version = completion, 0
        ...
        ...     def sync(self, model, version):
        ...         self.version = version  # a server would receive the adapter of `model` here
        ...
        ...     def generate(self, prompt_ids, params, keys):
        ...         completion = self.completion[: params.max_completion_length]
        ...         return Rollout(
        ...             prompt_ids=prompt_ids,
        ...             completion_ids=[completion for _ in prompt_ids],
        ...             sampler_logprobs=[torch.zeros(len(completion)) for _ in prompt_ids],
        ...             stopped=[completion[-1] in params.stop_token_ids for _ in prompt_ids],
        ...             policy_version=self.version,
        ...         )
        >>> backend = CannedBackend([5, 7, 2])
        >>> isinstance(backend, RolloutBackend)
        True
        >>> backend.sync(model=None, version=4)
        >>> params = SamplingParams(max_completion_length=8, stop_token_ids=(2,))
        >>> rollout = backend.generate([[1, 3]], params, keys=[(0, 0, 0)])
        >>> rollout.completion_ids, rollout.stopped, rollout.policy_version
        ([[5, 7, 2]], [True], 4)
    """

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        """Return one completion per prompt, in the order of the prompts.

        Args:
            prompt_ids: n lists of token ids, none empty.
            params: length, temperature and stop tokens of this call.
            keys: n tuples of non-negative integers, (seed, iteration, row). All randomness of a row derives from its
                key, so its completion does not depend on the other rows. A backend that cannot promise this (a server
                with its own generator) says so in its docstring.

        Returns:
            n rows, with `policy_version` as of the last `sync`.
        """
        ...

    def sync(self, model: nn.Module, version: int) -> None:
        """Take the policy's current weights; called after every change of the policy, before `generate`.

        Args:
            model: the policy, unwrapped, with the adapter to sample from active.
            version: number of optimizer steps so far.
        """
        ...


@runtime_checkable
class VersionedBackend(RolloutBackend, Protocol):
    """A RolloutBackend with weights of its own, which samples from any version that it still holds.

    `sync` publishes a version and keeps the earlier ones that `generate_as` may still be asked for: those of calls
    that run, and the `PPOConfig.versions_in_use` latest. `generate` samples from the latest version.

    The trainer calls `sync` in the main thread of every process, always with the policy active. It may call
    `generate_as` in several threads at once, also while `sync` runs. So an evaluation never samples from another
    policy than its own, and a rollout that runs meanwhile keeps its version.
    """

    def generate_as(
        self,
        role: SampledRole,
        version: int,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
    ) -> Rollout:
        """Return one completion per prompt, as `generate` does, from a version that was published.

        Args:
            role: "policy"; or "reference", the weights that training started from, which are in every version.
            version: the number that was passed to `sync`.
            prompt_ids, params, keys: the arguments of `generate`.

        Returns:
            n rows, with `policy_version` equal to `version`.

        Raises:
            ValueError, RuntimeError: the version is not there.
        """
        ...


@runtime_checkable
class ServedBackend(RolloutBackend, Protocol):
    """A RolloutBackend of vLLM, which is checked before and after the model is loaded."""

    def check(self) -> None:
        """Check what needs no model. ValueError or RuntimeError: what is missing, and what to set instead."""
        ...

    def check_policy(self, model: nn.Module, longest_row: int = 0) -> None:
        """Check that the policy can be sampled from, with rows of `longest_row` tokens."""
        ...
