"""What a judge model reads as more than text: its tokenizer's control tokens, and what its chat template writes.

A completion must bring none of them along: spelled out, one would begin a turn of its own. Knows a tokenizer; no
question and no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from onetrunk.judges.template import sanitized
from onetrunk.types import Message, Prompt

# Stand for texts in a rendered conversation; what is between two of them was written by the template.
PLACES = ("onetrunkfirstplace", "onetrunksecondplace", "onetrunkthirdplace", "onetrunkfourthplace")
BRACKETED = re.compile(r"[<\[]\S{1,64}?[>\]]")
# A longer line of a template is a sentence of a system prompt, and harmless.
LONGEST_MARK = 48


class Marks:
    """The marks of one tokenizer, and texts without them.

    Args:
        tokenizer: of the judge.

    Attributes:
        words: as they are written, in a fixed order.
        token_ids: ids of the control tokens; the unknown token is none, since any rare word may become it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        controls = {str(token) for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        template = set(_template_marks(tokenizer))
        self.words = tuple(sorted(controls | template, key=lambda word: (-len(word), word)))
        # What the template writes and the tokenizer has as one token is a control token by use.
        as_ids = (tokenizer.convert_tokens_to_ids(word) for word in self.words)
        self.token_ids = frozenset(i for i in as_ids if i is not None and i >= 0) - {tokenizer.unk_token_id}

    def cleaned(self, text: str) -> str:
        """Return a text without marks, also without those that appear only when the tokenizer normalises it."""
        before = None
        while before != text:
            before = text
            text = sanitized(text, self.words, max_characters=None)
            for start, end in self._spans(text):
                text = text[:start] + text[end:]
        return text

    def cleaned_prompt(self, prompt: Prompt) -> Prompt:
        """Return a prompt, text or conversation, without marks."""
        if isinstance(prompt, str):
            return self.cleaned(prompt)
        return [{"role": message["role"], "content": self.cleaned(message["content"])} for message in prompt]

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Return where control tokens stand in a text, the last one first."""
        if not self.tokenizer.is_fast or not text:
            return []
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [(start, end) for i, (start, end) in pairs if i in self.token_ids and end > start][::-1]


def _template_marks(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield what the chat template writes around messages: its lines, and whatever stands in brackets."""
    if not tokenizer.chat_template:
        return
    user, reply, again, system = PLACES
    turns: list[Message] = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": again},
    ]
    for messages in (turns, [{"role": "system", "content": system}, *turns]):
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:
            continue  # Some templates refuse system messages.
        for part in re.split("|".join(PLACES), text):
            yield from BRACKETED.findall(part)
            lines = [line.strip() for line in part.splitlines()]
            # A role's bare name is a word like others; with a sign beside it, it is a mark.
            yield from (line for line in lines if len(line) <= LONGEST_MARK and re.search(r"\w\W|\W\w", line))
