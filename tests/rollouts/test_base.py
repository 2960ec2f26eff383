"""Sampling settings and the backend protocol."""

import doctest

import pytest

from onetrunk.rollouts import LocalBackend, RolloutBackend, SamplingParams, base


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_completion_length": 0}, "max_completion_length is 0; set it to 1 token or more"),
        ({"temperature": -0.1}, "temperature is -0.1; set it to a finite number above 0, or to 0"),
        ({"stop_token_ids": [2]}, r"stop_token_ids is \[2\]; give a tuple"),
        ({"stop_token_ids": (2, -1)}, "token ids are 0 or more"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; set it above 0 and at most 1"),
        ({"top_k": -1}, "top_k is -1; set a whole number of tokens, where 0 leaves all of them in"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_the_value_and_the_fix(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**{"max_completion_length": 4, **settings})


def test_the_local_backend_satisfies_the_protocol_and_half_a_backend_does_not():
    class GenerateOnly:
        def generate(self, prompt_ids, params, keys): ...

    assert isinstance(LocalBackend(), RolloutBackend)
    assert not isinstance(GenerateOnly(), RolloutBackend)


def test_the_worked_example_of_an_own_backend_runs():
    result = doctest.testmod(base)
    assert result.attempted >= 7
    assert result.failed == 0
