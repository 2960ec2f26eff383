"""Turns of conversations as token ids: which tools a turn calls, and the ids of the messages that answer it.

Templates and their parsers are those of transformers and TRL. The ids of an answer are the difference between two
renderings, so nothing that was sampled is encoded again. Text that a tool, an environment or the model wrote is
foreign: `<|im_end|>` in it is encoded as the characters that it has, so that no web page ends a turn or begins one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from onetrunk.data.foreign import CUT, ForeignText
from onetrunk.data.prompts import decode_completion
from onetrunk.data.rows import without_nulls
from onetrunk.types import Message
from onetrunk.utils.redaction import encodable


def with_observation(prompt: list[Message], observation: str) -> list[Message]:
    """Return a conversation with the observation of `reset` behind what the user said last."""
    place = max(i for i, message in enumerate(prompt) if message["role"] == "user")
    message = {**prompt[place], "content": prompt[place]["content"] + observation}
    return [*prompt[:place], message, *prompt[place + 1 :]]


@dataclass(eq=False)
class ChatTurns:
    """The tokenizer and chat template of episodes. It may be used in several threads.

    Args:
        template_kwargs: variables for the template.
        reads_control_tokens: whether control tokens in foreign text are encoded as such.
    """

    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    reads_control_tokens: bool = False
    # A fast tokenizer must not encode in two threads at once.
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def prepare(self, has_tools: bool) -> None:
        """Get the template and the parser of tool calls ready; ValueError for a template that does not serve."""
        tokenizer = self.tokenizer
        if not tokenizer.chat_template:
            raise ValueError(
                "tools and environments with tools answer conversations, and the tokenizer has no chat template; set"
                " tokenizer.chat_template (in a folder: chat_template.jinja), or give an environment with step, and"
                " prompts that are text"
            )
        if has_tools and not supports_tool_calling(tokenizer):
            raise ValueError(
                "the chat template does not show tool calls and their results to the model; set one that does, such as"
                " Qwen's, in tokenizer.chat_template (in a folder: chat_template.jinja), or give an environment with"
                " step, which needs no tools"
            )
        has_parser = any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema"))
        try:
            if has_tools and not has_parser:
                add_response_schema(tokenizer)
            if has_tools and not is_chat_template_prefix_preserving(tokenizer):
                self.template_kwargs = {"chat_template": get_training_chat_template(tokenizer), **self.template_kwargs}
        except ValueError as error:
            raise ValueError(
                f"TRL does not know how to train tool calls with this chat template: {error} Set"
                " tokenizer.response_template and a template that renders earlier messages always the same"
            ) from error
        self.ids_of([{"role": "tool", "name": "f", "content": "1"} if has_tools else {"role": "user", "content": "1"}])

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids of a prompt up to where the assistant begins."""
        with self._lock:
            return self._render(without_nulls(list(messages)), add_generation_prompt=True, **self.tools_of(tools))

    def tools_of(self, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the variables with which a template renders a prompt: its own, and the tools' schemas."""
        return {**self.template_kwargs, **({"tools": list(tools)} if tools else {})}

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a foreign text, without special tokens around it."""
        with self._lock:
            return self._foreign.encode(self.foreign(text))

    def foreign(self, text: str) -> str:
        """Return a foreign text to stand in a message that is rendered: its control tokens are characters."""
        return text.replace(CUT, "") if self.reads_control_tokens else self._foreign.divide(text)

    def foreign_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return foreign messages to be rendered, as `foreign` does texts."""
        return list(messages) if self.reads_control_tokens else self._foreign.divide_all(list(messages))

    @cached_property
    def _foreign(self) -> ForeignText:
        templates = f"{self.tokenizer.chat_template} {self.template_kwargs.get('chat_template')}"
        return ForeignText(self.tokenizer, templates)

    def text_of(self, token_ids: list[int], stopped: bool) -> str:
        """Return the text of a turn; of its stop token too, unless that is special, as in the whole episode."""
        end = token_ids[-1] if stopped else None
        is_special = end in self.tokenizer.all_special_ids
        with self._lock:
            return decode_completion(self.tokenizer, token_ids, stopped and is_special, "")

    def message_of(
        self, token_ids: list[int], stopped: bool, prefix: list[int], tools: Sequence[dict[str, Any]]
    ) -> Message:
        """Return a turn as a message, with `tool_calls` if it calls tools; a turn that cannot be read calls none."""
        with self._lock:
            if tools:
                try:
                    ids = token_ids[:-1] if stopped and token_ids[-1] != self.tokenizer.eos_token_id else token_ids
                    parsed = parse_response(self.tokenizer, ids, prefix=prefix, tools=list(tools))
                    # Escapes such as \\ud800 are no text.
                    return {"role": "assistant", **json.loads(encodable(json.dumps(parsed, ensure_ascii=False)))}
                except Exception:  # What a model writes may break any parser.
                    pass
            return {"role": "assistant", "content": decode_completion(self.tokenizer, token_ids, stopped, "")}

    def ids_of(self, answers: Sequence[Message], stop_ids: Sequence[int] = (), stopped: bool = True) -> list[int]:
        """Return the ids of foreign messages that answer a turn, and of where the assistant begins again.

        A turn that `stopped` ended at one of `stop_ids`, so what the template writes after that belongs to the answer;
        to a turn that was cut off, the token that ends it too.
        """
        answers = [{key: self.foreign(text) for key, text in message.items()} for message in answers]
        turn: Message = {"role": "assistant", "content": "ok"}
        if answers[0]["role"] == "tool":  # Some templates take the name from the call.
            call = {"name": answers[0]["name"], "arguments": {}}
            turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        before: list[Message] = [{"role": "user", "content": "hi"}, turn]
        with self._lock:
            start = self._render(before, **self.template_kwargs)
            full = self._render([*before, *answers], add_generation_prompt=True, **self.template_kwargs)
        ends = [place for place, token in enumerate(start) if token in stop_ids]
        start = start[: ends[-1] + stopped] if ends else start
        if full[: len(start)] != start:
            raise ValueError(
                "the chat template renders a message in another way once others follow it, so the ids of an answer"
                " are not known; set tokenizer.chat_template to one that does not, such as TRL's training templates"
            )
        return full[len(start) :]

    def _render(self, messages: Sequence[Message], **settings: Any) -> list[int]:
        return self._foreign.encode(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **settings))
