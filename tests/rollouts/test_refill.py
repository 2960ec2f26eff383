"""Rows that take the places of finished ones, and prompts that come more than once."""

import pytest
import torch

from onetrunk.rollouts import LocalBackend, decoding
from tests.rollouts.small import MANY_KEYS, PROMPTS, assert_same, generate, mixed_params, shapes_of, tiny

MANY = PROMPTS * 3


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "hybrid"])
def test_a_row_that_joins_others_in_mid_batch_has_the_same_completion(family):
    model = tiny(family)
    params = mixed_params(temperature=1.3)
    together = generate(model, params, MANY, MANY_KEYS)
    shapes = shapes_of(model)
    joined = generate(model, params, MANY, MANY_KEYS, max_rows=4)
    assert_same(joined, together)
    # Some forwards over prompts come between forwards over single tokens of several rows.
    kinds = ["prompts" if columns > 1 else "tokens" for _, columns, _ in shapes]
    assert kinds.index("tokens") < len(kinds) - 1 - kinds[::-1].index("prompts")
    assert max(rows for rows, _, _ in shapes) == 4


def test_columns_that_are_padding_in_every_row_are_dropped():
    model, params = tiny(), mixed_params(temperature=1.3)
    shapes = shapes_of(model)
    generate(model, params, MANY, MANY_KEYS, max_rows=2)
    # Each step adds a column. A row that joins has at most as many before it as one that was there has tokens.
    bound = max(map(len, MANY)) + 2 * params.max_completion_length
    assert max(width for _, _, width in shapes) < bound < len(shapes)


def test_a_cache_whose_rows_cannot_be_put_together_decodes_one_batch_after_another(monkeypatch):
    model = tiny()
    params = mixed_params(temperature=1.3)
    together = generate(model, params, MANY, MANY_KEYS)
    monkeypatch.setattr(decoding, "JOINABLE_LAYERS", ())
    shapes = shapes_of(model)
    assert_same(generate(model, params, MANY, MANY_KEYS, max_rows=4), together)
    starts = [i for i, (_, columns, _) in enumerate(shapes) if columns > 1]
    assert all(shapes[i - 1][0] <= 4 for i in starts) and len(starts) >= 3


def test_a_prompt_that_comes_several_times_runs_once():
    model = tiny()
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    params = mixed_params()
    alone = [LocalBackend(model).generate([p], params, [key]) for p, key in zip(prompts, MANY_KEYS, strict=True)]
    shapes = shapes_of(model)
    rollout = generate(model, params, prompts, MANY_KEYS)
    for row, other in enumerate(alone):
        assert rollout.completion_ids[row] == other.completion_ids[0]
        torch.testing.assert_close(rollout.sampler_logprobs[row], other.sampler_logprobs[0], atol=5e-5, rtol=1e-5)
    assert shapes[0][:2] == (len(PROMPTS), max(map(len, PROMPTS)))
    assert shapes[1][0] > len(PROMPTS)  # One row for each completion from its second token on.
