"""Streams of randomness: what real code draws in one never comes again in another."""

from itertools import combinations

import numpy as np
import pytest

from onetrunk.feedback.preferences import all_pairs
from onetrunk.feedback.sampling import PromptItem, Reviser, TextSampler
from onetrunk.feedback.shards import prompt_words
from onetrunk.judges.judge import Principle, prompt_key
from onetrunk.ppo.rollout import PromptOrder
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.decoding import row_uniforms
from onetrunk.utils import randomness
from onetrunk.utils.options import require_seed
from onetrunk.utils.randomness import (
    DEAL_STREAM,
    EVALUATION_STREAM,
    MINIBATCH_STREAM,
    ROLLOUT_STREAM,
    SAVE_STREAM,
    derived_seed,
)
from tests.fakes import CannedBackend
from tests.tiny import tiny_tokenizer

SEED, PROMPTS = 7, ["the cat", "a dog", "old house"]


class KeyRecorder(CannedBackend):
    """A backend that remembers the keys of the rows that it was asked for."""

    def __init__(self):
        super().__init__([[5, 1]])
        self.keys = []

    def generate(self, prompt_ids, params, keys):
        self.keys += keys
        return super().generate(prompt_ids, params, keys)


def words_drawn(monkeypatch, draw):
    """Return the words of every generator that `draw` makes."""
    found, original = [], np.random.SeedSequence

    def record(words):
        found.append(tuple(words))
        return original(words)

    with monkeypatch.context() as patch:
        patch.setattr(np.random, "SeedSequence", record)
        draw()
    return found


def test_no_two_streams_draw_the_same_numbers(monkeypatch):
    items = [PromptItem(prompt, prompt_key(prompt), [5]) for prompt in PROMPTS]
    backend = KeyRecorder()
    sampler = TextSampler(backend, tiny_tokenizer(), SamplingParams(4), {}, SEED, None)
    sampler.draw(items, 4)
    order = PromptOrder(8, 4, 2, order_seed=SEED, seed=SEED)
    training_keys = [key for i in range(6) for key in order.rows(i, range(8))[1]]
    reviser = Reviser(sampler, sampler, [Principle("warm"), Principle("short")], num_revisions=1)

    def pairs():
        for item in items:
            all_pairs(["a", "b", "c"], (SEED, *prompt_words(item.key)))

    draws = {
        "training": lambda: [row_uniforms(key, 1) for key in training_keys],
        "evaluation": lambda: [row_uniforms((SEED, EVALUATION_STREAM, row), 1) for row in range(8)],
        "prompts": lambda: [order.prompts(i) for i in range(6)],
        "deals": lambda: [derived_seed(SEED, DEAL_STREAM, i) for i in range(6)],
        "minibatches": lambda: [
            derived_seed(SEED, MINIBATCH_STREAM, i, epoch) for i in range(6) for epoch in range(4)
        ],
        "rollouts": lambda: [
            derived_seed(SEED, ROLLOUT_STREAM, i, rank) for i in (*range(6), EVALUATION_STREAM) for rank in range(4)
        ],
        "saves": lambda: [derived_seed(SEED, SAVE_STREAM, step, rank) for step in range(6) for rank in range(4)],
        "completions of prompts": lambda: [row_uniforms(key, 1) for key in backend.keys],
        "pairs": pairs,
        "principles": lambda: [reviser.plan(item, index) for item in items for index in range(4)],
    }
    streams = {}
    for name, draw in draws.items():
        words = words_drawn(monkeypatch, draw)
        assert words, name
        # What numpy makes of the words: (1, 2) and (1, 2, 0) are the same to it.
        streams[name] = {tuple(np.random.SeedSequence(w).generate_state(4)) for w in words}
        assert len(streams[name]) == len(set(words))
    for (name, states), (other, others) in combinations(streams.items(), 2):
        assert not states & others, (name, other)


def test_every_name_of_a_stream_is_another_number():
    names = {name: value for name, value in vars(randomness).items() if name.endswith("_STREAM")}
    assert len(names) >= 6 and len(set(names.values())) == len(names)


@pytest.mark.parametrize("value", [-1, 2**32, 1.5, True, "7"])
def test_a_seed_out_of_range_is_named_and_both_ends_are_taken(value):
    for taken in (0, 2**32 - 1, None):
        require_seed("seed", taken)
    with pytest.raises(ValueError, match="data_seed is .*; set a whole number from 0 to 4294967295"):
        require_seed("data_seed", value)
