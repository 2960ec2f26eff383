"""A base model out of nothing: a byte-level BPE tokenizer trained on texts, and a small Llama with random weights.

For recipes and tests that must not download anything. Knows texts and folders; training the model is the SFT stage's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from onetrunk.files import require_output_dir

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
NUM_BYTES = 256


@dataclass(frozen=True)
class BaseShape:
    """The size of a base model.

    Args:
        vocab_size: most tokens: 256 bytes, the special tokens, and what is merged from the texts.
        hidden_size: width; a multiple of num_heads.
        num_layers: decoder layers.
        num_heads: attention heads.
        max_positions: longest prompt and completion together, tokens.
    """

    vocab_size: int = 512
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    max_positions: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        head_size, rest = divmod(self.hidden_size, self.num_heads)
        if rest or head_size % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} over {self.num_heads} heads must give an even whole number; set"
                f" hidden_size to {max(1, round(head_size / 2)) * 2 * self.num_heads}"
            )


def make_base(
    texts: Iterable[str],
    output_dir: str | Path,
    *,
    shape: BaseShape | None = None,
    chat_template: str | None = None,
    special_tokens: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a tokenizer trained on `texts` and a Llama with random weights into a folder; equal for equal arguments.

    Args:
        texts: what the tokenizer learns its merges from.
        output_dir: the folder, made where it is missing.
        shape: the size; None: 2 layers of width 64.
        chat_template: Jinja text, saved with the tokenizer.
        special_tokens: further tokens that are never split, those of the chat template for instance.
        seed: of the weights; the caller's random state is left as it was.

    Returns:
        The folder: a name for `from_pretrained`.

    Raises:
        ValueError: a vocabulary too small for the bytes and the special tokens, or no texts.
    """
    shape = shape or BaseShape()
    folder = require_output_dir(output_dir)
    tokenizer = train_tokenizer(texts, shape.vocab_size, special_tokens)
    tokenizer.chat_template = chat_template
    tokenizer.model_max_length = shape.max_positions
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_config(shape, tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer: every text can be encoded, and decodes to itself.

    Raises:
        ValueError: `vocab_size` leaves no room for a merge, or there is no text.
    """
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


def _config(shape: BaseShape, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    return LlamaConfig(
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
