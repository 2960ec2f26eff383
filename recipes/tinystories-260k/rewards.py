"""Rewards for short stories that a person can check by reading. Plain functions with TRL's signature."""

import re

# Words that are also verbs, such as fly, are left out.
ANIMALS = frozenset(
    "ant bee bird bunny butterfly cat chicken cow deer dog dolphin elephant fish fox frog giraffe goat hen horse"
    " kitten lamb lion lizard mouse owl parrot penguin pig pony puppy rabbit rat sheep snail snake spider squirrel"
    " tiger turtle whale wolf zebra".split()
)
ENOUGH = 3
WORD = re.compile(r"[a-z]+")


def animals(prompts, completions, completion_ids=None, **columns) -> list[float]:
    """Return how many different animals a story names, as a share of three; more than three do not count."""
    return [min(len(_singular(text) & ANIMALS), ENOUGH) / ENOUGH for text in completions]


def variety(prompts, completions, completion_ids=None, **columns) -> list[float]:
    """Return the share of different words: it falls if a story repeats itself or lists words over and over."""
    words = [WORD.findall(text.lower()) for text in completions]
    return [len(set(found)) / len(found) if found else 0.0 for found in words]


def _singular(text: str) -> set[str]:
    words = set(WORD.findall(text.lower()))
    return words | {word[:-1] for word in words if word.endswith("s")}
