"""Text that a tool, an environment or a model wrote: control tokens in it are characters, not tokens.

`<|im_end|>` on a web page or in the middle of a completion must not end a turn or begin one, neither in an episode nor
in what a reward model reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

# Divides the control tokens in foreign text until it is encoded. A noncharacter; foreign text loses its own.
CUT = "\ufdd0"


class ForeignText:
    """Divides the control tokens of one tokenizer in foreign text, and encodes text that holds such divided tokens.

    Args:
        template: the chat template in use, of which the tokens that it writes count as control tokens besides the
            special ones, such as <think>; None counts only those that are special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None):
        self.tokenizer, self.template = tokenizer, template

    def divide(self, text: str) -> str:
        """Return a foreign text with its control tokens divided, to stand in a message that is rendered."""
        text = text.replace(CUT, "")  # Next to a token of the template it would divide that one.
        return self._controls[0].sub(lambda match: match[0][0] + CUT + match[0][1:], text)

    def divide_all(self, value: Any) -> Any:
        """Return messages, or a part of one, with each of their texts divided, names of arguments included."""
        if isinstance(value, str):
            return self.divide(value)
        if isinstance(value, dict):
            return {self.divide(key): self.divide_all(part) for key, part in value.items()}
        return [*map(self.divide_all, value)] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it; a divided one gives ids of its characters."""
        parts = text.split(CUT)
        if len(parts) == 1 or not self.tokenizer.is_fast:  # Others do not say where a token stands.
            return self.tokenizer(" ".join(parts), add_special_tokens=False, verbose=False)["input_ids"]
        text, cuts = "".join(parts), set(accumulate(map(len, parts[:-1])))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = []
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            is_divided = token in self._controls[1] and not cuts.isdisjoint(range(start + 1, end + 1))
            ids += self._spelled(text[start:end]) if is_divided else [token]
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as `encode` does: those without divided tokens in one call of the tokenizer."""
        whole = [text for text in texts if CUT not in text]
        rows = iter(self.tokenizer(whole, add_special_tokens=False, verbose=False)["input_ids"] if whole else [])
        return [self.encode(text) if CUT in text else next(rows) for text in texts]

    @cached_property
    def _controls(self) -> tuple[re.Pattern[str], frozenset[int]]:
        added = {i: t for i, t in self.tokenizer.added_tokens_decoder.items() if t.content.strip()}
        words = {i: t.content for i, t in added.items() if t.special or t.content in (self.template or "")}
        longest_first = sorted(words.values(), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)"), frozenset(words)

    def _spelled(self, word: str) -> list[int]:
        ids: list[int] = []
        for char in word:
            token = self.tokenizer.convert_tokens_to_ids(char)
            # By the vocabulary where possible: SentencePiece would put a space before each character.
            is_known = token is not None and token != self.tokenizer.unk_token_id
            ids += [token] if is_known else self.tokenizer(char, add_special_tokens=False)["input_ids"]
        return ids
