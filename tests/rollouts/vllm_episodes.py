"""PPO on episodes of several turns that vLLM samples, and what vLLM must have been asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM

from onetrunk.ppo.trainer import PPOTrainer
from tests.ppo.support import make_trainer
from tests.tiny import WORDS, tiny_tokenizer

# vLLM on a CPU caches whole blocks of so many tokens.
BLOCK = 128
# (ids of the prompt, ids of the completion, their turns) of an episode.
Played = tuple[list[int], list[int], list[int]]


def text(first: int, length: int) -> str:
    return " ".join(WORDS[(first + i) % len(WORDS)] for i in range(length))


class Story:
    """Two to four turns, each answered with half a block of words; pays for the word "cat" and its like."""

    def reset(self, *, seed=None, options=None):
        self.turn, self.turns = 0, 2 + seed % 3
        return "", {}

    def step(self, action):
        self.turn += 1
        reward = sum(map(action.split().count, ("cat", "dog", "river", "wind")))
        return " " + text(5 * self.turn, 60 + self.turn), reward, self.turn == self.turns, False, {}


def story_trainer(folder: Path, base: Path, played: list[Played], backend: Any = None, **settings: Any) -> PPOTrainer:
    """Return a trainer on `Story`, with prompts of about a block; it adds its episodes to `played`."""
    tokenizer = tiny_tokenizer()

    def keep(prompts, completion_ids, turn_ids, **kwargs):
        played.extend(zip(tokenizer(prompts)["input_ids"], completion_ids, turn_ids, strict=True))
        return [0.0] * len(prompts)

    stops = [tokenizer.convert_ids_to_tokens(i) for i in range(40, 64)]
    sizes = {"max_completion_length": 330, "rollout_batch_size": 6, "num_minibatches": 1, "check_memory": False}
    given = {"model": AutoModelForCausalLM.from_pretrained(base), "reward": keep, "stop_tokens": stops}
    given["dataset"] = Dataset.from_dict({"prompt": [text(i, BLOCK - 4 + i % 6) for i in range(18)]})
    made = partial(PPOTrainer, environment_factory=Story)
    return make_trainer(folder, trainer_class=made, rollout_backend=backend, **given, **sizes, **settings)


def turns_of(episode: Played) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the ids before each turn and those of the turn."""
    prompt, ids, turns = episode
    for turn in range(max(turns) + 1):
        start = turns.index(turn)
        yield prompt + ids[:start], ids[start : start + turns.count(turn)]


def cached_tokens(episode: Played) -> int:
    """Return how many tokens of its requests vLLM has in its cache: those of whole blocks of the turn before."""
    known = [len(context) + len(ids) - 1 for context, ids in turns_of(episode)]
    return sum(length // BLOCK * BLOCK for length in known[:-1])


def require_asked(asked: list[tuple[list[int], list[int]]], played: list[Played]) -> None:
    """Check that the requests were, id by id, what the episodes had before each turn, and the answers the turns."""
    assert sorted(asked) == sorted(turn for episode in played for turn in turns_of(episode))
    numbers = [max(turns) + 1 for _, _, turns in played]
    assert set(numbers) == {2, 3, 4} and sum(map(cached_tokens, played)) > BLOCK * len(played)
