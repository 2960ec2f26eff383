"""A chat model in small: a tokenizer of bytes with the template of a family that calls tools."""

from __future__ import annotations

import json
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
PAD, END = 0, 1
# Ids of a chat tokenizer.
CHAT_VOCAB = 256 + len(SPECIAL)


def chat_tokenizer(template: str = "qwen3") -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with one of the chat templates that TRL brings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate([*SPECIAL, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[END], pad_token=SPECIAL[PAD], clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [SPECIAL[2]]})
    tokenizer.chat_template = (Path(trl.__file__).parent / f"chat_templates/{template}.jinja").read_text()
    return tokenizer


def tool_call(name: str, **arguments: object) -> str:
    """Return how these families write a call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
