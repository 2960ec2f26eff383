"""Models to be trained: a language model with a new score head, a random student, a random base with its tokenizer.

Reward and distillation training start from `load_with_new_head` or `scorer_from_config`. `make_base` serves recipes
and tests that must not download anything.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from onetrunk.models.base import repair_padding
from onetrunk.models.loading import load_weights, pinned_source, read_config, read_tokenizer
from onetrunk.models.scorer import check_scorer, score_layer
from onetrunk.utils.files import require_output_dir

# Modules of transformers that report weights which are missing, left over, or on one device.
REPORTING = ("modeling_utils", "utils.loading_report", "distributed.tensor_parallel")
PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
NUM_BYTES = 256


def load_with_new_head(name: str, **settings: Any) -> PreTrainedModel:
    """Load a model to train as a reward model; a language model gets a new score head, a reward model keeps its head.

    A new head is drawn from torch's global random state: seed it first. `settings` are for `from_pretrained`.

    Raises:
        RuntimeError: nothing loadable there.
        ValueError: several labels, weights below the head missing from the checkpoint, or remote code without a
            pinned commit.
    """
    source = pinned_source(settings.pop("revision", None), settings.pop("trust_remote_code", False))
    settings.pop("code_revision", None)
    config = read_config("model", name, **source)
    if "ForSequenceClassification" in "".join(config.architectures or []):
        check_scorer(config, name)
    with quiet_load():
        model, loading = load_weights(
            AutoModelForSequenceClassification, "model", name, num_labels=1, **source, **settings
        )
    layer = score_layer(model)
    head = next(n for n, module in model.named_modules() if module is layer).split(".")[0]
    # BERT's relatives also lack a pooler, which trains with the head.
    missing_keys = sorted(
        str(k) for k in loading["missing_keys"] if not str(k).startswith(head) and ".pooler." not in str(k)
    )
    if missing_keys:
        raise ValueError(
            f"the checkpoint of {name} lacks {len(missing_keys)} weights below the head, the first is"
            f" {missing_keys[0]}, which would be newly initialised; give a model that has them"
        )
    return model


@contextlib.contextmanager
def quiet_load() -> Iterator[None]:
    """Silence transformers' report on missing weights inside the block: the caller checks them itself."""
    levels = {name: logging.getLogger(f"transformers.{name}").level for name in REPORTING}
    for name in levels:
        logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(f"transformers.{name}").setLevel(level)


def load_reward_tokenizer(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a reward model; if it has no padding token, it pads with its end token."""
    tokenizer = read_tokenizer(name, **pinned_source(revision, trust_remote_code))
    return tokenizer if tokenizer.pad_token_id is not None else repair_padding(tokenizer)


def scorer_from_config(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a reward model with random weights, drawn from torch's global random state: seed it first.

    Args:
        settings: `model_type` (llama, bert, ...) and fields of its config.
        tokenizer: sets the vocabulary and the special tokens.

    Raises:
        ValueError: a missing or unknown model_type, or fields that its config rejects.
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


# --- a base out of nothing ---


@dataclass(frozen=True)
class BaseShape:
    """The size of a base model.

    Args:
        vocab_size: most tokens: 256 bytes, the special tokens, and the merges learned from the texts.
        hidden_size: width; an even multiple of num_heads.
        num_layers: decoder layers.
        num_heads: attention heads.
        max_positions: most tokens of a prompt with its completion.
    """

    vocab_size: int = 512
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    max_positions: int = 128


def make_base(
    texts: Iterable[str],
    output_dir: str | Path,
    *,
    shape: BaseShape | None = None,
    chat_template: str | None = None,
    special_tokens: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a tokenizer trained on `texts` and a Llama with random weights into a folder, and return the folder.

    Args:
        chat_template: Jinja text, saved with the tokenizer.
        special_tokens: further tokens that are never split, such as those of the chat template.
        seed: of the weights; the global random state stays unchanged.
    """
    shape = shape or BaseShape()
    folder = require_output_dir(output_dir)
    tokenizer = train_tokenizer(texts, shape.vocab_size, special_tokens)
    tokenizer.chat_template = chat_template
    tokenizer.model_max_length = shape.max_positions
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        # Keeps the logits of a narrow, untrained model near unit variance.
        initializer_range=shape.hidden_size**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer: every text can be encoded, and decodes to itself."""
    special = [PAD_TOKEN, END_TOKEN, *special_tokens]
    if vocab_size <= NUM_BYTES + len(special):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {NUM_BYTES} bytes and {len(special)} special tokens come first;"
            f" set it to {NUM_BYTES + len(special) + 1} or more"
        )
    texts = list(texts)
    if not any(texts):
        raise ValueError("no texts to train a tokenizer on; give some that look like the data")
    backend = Tokenizer(models.BPE())
    # Digits one by one: a small model learns to calculate only on the digits themselves.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=list(special_tokens),
        clean_up_tokenization_spaces=False,
    )
