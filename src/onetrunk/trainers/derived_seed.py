"""Seeds derived from where a run stands, never drawn: a resumed run needs no history. Knows integers."""

from __future__ import annotations

import numpy as np
from transformers import set_seed

# Which of a run's random streams a seed belongs to; others are in prompt_order.py and sampling.py.
MINIBATCH_STREAM = 2**32 - 3
ROLLOUT_STREAM = 2**32 - 5
DEAL_STREAM = 2**32 - 6


def derived_seed(*place: int) -> int:
    """Return a seed of 63 bits for a place: (seed, stream, iteration, ...), non-negative integers."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> 1)


def seed_generators(*place: int) -> None:
    """Seed the global generators of Python, numpy and torch for a place."""
    set_seed(derived_seed(*place) % 2**32)
