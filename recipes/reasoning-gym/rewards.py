"""Rewards from reasoning-gym: the generator that made a question also scores the answer."""

import functools
import json

import reasoning_gym


@functools.cache
def generator(name):
    return reasoning_gym.create_dataset(name)


def right(completions, entry, **columns):
    """Return each score: 1 if right, a share if the text has the answer in it. `entry` is the generator's, as JSON."""
    texts = [completion[0]["content"].strip() for completion in completions]
    entries = [json.loads(text) for text in entry]
    names = [made["metadata"]["source_dataset"] for made in entries]
    return [generator(name).score_answer(text, made) for name, text, made in zip(names, texts, entries, strict=True)]
