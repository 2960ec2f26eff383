"""All streams of random numbers: their names, and how their numbers are derived from a seed.

No numbers come from one running generator, so a resumed run needs no history. Each draw is derived from words,
integers from 0 to 2**32 - 1. Two draws are independent if their words differ in more than trailing zeros among the
first four.

| stream | words |
|---|---|
| completions in training | seed, iteration, row |
| turn k of an episode, k > 0 | the words of its row, k |
| an environment of an episode | the words of its row, ENVIRONMENT_STREAM |
| completions of held-out prompts (evaluation, monitor) | seed, EVALUATION_STREAM, row |
| order of the prompts, or of the blocks of sharded rows | data_seed or seed, PROMPTS_STREAM, pass |
| order of the sharded rows in a window of blocks | data_seed or seed, WINDOWS_STREAM, pass, window |
| which rows share a minibatch | seed, DEAL_STREAM, iteration |
| order of the minibatches | seed, MINIBATCH_STREAM, iteration, epoch |
| generators of Python, numpy and torch, which reward functions may use | seed, ROLLOUT_STREAM, iteration, process |
| the same in an evaluation | seed, ROLLOUT_STREAM, EVALUATION_STREAM, process |
| tokens that the value head is fitted to | seed, VALUE_STREAM, iteration |
| Python's generator from a checkpoint on | seed, SAVE_STREAM, step, process |
| completions of `prefs`, reference completions | seed, prompt, prompt, index |
| which pairs, and their order | seed, prompt, prompt, 0, PAIRING_STREAM |
| principles of revisions | seed, prompt, prompt, index, PRINCIPLE_STREAM |

The two words of a prompt are 64 bits of its hash. New weights and the split into training and held-out rows use the
seed itself with other generators. Add a new stream here and in `tests/utils/test_randomness.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import set_seed

from onetrunk.utils.options import SEED_LIMIT

# The second word, instead of an iteration: no rollout has such a number.
EVALUATION_STREAM = 2**32 - 1
PROMPTS_STREAM = 2**32 - 2
MINIBATCH_STREAM = 2**32 - 3
ROLLOUT_STREAM = 2**32 - 5
DEAL_STREAM = 2**32 - 6
WINDOWS_STREAM = 2**32 - 7
SAVE_STREAM = 2**32 - 8
VALUE_STREAM = 2**32 - 9
ENVIRONMENT_STREAM = 2**32 - 10

# The fifth word; completions have four.
PAIRING_STREAM = 1
PRINCIPLE_STREAM = 2


def generator_of(words: Sequence[int]) -> np.random.Generator:
    """Return a generator whose numbers depend only on the words."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))


def derived_seed(*words: int) -> int:
    """Return a seed of 63 bits derived from words, for generators that take one integer."""
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def seed_generators(*words: int) -> None:
    """Seed the global generators of Python, numpy and torch with a seed derived from words."""
    set_seed(derived_seed(*words) % SEED_LIMIT)
