"""Every stream of random numbers, by name, and how its numbers are derived from a seed and a place.

Nothing is drawn from one running generator: a resumed run needs no history. A draw is derived from words, integers
from 0 to 2**32 - 1. Two draws are independent where their words differ, trailing zeros among the first four aside.

| stream | words |
|---|---|
| completions in training | seed, iteration, row |
| completions of held-out prompts (evaluation, monitor) | seed, EVALUATION_STREAM, row |
| order of the prompts | data_seed or seed, PROMPTS_STREAM, pass |
| which rows share a minibatch | seed, DEAL_STREAM, iteration |
| order of the minibatches | seed, MINIBATCH_STREAM, iteration, epoch |
| global generators (reward functions may use them) | seed, ROLLOUT_STREAM, iteration, process |
| completions of `prefs`, reference completions | seed, prompt, prompt, index |
| which pairs, and their order | seed, prompt, prompt, 0, PAIRING_STREAM |
| principles of revisions | seed, prompt, prompt, index, PRINCIPLE_STREAM |

The two words of a prompt are 64 bits of its hash. New weights and the split into training and held-out rows come from
the plain seed, by other generators. A new stream gets its name here, and its place in
`tests/utils/test_randomness.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import set_seed

SEED_LIMIT = 2**32

# The second word, in place of an iteration: no rollout has such a number.
EVALUATION_STREAM = 2**32 - 1
PROMPTS_STREAM = 2**32 - 2
MINIBATCH_STREAM = 2**32 - 3
ROLLOUT_STREAM = 2**32 - 5
DEAL_STREAM = 2**32 - 6

# The fifth word, after the prompt's two and an index: completions have four.
PAIRING_STREAM = 1
PRINCIPLE_STREAM = 2


def generator_of(words: Sequence[int]) -> np.random.Generator:
    """Return a generator whose numbers depend on the words alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def derived_seed(*words: int) -> int:
    """Return a seed of 63 bits, for generators that take one integer."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def require_seed(name: str, value: int | None) -> None:
    """Check a seed among the settings.

    Args:
        name: of the setting.
        value: its value; None is allowed.

    Raises:
        ValueError: it is not a whole number from 0 to 2**32 - 1.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_whole and 0 <= value < SEED_LIMIT):
        raise ValueError(f"{name} is {value!r}; set a whole number from 0 to {SEED_LIMIT - 1}")


def seed_generators(*place: int) -> None:
    """Seed the global generators of Python, numpy and torch for a place."""
    set_seed(derived_seed(*place) % 2**32)
