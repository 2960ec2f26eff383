"""The records that are passed between rooms: frozen dataclasses that state the shape of every field.

Conventions: R rows of a pack; T padded tokens of a row (prompt, then completion, then padding); C padded tokens of a
completion; H hidden size. Rows are padded on the RIGHT, so a token has the same index padded or not. Column t of an
[R, C] tensor belongs to the t-th completion token: its logprob, and the value of the state that predicts it. Masks are
True where an entry counts; entries that do not count are 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Message = dict[str, Any]
Conversation = list[Message]
Prompt = str | Conversation
Completion = str | list[Message]
RowKey = tuple[int, ...]

T = TypeVar("T")


def as_text(completion: Completion) -> str:
    """Return a completion as a judge reads it: the texts of messages, joined by line ends."""
    return completion if isinstance(completion, str) else "\n".join(map(message_text, completion))


def message_text(message: Message) -> str:
    """Return the content of a message; of one without, its tool calls as JSON."""
    calls = message.get("tool_calls") or ()
    return message["content"] or "\n".join(json.dumps(call.get("function", call)) for call in calls)


def as_completion(prompt: Prompt, text: str) -> Completion:
    """Return a completion in the form of its prompt: text, or one message of the assistant."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def to_device(item: T, device: torch.device | str) -> T:
    """Return a copy of a dataclass of this module with all its tensors, also nested ones, on `device`."""
    from torch import Tensor  # Here: settings are checked before torch is imported, and judges import this module.

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=True)
        if isinstance(value, (Pack, Places, Experience)):
            return to_device(value, device)
        if isinstance(value, tuple):
            return tuple(move(entry) for entry in value)
        return value

    return replace(item, **{f.name: move(getattr(item, f.name)) for f in fields(item)})


@dataclass(frozen=True)
class Rollout:
    """Completions that one rank sampled under one policy version; n rows.

    Args:
        prompt_ids: n lists of token ids.
        completion_ids: n lists of token ids, none empty: everything after the prompt, in an episode with observations.
            Without `turn_ids` the first stop token, if there is one, is the last id.
        sampler_logprobs: n float32 tensors [len(completion)]: logprob of each token after temperature, as sampled; 0
            at observations.
        stopped: n booleans, True if the completion ended at a stop token rather than at a limit (of an episode: any).
        policy_version: number of optimizer steps that the sampling policy had made; of the oldest row, if they differ.
        states: [n, T, H] input of the first adapted layer at prompt and completion tokens, 0 at padding and possibly
            at the last token, which is not always needed; None if the sampler keeps no states.
        policy_versions: the policy version of each row, or of its first token, if they may differ, else None.
        turn_ids: n lists [len(completion)]: the number of the turn that each token belongs to, -1 at tokens that were
            given (observations); None: every completion is one turn.
        turn_rewards: n lists, the environment's reward of each turn (NaN: it broke; None: it gives none); None: no
            environment gives rewards.
        episodes: what is known of each row's episode (`rollouts.episodes.EpisodeOutcome`); None: no episodes.
        restarts: n lists of places in the completion at which a new context begins (compaction): given tokens, then
            sampled ones, none of which reads anything before them; None: the contexts of this run are not compacted.
    """

    prompt_ids: Sequence[list[int]]
    completion_ids: Sequence[list[int]]
    sampler_logprobs: Sequence[Tensor]
    stopped: Sequence[bool]
    policy_version: int = 0
    states: Tensor | None = None
    policy_versions: Sequence[int] | None = None
    turn_ids: Sequence[list[int]] | None = None
    turn_rewards: Sequence[list[float] | None] | None = None
    episodes: Sequence[Any] | None = None
    restarts: Sequence[list[int]] | None = None

    def __len__(self) -> int:
        return len(self.completion_ids)

    def contexts(self, row: int) -> list[range]:
        """Return where the contexts that compaction gave are in the completion of a row."""
        if self.restarts is None:
            return []
        turns = self.turn_ids[row]
        ends = (next(i for i in range(start, len(turns)) if turns[i] >= 0) for start in self.restarts[row])
        return [range(start, end) for start, end in zip(self.restarts[row], ends, strict=True)]

    @property
    def sampled_turns(self) -> list[tuple[int, list[int]]]:
        """The number of a row and the tokens that the policy sampled, of every turn of every row."""
        if self.turn_ids is None:
            return list(enumerate(self.completion_ids))
        both = zip(self.turn_ids, self.completion_ids, strict=True)
        rows = [groupby(zip(*row, strict=True), itemgetter(0)) for row in both]
        return [(row, [t for _, t in part]) for row, parts in enumerate(rows) for turn, part in parts if turn >= 0]


@dataclass(frozen=True)
class SampledText:
    """A completion as text.

    Args:
        text: without its stop token.
        stopped: False if it was cut off at the length limit.
    """

    text: str
    stopped: bool = True


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pack are, as indices into its R * T tokens; N real ones, K of them sampled.

    They are found once, where the pack is formed, because a GPU would have to be waited for.

    Args:
        real: [N] tokens that are not padding.
        read: [M] tokens that predict a completion token, and each row's last token.
        sampled: [K] completion tokens that the policy sampled, as indices into the R * C completion tokens.
        ended: those of `Pack.turn_ends`, in the same way.
    """

    real: Tensor
    read: Tensor
    sampled: Tensor
    ended: Tensor

    @classmethod
    def of(cls, pack: Pack) -> Places:
        """Return the places of a pack."""
        counted = pack.attention_mask.cumsum(1) * pack.attention_mask
        masks = (pack.attention_mask, counted >= pack.prompt_lengths[:, None], pack.completion_mask, pack.turn_ends)
        return cls(*(mask.flatten().nonzero().squeeze(1) for mask in masks))


@dataclass(frozen=True)
class Pack:
    """The rows of one forward pass: the unit of scoring, of the trunk cache and of training.

    Packs are formed once per rollout and keep their rows and width, so that old and new logprobs come from equal
    shapes. The model may take the rows out of the padding and run them in one sequence.

    Args:
        input_ids: [R, T] int64, prompt then completion, padded on the right.
        attention_mask: [R, T] int64, 1 at real tokens.
        prompt_lengths: [R] int64, tokens.
        completion_ids: [R, C] int64, padded on the right.
        completion_mask: [R, C] bool, True at completion tokens that the policy sampled, stop tokens included.
        minibatch: index of the minibatch of the rollout that all its rows belong to.
        turn_ids: [R, C] int64, number of the turn of each sampled token, -1 elsewhere; None: each row is one turn.
        places: where the tokens are; found if left out.
    """

    input_ids: Tensor
    attention_mask: Tensor
    prompt_lengths: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    minibatch: int = 0
    turn_ids: Tensor | None = None
    places: Places = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.places is None:
            object.__setattr__(self, "places", Places.of(self))

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def turns(self) -> Tensor:
        """[R, C] int64, number of the turn of each sampled token, -1 elsewhere; without `turn_ids` a row is turn 0."""
        return self.completion_mask.long() - 1 if self.turn_ids is None else self.turn_ids

    @property
    def turn_ends(self) -> Tensor:
        """[R, C] bool, True at the first observation token between two turns: its state is where a turn has ended."""
        mask = self.completion_mask
        # The first token of a completion is always sampled, so nothing comes around into column 0.
        return mask.roll(1, 1) & ~mask & (mask.flip(1).cumsum(1).flip(1) > 0)


@dataclass(frozen=True)
class Experience:
    """A pack with everything that the loss needs. Tensors are float32 [R, C] unless stated otherwise.

    Args:
        pack: the rows.
        loss_mask: [R, C] bool, True at the tokens that train (`completion_mask` without the rows that do not train).
        old_logprobs: logprobs of the policy at rollout time, from the training forward; with policy_objective dis
            those of the sampler.
        old_values: values at rollout time.
        advantages: whitened if the config says so.
        returns: targets of the value head.
        ref_logprobs: logprobs of the reference; None if no KL is used.
        weights: importance weights of the policy loss and of the KL in the loss, or None.
        states: [N, H] output of the frozen layers below the first adapted layer at the N tokens of the rows, row
            after row without padding; in the trunk's dtype, on any device; None if it is not kept.
        value_mask: [R, C] bool, True at the tokens whose values train; None: those of `loss_mask`.
        end_mask: [R, C] bool, True at ends of turns whose values train too; None: at none.
    """

    pack: Pack
    loss_mask: Tensor
    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None
    states: Tensor | None = None
    value_mask: Tensor | None = None
    end_mask: Tensor | None = None

    @property
    def value_tokens(self) -> Tensor:
        """[R, C] bool, True where values train."""
        tokens = self.loss_mask if self.value_mask is None else self.value_mask
        return tokens if self.end_mask is None else tokens | self.end_mask


class PackOutput(NamedTuple):
    """What the roles of the trunk computed for a pack; float32 [R, C] unless noted, 0 outside the completions.

    The fields of a role that did not run are None.

    Args:
        logprobs: of the completion tokens under the policy, after temperature.
        entropy: of the policy's distribution at each token, nats.
        values: of the state that predicts each token; at the ends of turns too, if they train.
        next_values: [R] value of the state after the last sampled token.
        ref_logprobs: of the completion tokens under the reference.
        scores: [R] of prompt and completion under the reward adapter.
        states: [N, H] output of the layers below the cut at the N tokens of the rows, row after row without padding;
            in the trunk's dtype.
        value_states: [K, H] states from which the head predicts the K `values`, row after row.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    next_values: Tensor | None = None
    ref_logprobs: Tensor | None = None
    scores: Tensor | None = None
    states: Tensor | None = None
    value_states: Tensor | None = None


@dataclass(frozen=True)
class LossCoefficients:
    """What the PPO loss takes from the settings; all but kl_weight have the names of PPOConfig.

    Args:
        policy_objective: "clip" (PPO) or "dis" (`ops.losses.direct_policy_loss`).
        epsilon: clip range of the ratio below 1.
        epsilon_high: clip range of the ratio above 1 (clip-higher, DAPO 2503.14476); epsilon where None.
        dual_clip: bound above 1 on the ratio at negative advantages; None: off.
        dis_epsilon_low, dis_epsilon_high: with dis, how far below and above 1 a ratio trains.
        entropy_coef: weight of the entropy bonus.
        kl_weight: weight of the KL to the reference in the loss; 0 leaves the KL out.
        kl_estimator: k1, k2 or k3.
        ratio_unit: token or turn: what has a ratio of its own.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    dual_clip: float | None = None
    entropy_coef: float = 0.0
    kl_weight: float = 0.0
    kl_estimator: str = "k1"
    ratio_unit: str = "token"
    policy_objective: str = "clip"
    dis_epsilon_low: float = 0.3
    dis_epsilon_high: float = 5.0


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step: the packs of this rank, and the token count that normalises the loss over all ranks.

    Args:
        experiences: at least one; a rank without tokens to train has one pack whose `loss_mask` is all False.
        num_tokens: number of tokens that train in this step, over all ranks (float, at least 1).
        trains_policy: False during value pretraining.
        is_empty_slot: True if the step must not change the weights (also after a `target_kl` stop).
    """

    experiences: tuple[Experience, ...]
    num_tokens: float
    trains_policy: bool = True
    is_empty_slot: bool = False
