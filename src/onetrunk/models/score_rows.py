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
# Shows where a rendered completion ends and its chat template goes on with an end token.
CUT_MARK = "<onetrunk:cut>"


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    max_length: int | None,
    end_token: bool,
    name: str,
    stopped: Sequence[bool] | None = None,
) -> tuple[list[list[int]], int]:
    """Return what a reward model reads of each row: n lists of token ids, and how many of them are shortened.

    A completion that was cut off at a length limit is read as it is, without an end token, so that its score is the
    one that a reward adapter on the policy's trunk gives.

    Args:
        prompts: n texts or n conversations.
        completions: n texts, or n lists that end with an assistant message.
        max_length: tokens; None for no limit.
        end_token: True where its rows end with the end token (`encode_texts`).
        name: of the reward model, for errors.
        stopped: n booleans, False for a completion that was cut off; None: no completion was cut off.

    Raises:
        ValueError: conversations and a tokenizer without a chat template, or a text without tokens.
    """
    stopped = [True] * len(prompts) if stopped is None else stopped
    rows = list(zip(prompts, completions, stopped, strict=True))
    conversational = bool(rows) and not isinstance(prompts[0], str)
    texts = [
        _render(tokenizer, prompt, completion, is_stopped, name) if conversational else prompt + completion
        for prompt, completion, is_stopped in rows
    ]
    return encode_texts(
        tokenizer, texts, max_length, add_special_tokens=not conversational, end_token=end_token, stopped=stopped
    )


def adapter_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that lies beside a reward adapter, None where none does."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        has_own = (folder / "tokenizer_config.json").is_file()
    else:
        has_own = has_file(name, "tokenizer_config.json")
    source = str(folder) if folder.is_dir() else name
    return read_tokenizer(source, "tokenizer of the reward adapter") if has_own else None


def _render(
    tokenizer: PreTrainedTokenizerBase, prompt: Conversation, completion: list[Message], is_stopped: bool, name: str
) -> str:
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
    if is_stopped:
        return apply_chat_template(tokenizer, messages, tokenize=False)
    # transformers' continue_final_message raises where a template rewrites the message (it moves the reasoning, say).
    messages[-1] = {**messages[-1], "content": messages[-1]["content"] + CUT_MARK}
    text, mark, _ = apply_chat_template(tokenizer, messages, tokenize=False).rpartition(CUT_MARK)
    if not mark:
        raise ValueError(
            f"the chat template of reward model {name!r} leaves out the end of the last message, so a completion that"
            " was cut off cannot be scored; set tokenizer.chat_template to one that keeps the whole message"
        )
    return text
