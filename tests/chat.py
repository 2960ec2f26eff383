"""A chat model in small: a tokenizer of bytes with the template of a family that calls tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from onetrunk.models.build import BaseShape, make_base

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


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


def tool_call(name: str, **arguments: object) -> str:
    """Return how these families write a call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def taught_base(
    folder: Path, tools: list[Callable], conversations: list[list[dict]], template: str = "qwen2_5"
) -> None:
    """Write a tiny Llama that has learned conversations by heart, and calls tools as they do, with its tokenizer."""
    names, chat = ("<|im_start|>", "<|im_end|>"), chat_tokenizer(template)
    shape = BaseShape(vocab_size=900, hidden_size=64, max_positions=1024)

    def rendered(tokenizer, **settings):
        return [tokenizer.apply_chat_template(c, tools=tools, **settings) for c in conversations]

    # A tokenizer of whole phrases keeps the rows short.
    texts = rendered(chat, tokenize=False)
    make_base(texts * 3, folder, shape=shape, chat_template=chat.chat_template, special_tokens=names)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.eos_token = names[1]
    tokenizer.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    rows = [torch.tensor([row["input_ids"]]) for row in rendered(tokenizer, return_dict=True)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(200):
        loss = sum(model(input_ids=row, labels=row).loss for row in rows) / len(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)


def calling(question: str, call: tuple[str, dict], result: str, answer: str) -> list[dict]:
    """Return a conversation in which one tool is called."""
    function = {"name": call[0], "arguments": call[1]}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": call[0], "content": result},
        {"role": "assistant", "content": answer},
    ]
