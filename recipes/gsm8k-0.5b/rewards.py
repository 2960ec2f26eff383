"""Rewards for GSM8K that compare numbers. `correct` is what PPO maximises; the other two explain its rise.

If `correct` rises and `right_number` does not, the policy has only learned where to write the answer.
"""

from __future__ import annotations

import re
from fractions import Fraction

from onetrunk.types import as_text

NUMBER = r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+"
# "#### $1,080." is read as 1080. The last mark counts, or a completion could try many answers.
MARKED = re.compile(rf"####\s*\$?\s*({NUMBER})")
ANY = re.compile(NUMBER)


def correct(prompts, completions, completion_ids=None, answer=None, **columns) -> list[float]:
    """Return 1 where the number after the last `####` is the true answer, else 0."""
    return _equal(MARKED, completions, answer)


def right_number(prompts, completions, completion_ids=None, answer=None, **columns) -> list[float]:
    """Return 1 where the last number of the completion, marked or not, is the true answer, else 0."""
    return _equal(ANY, completions, answer)


def marked(prompts, completions, completion_ids=None, **columns) -> list[float]:
    """Return 1 where the completion has a number after `####`, else 0."""
    return [float(bool(MARKED.search(as_text(completion)))) for completion in completions]


def _equal(pattern: re.Pattern[str], completions, answers) -> list[float]:
    pairs = zip(completions, answers, strict=True)
    return [float(_last(pattern, as_text(completion)) == _value(true)) for completion, true in pairs]


def _last(pattern: re.Pattern[str], text: str) -> Fraction | None:
    found = pattern.findall(text)
    return _value(found[-1]) if found else None


def _value(number: str) -> Fraction:
    return Fraction(number.replace(",", ""))
