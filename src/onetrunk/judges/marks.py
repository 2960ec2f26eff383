"""What a judge model reads as more than text: its tokenizer's control tokens, and what its chat template writes.

A completion must bring none of them along: spelled out, one would begin a turn of its own. They are read off the
tokenizer where it is known, else off what a server's chat template renders.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from transformers import PreTrainedTokenizerBase

from onetrunk.judges.base import Pair
from onetrunk.judges.template import SPECIAL_TOKENS, sanitized
from onetrunk.types import Message, Prompt

# Stand for texts in a rendered conversation; what is between two of them was written by the template.
PLACES = ("onetrunkfirstplace", "onetrunksecondplace", "onetrunkthirdplace", "onetrunkfourthplace")
BRACKETED = re.compile(r"[<\[]\S{1,64}?[>\]]")
# A longer line of a template is a sentence of a system prompt, and harmless.
LONGEST_MARK = 48
WORD_AND_SIGN = re.compile(r"\w\W|\W\w")


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

    def cleaned_pair(self, pair: Pair) -> Pair:
        """Return a pair whose texts are without marks."""
        return Pair(self.cleaned_prompt(pair.prompt), self.cleaned(pair.first), self.cleaned(pair.second))

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


class ShownMarks:
    """The marks that a server's chat template shows, where its tokenizer is not known; as Marks otherwise.

    Args:
        rendered: conversations of `turns_of_places` as the template renders them, with the names of their tokens; none
            where no server shows it.
    """

    def __init__(self, rendered: Iterable[tuple[str, Collection[str]]] = ()):
        found = {mark for text, tokens in rendered for mark in marks_in(text, tokens)}
        self.words = tuple(sorted(found, key=lambda word: (-len(word), word)))

    def cleaned_pair(self, pair: Pair) -> Pair:
        """Return the pair as it is: what the words are is all that is known, and the template takes them out."""
        return pair

    def cleaned_prompt(self, prompt: Prompt) -> Prompt:
        """Return the prompt as it is."""
        return prompt

    def cleaned(self, text: str) -> str:
        """Return the text as it is."""
        return text


def turns_of_places() -> tuple[list[Message], list[Message]]:
    """Return conversations whose texts are PLACES, without and with a system message."""
    user, reply, again, system = PLACES
    turns: list[Message] = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": again},
    ]
    return turns, [{"role": "system", "content": system}, *turns]


def marks_in(rendered: str, tokens: Collection[str] = ()) -> Iterator[str]:
    """Yield what a chat template wrote around PLACES: its lines, the tokens in them, and whatever is in brackets."""
    for part in re.split("|".join(PLACES), rendered):
        yield from BRACKETED.findall(part)
        yield from (found.group() for found in SPECIAL_TOKENS.finditer(part))
        # A role's bare name is a word like others; with a sign next to it, it is a mark.
        lines = [line.strip() for line in part.splitlines() if len(line.strip()) <= LONGEST_MARK]
        yield from filter(WORD_AND_SIGN.search, lines)
        yield from {token for token in tokens if WORD_AND_SIGN.search(token) and any(token in line for line in lines)}


def _template_marks(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    if not tokenizer.chat_template:
        return
    for messages in turns_of_places():
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:
            continue  # Some templates refuse system messages.
        yield from marks_in(text)
