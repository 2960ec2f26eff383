"""A reward model before its training: a model with a new score head, or one made from a config, and its tokenizer.

Knows folders, configs and tokenizers. Knows no rows and no loss; models that score are `scorer.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from onetrunk.models.loading import load_weights, read_config, read_tokenizer
from onetrunk.models.scorer import not_scalar, score_layer
from onetrunk.models.sources import pinned_source

logger = logging.getLogger(__name__)

# Modules of transformers that report weights which are missing, left over, or on one device.
REPORTING = ("modeling_utils", "utils.loading_report", "distributed.tensor_parallel")


def load_with_new_head(name: str, **settings: Any) -> PreTrainedModel:
    """Load a model for training as a reward model; a language model gets a new score head, a reward model keeps its.

    The head is drawn from torch's global random state: seed it before.

    Args:
        name: folder or Hub name of a model.
        **settings: for `from_pretrained` (dtype, revision, quantization_config, ...).

    Raises:
        RuntimeError: nothing loadable there.
        ValueError: several labels, weights below the head that the checkpoint lacks, or remote code without a pinned
            commit.
    """
    source = pinned_source(settings.pop("revision", None), settings.pop("trust_remote_code", False))
    settings.pop("code_revision", None)
    config = read_config("model", name, **source)
    has_head = "ForSequenceClassification" in "".join(config.architectures or [])
    if has_head and config.num_labels != 1:
        raise not_scalar(name, config.num_labels)
    with quiet_load():
        model, loading = load_weights(
            AutoModelForSequenceClassification, "model", name, config, num_labels=1, **source, **settings
        )
    head = [n for n, module in model.named_modules() if module is score_layer(model)][0].split(".")[0]
    # BERT's relatives also lack a pooler, which trains with the head.
    absent = sorted(
        str(k) for k in loading["missing_keys"] if not str(k).startswith(head) and ".pooler." not in str(k)
    )
    if absent:
        raise ValueError(
            f"the checkpoint of {name} lacks {len(absent)} weights below the head, the first is {absent[0]}, which"
            " would be newly initialised; give a model that has them"
        )
    return model


@contextlib.contextmanager
def quiet_load() -> Iterator[None]:
    """Drop the report on weights that are missing or left over: whoever loads here judges them himself."""
    loggers = [logging.getLogger(f"transformers.{name}") for name in REPORTING]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def load_reward_tokenizer(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a reward model; without a padding token it pads with its end token.

    An encoder's tokenizer needs no end token, unlike a policy's.

    Raises:
        RuntimeError: nothing loadable at `name`.
        ValueError: neither a padding token nor an end token, or remote code without a pinned commit.
    """
    tokenizer = read_tokenizer(name, **pinned_source(revision, trust_remote_code))
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {name} has neither a padding token nor an end token, so rows of a batch can't be told"
                " from their padding; set pad_token in its tokenizer_config.json"
            )
        logger.info("the tokenizer %s has no padding token: padding with %r instead", name, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def scorer_from_config(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a reward model with random weights, drawn from torch's global random state: seed it before.

    Args:
        settings: `model_type` (llama, bert, ...) and fields of its config; the vocabulary and the special tokens are
            the tokenizer's.
        tokenizer: what its rows will be made with.

    Raises:
        ValueError: no or an unknown model_type, or fields that its config refuses.
    """
    fields = dict(settings)
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise ValueError(
            f"student_config has no model_type, only {', '.join(map(str, fields)) or 'nothing'}; write for instance"
            " {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4}"
        )
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    try:
        config = AutoConfig.for_model(
            model_type, **{"vocab_size": len(tokenizer), **tokens, "num_labels": 1, **fields}
        )
        return AutoModelForSequenceClassification.from_config(config)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"student_config {dict(settings)} makes no model: {reason}; repair it") from error
