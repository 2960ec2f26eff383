"""What a reward model reads of a row: prompt and completion become one text in its own language, and token ids.

Knows prompts, completions and chat templates; no model, and nothing of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import has_file

from onetrunk.chat_template import apply_chat_template
from onetrunk.models.loading import read_tokenizer
from onetrunk.models.scorer import encode_texts
from onetrunk.types import Conversation, Message, Prompt

Completion = str | list[Message]


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    max_length: int | None,
    end_token: bool,
    name: str,
) -> tuple[list[list[int]], int]:
    """Return what a reward model reads of each row: n lists of token ids, and how many of them are shortened.

    Args:
        prompts: n texts or n conversations.
        completions: n texts, or n lists that end with an assistant message.
        max_length: tokens; None for no limit.
        end_token: True where its rows end with the end token (`encode_texts`).
        name: of the reward model, for errors.

    Raises:
        ValueError: conversations and a tokenizer without a chat template, or a text without tokens.
    """
    pairs = list(zip(prompts, completions, strict=True))
    conversational = bool(pairs) and not isinstance(prompts[0], str)
    texts = [_render(tokenizer, *pair, name) if conversational else pair[0] + pair[1] for pair in pairs]
    return encode_texts(tokenizer, texts, max_length, add_special_tokens=not conversational, end_token=end_token)


def adapter_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that lies beside a reward adapter, None where none does."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        has_own = (folder / "tokenizer_config.json").is_file()
    else:
        has_own = has_file(name, "tokenizer_config.json")
    source = str(folder) if folder.is_dir() else name
    return read_tokenizer(source, "tokenizer of the reward adapter") if has_own else None


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Conversation, completion: list[Message], name: str) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the prompts are conversations and the tokenizer of reward model {name!r} has no chat "
            "template; set tokenizer.chat_template to the one it was trained with"
        )
    messages = [*prompt, *completion]
    if prompt and prompt[-1]["role"] == "assistant":
        # The completion continues the prompt's last message: one message, not two in a row.
        opened = messages[len(prompt) - 1]
        joined = {**opened, "content": opened["content"] + messages[len(prompt)]["content"]}
        messages[len(prompt) - 1 : len(prompt) + 1] = [joined]
    return apply_chat_template(tokenizer, messages, tokenize=False)
