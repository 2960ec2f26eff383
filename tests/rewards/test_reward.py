"""Tests of `onetrunk.rewards.reward`: the names of reward functions, and which are asynchronous."""

import functools

import onetrunk.rewards
from onetrunk.rewards import RewardSet
from onetrunk.rewards.reward import is_async, reward_name


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


class Named:
    name = "judge"

    def __call__(self, completions, **kwargs):
        return [0.0 for _ in completions]


class Unnamed:
    async def __call__(self, completions, **kwargs):
        return [0.0 for _ in completions]


def test_names_come_from_the_function_the_object_or_its_class_and_are_unique():
    assert reward_name(length) == "length"
    assert reward_name(functools.partial(functools.partial(length), scale=2)) == "length"
    assert reward_name(Named()) == "judge"
    assert reward_name(Unnamed()) == "Unnamed"
    assert reward_name(lambda **kwargs: []) == "lambda"

    def length_2(**kwargs):
        return []

    names = ["length", "length_2", "length_3", "length_4"]
    assert RewardSet([length, length_2, length, length]).names == names


def test_what_is_async_is_known_through_partials_and_objects():
    assert is_async(Unnamed()) and is_async(functools.partial(Unnamed())) and is_async(Unnamed().__call__)
    assert not is_async(length) and not is_async(Named())


def test_the_worked_example_of_the_package_runs_as_written():
    example = onetrunk.rewards.__doc__.split("\n\n")[2]
    assert example.startswith("    def ends_politely")
    scope = {}
    exec("\n".join(line[4:] for line in example.splitlines()), scope)
    answers = ["thank you", "no", "thank you"]
    messages = [[{"role": "assistant", "content": text}] for text in answers]
    rewards = RewardSet(scope["ends_politely"], weights=[0.5])
    scores = rewards.score(["p"] * 3, messages, [[1]] * 3, {"min_words": [3, 3, 0]})
    assert scores.total[:2].tolist() == [0.5, 0.0]
    assert scores.total.isfinite().tolist() == [True, True, False]
    assert scores.by_function["ends_politely"][:2].tolist() == [1.0, 0.0]
