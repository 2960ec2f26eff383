"""Reward models as reward functions: a model of its own (`ModelReward`), or an adapter on the trunk (`TrunkReward`).

How prompt and completion become token ids, and token ids become scores, is in `models/reward_model.py`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.data.rows import variables_of
from onetrunk.models.loading import is_same_source, load_config, read_tokenizer, scorer_fingerprint, tensors_digest
from onetrunk.models.reward_model import (
    READS_END,
    ScoreAdapter,
    adapter_tokenizer,
    check_scorer,
    encode_rows,
    is_adapter_name,
    length_limit,
    load_adapter_scorer,
    load_scorer,
    read_score_adapter,
    reads_end_token,
    score_token_ids,
    scorer_source,
)
from onetrunk.rewards.reward import BuiltInReward, Completion
from onetrunk.rewards.specs import Policy
from onetrunk.types import Prompt
from onetrunk.utils.files import digest

logger = logging.getLogger(__name__)

# Two tokenizers count as the same if they agree on these: case, digits, spaces, line ends, other scripts, symbols.
SAMPLE_TEXTS = (
    "The CAT sat there, 1,234 times!",
    "  two spaces\n\n\tand a tab ",
    "na\u00efve \u2013 \u6771\u4eac \U0001f642",
    "{'a': [1.5]}",
)
# Keys of an adapter's config that do not change what it computes.
PASSING_IN_ADAPTERS = ("base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping")


class ModelReward(BuiltInReward):
    """Scores of a sequence-classification model with one label, with its own tokenizer and chat template.

    Plain prompts: prompt + completion, with the tokenizer's own special tokens. Conversations: the messages of both
    through the model's chat template. Texts that are too long lose their beginning, never the end of the completion.
    A completion that was cut off (False in `completion_stopped`) is read without an end token.

    Args:
        model_or_path: a model, a PeftModel of one, or the path or Hub name of one (see `load_scorer`).
        tokenizer: the model's own; None: the one next to the model.
        max_length: tokens of prompt and completion; None: what model and tokenizer allow.
        batch_size: texts per forward.
        device: None leaves the model where it is.
        name: the name in metrics; None: the last part of the path.

    Raises:
        ValueError: the model is not a scalar reward model, or a setting cannot work.
    """

    runs_here = True

    def __init__(
        self,
        model_or_path: PreTrainedModel | PeftModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_length: int | None = None,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        name: str | None = None,
    ) -> None:
        if batch_size < 1 or (max_length is not None and max_length < 1):
            raise ValueError(f"batch_size {batch_size} and max_length {max_length} must be at least 1")
        if isinstance(model_or_path, PeftModel):
            # Its layers carry the adapter, which reads its score at the end token.
            model_or_path = model_or_path.get_base_model()
            model_or_path.config.update({READS_END: True})
        is_model = isinstance(model_or_path, PreTrainedModel)
        source = model_or_path.name_or_path if is_model else scorer_source(model_or_path)
        if tokenizer is None and not source:
            raise ValueError("a reward model that was not loaded from a path needs its tokenizer; give tokenizer=...")
        # The tokenizer first: an error appears before the weights are loaded.
        self.tokenizer = tokenizer or read_tokenizer(str(source), "tokenizer of the reward model")
        if is_model:
            self.model = model_or_path if device is None else model_or_path.to(device)
        else:
            self.model = load_scorer(model_or_path, device=device)
        check_scorer(self.model)
        self.model.eval()
        limit = length_limit(self.model, self.tokenizer)
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(f"max_length {max_length} is more than the {limit} tokens that the reward model can read")
        self.max_length = limit if max_length is None else max_length
        self.batch_size = batch_size
        self.num_shortened = 0
        self.__name__ = name or Path(source).name or type(self.model).__name__

    def __call__(self, prompts: list[Prompt], completions: list[Completion], **columns: Any) -> list[float]:
        """Return n scores. Of the columns `completion_stopped` counts, and what the chat template reads."""
        if not prompts:
            return []
        settings = (self.max_length, reads_end_token(self.model), self.__name__)
        stopped = columns.get("completion_stopped")
        variables = variables_of(columns, len(prompts))
        rows, num_shortened = encode_rows(self.tokenizer, prompts, completions, *settings, stopped, variables)
        if num_shortened and not self.num_shortened:
            logger.warning(
                f"reward model {self.__name__}: {num_shortened} of {len(rows)} texts had more than max_length"
                f" {self.max_length} tokens and lost their beginning; later ones are only counted, in num_shortened"
            )
        self.num_shortened += num_shortened
        return score_token_ids(self.model, rows, self.batch_size).tolist()

    def content(self) -> str:
        tokenizer = self.tokenizer
        reads = [tokenizer(list(SAMPLE_TEXTS))["input_ids"], tokenizer.chat_template, tokenizer.pad_token_id]
        tokens = digest(reads)[:16]
        return f"{scorer_fingerprint(self.model)}, tokenizer sha256 {tokens}, max_length {self.max_length}"


class TrunkReward(BuiltInReward):
    """A reward adapter on the trunk. PPOTrainer computes its scores; this object only holds its place and weight.

    The adapter reads the token ids of the policy, chat template included, so it must have been trained with the
    policy's template. The score is read at the last token that is not its pad token.
    """

    runs_here = True
    is_on_trunk = True

    def __init__(self, adapter: ScoreAdapter):
        self.adapter = adapter
        self.__name__ = Path(adapter.name).name

    def __call__(self, **columns: Any) -> list[float]:
        """Raise a RuntimeError: there is nothing to score with outside the trunk."""
        raise RuntimeError("a reward adapter on the trunk is scored by the trunk, with the packs of a rollout")

    def content(self) -> str:
        adapter = self.adapter
        config = {name: value for name, value in adapter.config.to_dict().items() if name not in PASSING_IN_ADAPTERS}
        ordered = {name: sorted(value) if isinstance(value, set) else str(value) for name, value in config.items()}
        weights = tensors_digest({**adapter.weights, **{f"head.{key}": t for key, t in adapter.head.items()}})
        return f"adapter, sha256 {digest([ordered, weights, adapter.pad_token_id])[:16]}"


def named_model(name: str, policy: Policy) -> ModelReward | TrunkReward:
    """Return the reward model at `name`; an adapter of the policy's base is a branch of its trunk."""
    if is_adapter_name(name):
        return trunk_reward(name, policy)
    return ModelReward(name, policy.reward_tokenizer, device=policy.device)


def trunk_reward(name: str, policy: Policy) -> TrunkReward:
    """Load the sequence-classification adapter at `name`, a folder or a name on the Hub, for use on a policy's trunk.

    Raises:
        ValueError: it is not a scalar reward adapter, or it has another base model or another tokenizer.
        RuntimeError: its base model cannot be found.
    """
    adapter = read_score_adapter(name)
    if not is_same_source(adapter.base, policy.base):
        raise ValueError(
            f"reward adapter {name} was trained on the base model {adapter.base}, and the policy's is"
            f" {policy.base or 'without a name'}: it can't be a branch of this trunk; merge it into its base model and"
            " give that folder, which then runs as a separate model"
        )
    tokenizer = policy.reward_tokenizer or adapter_tokenizer(name)
    if tokenizer is None:
        config = load_config(adapter.base, adapter.config.revision)
        return TrunkReward(replace(adapter, pad_token_id=config.pad_token_id))
    difference = tokenizer_difference(tokenizer, policy.tokenizer)
    if difference is not None:
        raise ValueError(
            f"the tokenizer of reward adapter {name} is not the policy's ({difference}), whose tokens it would read;"
            " merge it into its base model and give that folder, which then runs with its own tokenizer"
        )
    if tokenizer.chat_template != policy.tokenizer.chat_template:
        logger.warning(
            f"reward adapter {name} has another chat template than the policy; it will read conversations in the"
            " policy's"
        )
    return TrunkReward(replace(adapter, pad_token_id=tokenizer.pad_token_id))


def tokenizer_difference(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """Return an example of what two tokenizers treat differently; None if vocabularies and sample texts agree."""
    tokens = sorted(set(one.get_vocab().items()) ^ set(other.get_vocab().items()))
    if tokens:
        return f"only one of them has the token {tokens[0][0]!r}"
    texts = [text for text in SAMPLE_TEXTS if one(text)["input_ids"] != other(text)["input_ids"]]
    return f"{texts[0]!r} differs" if texts else None


def load_reward(name: str | Path, *, device: torch.device | str | None = None, batch_size: int = 16) -> ModelReward:
    """Return the reward model at `name` with its own tokenizer; an adapter is loaded on a base model of its own.

    Args:
        name: folder or Hub name of a sequence-classification model with one label, or of an adapter of one.
        device: None: the CPU.
        batch_size: texts per forward.

    Raises:
        ValueError: the model or adapter has no trained score head.
        RuntimeError: nothing can be loaded from there.
    """
    name = str(name)
    if not is_adapter_name(name):
        return ModelReward(name, device=device, batch_size=batch_size)
    model, tokenizer = load_adapter_scorer(name, device=device)
    return ModelReward(model, tokenizer, name=Path(name).name, batch_size=batch_size)
