"""A reward model as a reward function.

Knows prompts and completions. What is read of them is `models/scorer.py`; loading and scoring, `models/scorer.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.models.loading import read_tokenizer
from onetrunk.models.score_adapter import ScoreAdapter, read_score_adapter
from onetrunk.models.scorer import (
    adapter_tokenizer,
    check_scorer,
    encode_rows,
    length_limit,
    load_scorer,
    reads_end_token,
    score_token_ids,
    scorer_source,
)
from onetrunk.models.sources import is_same_source, load_config
from onetrunk.rewards.base import Completion
from onetrunk.types import Prompt

logger = logging.getLogger(__name__)


class ModelReward:
    """Scores of a sequence-classification model with one label, read with its own tokenizer and chat template.

    Plain prompts: prompt + completion, with the tokenizer's own special tokens. Conversations: the messages of both
    through the model's chat template. Texts that are too long lose their beginning, never the end of the completion.
    A completion that was cut off (False in `completion_stopped`) is read without an end token.

    Args:
        model_or_path: a model, or the path or Hub name of one (see `load_scorer`).
        tokenizer: the model's own, or where it lies; None takes the one beside the model.
        max_length: tokens of prompt and completion; None for what model and tokenizer allow.
        batch_size: texts of one forward.
        device: None leaves the model where it is.
        dtype: of the loaded weights; None for the checkpoint's own. A model that is given keeps its own.
        name: for metrics; None takes the last part of the path.
        revision: branch, tag or commit on the Hub, of model and tokenizer.

    Raises:
        ValueError: a model that is no scalar reward model, or a setting that cannot work.
    """

    def __init__(
        self,
        model_or_path: PreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
        *,
        max_length: int | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        name: str | None = None,
        revision: str | None = None,
    ) -> None:
        if batch_size < 1 or (max_length is not None and max_length < 1):
            raise ValueError(f"batch_size {batch_size} and max_length {max_length} must be at least 1")
        given = isinstance(model_or_path, PreTrainedModel)
        source = model_or_path.name_or_path if given else scorer_source(model_or_path)
        # Before the weights are loaded.
        self.tokenizer = _own_tokenizer(tokenizer, source, revision)
        if isinstance(model_or_path, PreTrainedModel):
            if dtype is not None:
                raise ValueError(
                    f"dtype {dtype} is for a model that is loaded here; convert the model before giving it"
                )
            self.model = model_or_path if device is None else model_or_path.to(device)
        else:
            self.model = load_scorer(model_or_path, revision=revision, device=device, dtype=dtype)
        check_scorer(self.model)
        self.model.eval()
        limit = length_limit(self.model, self.tokenizer)
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(f"max_length {max_length} is more than the {limit} tokens that the reward model can read")
        self.max_length = limit if max_length is None else max_length
        self.batch_size = batch_size
        self.num_shortened = 0
        self.__name__ = name or Path(source).name or type(self.model).__name__

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return n scores. Of the columns only `completion_stopped` is read, and no token id of the policy."""
        if not prompts:
            return []
        rows, num_shortened = encode_rows(
            self.tokenizer,
            prompts,
            completions,
            self.max_length,
            reads_end_token(self.model),
            self.__name__,
            columns.get("completion_stopped"),
        )
        self._count_shortened(num_shortened, len(rows))
        return score_token_ids(self.model, rows, self.batch_size).tolist()

    def _count_shortened(self, num_shortened: int, num_texts: int) -> None:
        if num_shortened and not self.num_shortened:
            logger.warning(
                "reward model %s: %d of %d texts had more than max_length %d tokens and lost their beginning; "
                "said once, counted on in num_shortened",
                self.__name__,
                num_shortened,
                num_texts,
                self.max_length,
            )
        self.num_shortened += num_shortened


def _own_tokenizer(
    tokenizer: PreTrainedTokenizerBase | str | Path | None, source: str, revision: str | None
) -> PreTrainedTokenizerBase:
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    if tokenizer is None and not source:
        raise ValueError("a reward model that was not loaded from a path needs its tokenizer; give tokenizer=...")
    name = str(source if tokenizer is None else tokenizer)
    return read_tokenizer(name, "tokenizer of the reward model", revision=revision)


# Case, digits, spaces, line ends, other scripts and what is no letter at all.
SAMPLE_TEXTS = (
    "The CAT sat there, 1,234 times!",
    "  two spaces\n\n\tand a tab ",
    "na\u00efve \u2013 \u6771\u4eac \U0001f642",
    "{'a': [1.5]}",
)


class TrunkReward:
    """The place of a reward adapter among the reward functions; PPOTrainer hands the scores in.

    It reads the tokens of prompt and completion as the policy has them, chat template and all, so it must have been
    trained on conversations in the policy's own template; the score is read at the last token that is not its pad
    token.

    Args:
        adapter: what was read of it.
    """

    def __init__(self, adapter: ScoreAdapter):
        self.adapter = adapter
        self.__name__ = Path(adapter.name).name

    def __call__(self, **columns: Any) -> list[float]:
        """Refuse: without the trunk there is nothing to score with.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a reward adapter on the trunk is scored by the trunk, with the packs of a rollout")


def trunk_reward(
    name: str,
    policy_base: str,
    policy_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TrunkReward:
    """Read the reward adapter at `name` for a trunk.

    Args:
        name: folder or Hub name of a sequence-classification adapter.
        policy_base: name of the trunk's base model.
        policy_tokenizer: makes the tokens that the adapter will read.
        tokenizer: the adapter's own; None: that in its folder, if there is one.

    Raises:
        ValueError: it is no scalar reward adapter, was trained on another base, or reads other tokens.
        RuntimeError: its base model is not there.
    """
    adapter = read_score_adapter(name)
    if not is_same_source(adapter.base, policy_base):
        raise ValueError(
            f"reward adapter {name} was trained on the base model {adapter.base}, and the policy's is"
            f" {policy_base or 'without a name'}: it can't be a branch of this trunk; merge it into its base model and"
            " give that folder, which then runs as a model of its own"
        )
    tokenizer = tokenizer or adapter_tokenizer(name)
    if tokenizer is None:
        pad_token_id = load_config(adapter.base).pad_token_id
    else:
        _check_tokens(name, tokenizer, policy_tokenizer)
        pad_token_id = tokenizer.pad_token_id
    return TrunkReward(ScoreAdapter(**vars(adapter) | {"pad_token_id": pad_token_id}))


def _check_tokens(name: str, own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    differing = sorted(set(own.get_vocab().items()) ^ set(policy.get_vocab().items()))
    others = [text for text in SAMPLE_TEXTS if own(text)["input_ids"] != policy(text)["input_ids"]]
    if differing or others:
        example = f"token {differing[0][0]!r} is in one of them alone" if differing else f"{others[0]!r} differs"
        raise ValueError(
            f"the tokenizer of reward adapter {name} is not the policy's ({example}), whose tokens it would read;"
            " merge it into its base model and give that folder, which then runs with a tokenizer of its own"
        )
    if own.chat_template != policy.chat_template:
        logger.warning(
            "reward adapter %s has another chat template than the policy, in whose it will read conversations", name
        )
