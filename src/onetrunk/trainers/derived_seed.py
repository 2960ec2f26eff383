"""Seeds the global generators for a place in a run. The names of all streams are in `onetrunk/randomness.py`."""

from __future__ import annotations

from transformers import set_seed

from onetrunk.randomness import derived_seed


def seed_generators(*place: int) -> None:
    """Seed the global generators of Python, numpy and torch for a place."""
    set_seed(derived_seed(*place) % 2**32)
