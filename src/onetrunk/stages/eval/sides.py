"""The sides of an evaluation: the model and its opponent, and the completions of each for the same prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from onetrunk.feedback.preferences import plain
from onetrunk.judges.base import Pair
from onetrunk.models.adapters import REFERENCE
from onetrunk.models.score_adapter import is_adapter_name
from onetrunk.models.sources import adapter_base, is_same_source
from onetrunk.ppo.sampling import ScoredRollout
from onetrunk.ppo.setup import base_name, policy_tokenizer
from onetrunk.rewards.base import Completion, RewardFunction, Scores
from onetrunk.rewards.combine import RewardSet
from onetrunk.rewards.model import TrunkReward, tokenizer_difference
from onetrunk.rewards.resolve import names_a_model
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.eval.arguments import EvalArguments
from onetrunk.types import Prompt

logger = logging.getLogger(__name__)

# Metrics and samples of one side.
Side = tuple[dict[str, float], ScoredRollout]


@dataclass(frozen=True)
class Answers:
    """The completions of one side, in the order of the prompts; n entries each.

    Args:
        prompts, completions: as the reward functions see them.
        completion_ids: token ids.
        stopped: False for a completion that was cut off at the length limit.
        columns: the dataset's other columns.
    """

    prompts: list[Prompt]
    completions: list[Completion]
    completion_ids: list[list[int]]
    stopped: list[bool]
    columns: dict[str, list[Any]]

    @property
    def texts(self) -> list[str]:
        """The completions as plain text."""
        return [plain(completion) for completion in self.completions]


def named_opponent(args: EvalArguments, model_args: ModelArguments, has_judge: bool) -> str | None:
    """Return the opponent: "reference", the name of a model, or None without one. Loads no weights.

    Raises:
        ValueError: a base model has no reference; the opponent is the model itself, or has another tokenizer.
        RuntimeError: there is no model at the opponent's name.
    """
    name, revision = model_args.model_name_or_path, model_args.model_revision
    has_reference = adapter_base(name, revision) is not None
    opponent = args.opponent or (REFERENCE if has_judge else None)
    if opponent == REFERENCE and not has_reference:
        value = "is reference" if args.opponent else "is not set"
        raise ValueError(
            f"opponent {value}, and {name} is a base model, which has no reference; set opponent to the model or the"
            " adapter to compare it with"
        )
    if opponent in (None, REFERENCE):
        return opponent
    if is_same_source(opponent, name):
        raise ValueError(f"opponent {opponent} is the model itself; name another one, or reference for an adapter")
    base = base_name(opponent, {})  # Raises if there is no model.
    tokenizer = policy_tokenizer(name, None, model_args.init_kwargs())
    check_tokenizers(name, tokenizer, opponent, policy_tokenizer(opponent, None, {}))
    on_trunk = [spec for spec in args.reward_funcs or [] if names_a_model(spec) and is_adapter_name(spec)]
    if on_trunk and not is_same_source(base, base_name(name, model_args.init_kwargs())):
        raise ValueError(
            f"reward adapter {on_trunk[0]} is a branch of the model's own trunk, and opponent {opponent} stands on"
            f" {base}; merge the adapter into its base and give that folder, or name an opponent on the same base"
        )
    return opponent


def check_tokenizers(
    name: str, tokenizer: PreTrainedTokenizerBase, opponent: str, other: PreTrainedTokenizerBase
) -> None:
    """Raise ValueError for an opponent with another tokenizer: limits in tokens would not mean the same for both."""
    difference = tokenizer_difference(tokenizer, other)
    if difference is not None:
        raise ValueError(
            f"the tokenizer of opponent {opponent} is not that of {name} ({difference}), so that max_completion_length"
            " would give them unequal room; name an opponent with the same tokenizer"
        )
    if tokenizer.chat_template != other.chat_template:
        logger.warning(
            "opponent %s has another chat template than %s; each is prompted with its own", Path(opponent).name, name
        )


def unscored(completions: list[Completion], **columns: Any) -> list[None]:
    """Give no score: takes the place of the reward functions if only a judge compares."""
    return [None] * len(completions)


def without_scores(metrics: dict[str, float], scored: ScoredRollout) -> Side:
    """Return metrics and samples of a side without the entries of `unscored`."""
    plain_metrics = {name: value for name, value in metrics.items() if not name.startswith(("score/", "reward/"))}
    return plain_metrics, replace(scored, scores=Scores(scored.scores.total, {}))


def reward_specs(rewards: RewardSet, specs: Sequence[str] | None) -> list[RewardFunction | str]:
    """Return the reward functions for a second model: the same ones, but a branch of the first trunk by its name."""
    names = specs or [""] * len(rewards.functions)
    return [
        spec if isinstance(function, TrunkReward) else function
        for function, spec in zip(rewards.functions, names, strict=True)
    ]


def gather_answers(scored: ScoredRollout, num_prompts: int, accelerator: Accelerator) -> Answers:
    """Return the completions of one side from all processes, each prompt once; every process must call it.

    Args:
        scored: this process's rows, distributed as in `evaluate_prompts`.
        num_prompts: number of rows of the dataset, without those that repeat to fill the last batch.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    columns = scored.batch.columns
    local_rows = [
        (
            rank + i * world,
            scored.batch.prompts[i],
            completion,
            list(scored.rollout.completion_ids[i]),
            bool(scored.rollout.stopped[i]),
            {name: values[i] for name, values in columns.items()},
        )
        for i, completion in enumerate(scored.completions)
    ]
    rows = sorted((row for row in gather_object(local_rows) if row[0] < num_prompts), key=lambda row: row[0])
    return Answers(
        prompts=[row[1] for row in rows],
        completions=[row[2] for row in rows],
        completion_ids=[row[3] for row in rows],
        stopped=[row[4] for row in rows],
        columns={name: [row[5][name] for row in rows] for name in columns},
    )


def pairs_of(policy: Answers, opponent: Answers) -> list[Pair]:
    """Return the two completions of every prompt, the policy's first; raises ValueError for different prompts."""
    if policy.prompts != opponent.prompts:
        raise ValueError(
            f"the opponent answered {len(opponent.prompts)} prompts and the model {len(policy.prompts)}, not all the"
            " same: their chat templates make some of them overlong for one alone; raise max_prompt_length, or set"
            " overlong_prompts to error"
        )
    columns = (policy.prompts, policy.texts, opponent.texts, policy.stopped, opponent.stopped)
    return [Pair(*entries) for entries in zip(*columns, strict=True)]
