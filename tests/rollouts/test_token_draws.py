"""Which token is drawn: uniforms of a row, its cumulative distribution, and what top_p and top_k leave of it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onetrunk.rollouts import ColocatedBackend, LocalBackend, SamplingParams
from onetrunk.rollouts.decoding import draw, inverse_cdf, row_uniforms, truncation
from tests.ppo.support import base_model
from tests.rollouts.small import KEYS, MANY_KEYS, PROMPTS, generate, mixed_params, tiny
from tests.rollouts.stub_engine import install
from tests.rollouts.stub_vllm import StubVLLM
from tests.rollouts.test_colocate import policy as colocated_policy
from tests.rollouts.test_vllm import backend_of, policy
from tests.tiny import VOCAB_SIZE

LARGEST = float(np.nextafter(1.0, 0.0))
INF = math.inf


def test_hand_worked_draws_fall_into_the_bin_that_holds_the_uniform():
    # probabilities .2 .3 .5, cumulative .2 .5 1: below .2 -> 0, from there below .5 -> 1, the rest -> 2
    logprobs = torch.tensor([0.2, 0.3, 0.5]).log().expand(6, 3)
    uniforms = torch.tensor([0.0, 0.19, 0.21, 0.49, 0.51, LARGEST], dtype=torch.float64)
    assert inverse_cdf(logprobs, uniforms).tolist() == [0, 0, 1, 1, 2, 2]


def test_the_edges_of_the_unit_interval_skip_tokens_that_are_ruled_out():
    # probabilities 0 .5 0 .5 0: 0 -> the first possible token, just below 1 -> the last, .5 -> the upper of the two
    logprobs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]).log().expand(3, 5)
    uniforms = torch.tensor([0.0, 0.5, LARGEST], dtype=torch.float64)
    assert inverse_cdf(logprobs, uniforms).tolist() == [1, 3, 3]


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.one_of(st.floats(-200, 200, width=32), st.just(-INF)), min_size=1, max_size=20),
    uniform=st.floats(0, 1, exclude_max=True),
)
@example(logits=[-INF, 0.0], uniform=0.0)
@example(logits=[0.0, -INF], uniform=LARGEST)
@example(logits=[-INF, 3.0, -200.0, -INF], uniform=LARGEST)
@example(logits=[0.0] * 7 + [-INF], uniform=LARGEST)
def test_a_token_of_probability_zero_is_never_drawn(logits, uniform):
    if max(logits) == -INF:
        logits = [*logits, 0.0]
    logprobs = torch.tensor([logits], dtype=torch.float32).log_softmax(-1)
    token = inverse_cdf(logprobs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert logprobs[0, token].exp() > 0


def test_a_cumulative_sum_that_rounds_upwards_over_ruled_out_tokens_still_draws_a_possible_one(monkeypatch):
    """A parallel sum may round cdf[i] above cdf[i - 1] where token i has probability 0; here it does, by force."""
    sequential = torch.Tensor.cumsum

    def parallel(self, dim, dtype):
        return sequential(self, dim, dtype=dtype) + torch.arange(self.shape[-1], dtype=dtype) * 1e-3

    monkeypatch.setattr(torch.Tensor, "cumsum", parallel)
    logprobs = torch.tensor([[0.5, 0.0, 0.5, 0.0, 0.0]]).log()
    uniforms = torch.linspace(0, LARGEST, 101, dtype=torch.float64)
    assert inverse_cdf(logprobs.expand(101, 5), uniforms).tolist() == [0] * 50 + [2] * 51


def test_float32_probabilities_that_miss_one_leave_no_gap_at_the_end():
    logprobs = torch.full((1, 3), math.log(0.3))  # adds up to .9
    assert inverse_cdf(logprobs, torch.tensor([0.65], dtype=torch.float64)).item() == 1  # .65 * .9 = .585 < .6
    assert inverse_cdf(logprobs, torch.tensor([LARGEST], dtype=torch.float64)).item() == 2


def test_a_row_draws_its_own_uniforms_and_a_longer_completion_only_adds_to_them():
    first = row_uniforms((7, 3, 0), 16)
    assert first.tolist() == row_uniforms((7, 3, 0), 64)[:16].tolist()
    others = [row_uniforms(key, 16) for key in [(7, 3, 1), (7, 4, 0), (8, 3, 0), (3, 7, 0)]]
    assert not any(np.isin(first, other).any() for other in others)
    assert ((first >= 0) & (first < 1)).all()


# Probabilities of four tokens.
P = torch.tensor([[0.5, 0.25, 0.125, 0.125]])


def drawn(uniform, **settings):
    token, logprob = draw(P.log(), torch.tensor([uniform], dtype=torch.float64), truncation(params(**settings)))
    return int(token), math.exp(float(logprob))


def params(length=1, **settings):
    return SamplingParams(max_completion_length=length, **settings)


@pytest.mark.parametrize(
    ("settings", "uniform", "token", "probability"),
    [
        # 1/2 and 1/4 have at least .7 together: 2/3 and 1/3 of what is left.
        ({"top_p": 0.7}, 0.66, 0, 2 / 3),
        ({"top_p": 0.7}, 0.67, 1, 1 / 3),
        ({"top_p": 0.7}, 0.999, 1, 1 / 3),
        # One token has 1/2 alone, and always stays.
        ({"top_p": 0.4}, 0.999, 0, 1.0),
        ({"top_k": 2}, 0.67, 1, 1 / 3),
        # The third and the fourth are equally probable, so both stay.
        ({"top_k": 3}, 0.999, 3, 1 / 8),
        # First top_k: 2/3 and 1/3 are left, of which one has .6; top_p alone would leave two.
        ({"top_k": 2, "top_p": 0.6}, 0.999, 0, 1.0),
        ({"top_p": 0.6}, 0.999, 1, 1 / 3),
    ],
)
def test_truncated_draws_by_hand(settings, uniform, token, probability):
    assert drawn(uniform, **settings) == (token, pytest.approx(probability))


def test_more_tokens_than_there_are_exclude_none_and_change_no_bit():
    whole = generate(tiny(), mixed_params(temperature=1.3))
    assert truncation(mixed_params(temperature=1.3)) == () == truncation(params(temperature=0, top_k=1, top_p=0.1))
    assert truncation(params(top_p=1.0, top_k=0)) == ()
    same = generate(tiny(), mixed_params(temperature=1.3, top_k=VOCAB_SIZE))
    assert same.completion_ids == whole.completion_ids
    assert all(map(torch.equal, same.sampler_logprobs, whole.sampler_logprobs))


def kept_probabilities(logits, settings):
    """Return the probabilities [V] that are left, renormalised; 0 at the tokens that are left out."""
    probs = logits.double().softmax(-1)
    if settings.top_k:
        probs = probs * (probs >= probs.topk(settings.top_k).values[-1])
        probs = probs / probs.sum()
    ordered, order = probs.sort(descending=True)
    before = torch.zeros_like(probs).scatter(0, order, ordered.cumsum(0) - ordered)
    kept = probs * (before < settings.top_p)
    return kept / kept.sum()


def assert_truncated(model, rollout, settings):
    """Every token is one that is left, with its probability among those; some tokens are left out."""
    left_out = 0
    columns = rollout.prompt_ids, rollout.completion_ids, rollout.sampler_logprobs
    for prompt, ids, logprobs in zip(*columns, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        kept = torch.stack([kept_probabilities(row / settings.temperature, settings) for row in logits])
        own = kept.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert (own > 0).all()
        left_out += int((kept == 0).sum())
        # Cache against full forward, float32.
        torch.testing.assert_close(logprobs, own.log().float(), atol=1e-4, rtol=0)
    assert left_out > 0


@pytest.mark.parametrize("settings", [{"top_p": 0.6}, {"top_k": 3}, {"top_p": 0.8, "top_k": 5}], ids=str)
def test_no_token_outside_the_nucleus_is_drawn_and_the_others_are_renormalised(settings):
    model, chosen = tiny(), mixed_params(temperature=0.7, **settings)
    assert_truncated(model, generate(model, chosen, PROMPTS * 3, MANY_KEYS), chosen)


@pytest.mark.parametrize("settings", [{"temperature": 0.8}, {"top_k": 6, "top_p": 0.9}], ids=str)
def test_first_tokens_of_many_rows_follow_the_probabilities_that_are_left(settings):
    model, rows, chosen = tiny(), 3000, params(**settings)
    rollout = LocalBackend(model).generate([PROMPTS[0]] * rows, chosen, [(5, 0, row) for row in range(rows)])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    expected = rows * kept_probabilities(logits / chosen.temperature, chosen)
    counts = torch.bincount(torch.tensor(rollout.completion_ids)[:, 0], minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0
    # Tokens that are expected at least five times, and all others together.
    common = expected >= 5
    pairs = [*zip(counts[common], expected[common], strict=True), (counts[~common].sum(), expected[~common].sum())]
    assert common.sum() > (1 if chosen.truncates else 8)
    # Four standard deviations; the seed is fixed.
    assert all((count - mean).abs() <= 4 * (mean * (1 - mean / rows)).sqrt() + 1e-9 for count, mean in pairs)


def test_a_server_is_asked_for_the_truncation_and_returns_logprobs_after_it(tmp_path):
    chosen = params(5, temperature=0.8, top_p=0.8, top_k=5)
    with StubVLLM(base_model()) as stub:
        model, backend = policy(), backend_of([stub], tmp_path)
        backend.sync(model, 0)
        rollout = backend.generate(PROMPTS, chosen, KEYS)
        asked = [(body["top_p"], body["top_k"]) for body in stub.bodies if body["model"] != "base"]
        assert set(asked) == {(0.8, 5)}
        assert_truncated(model, rollout, chosen)
        backend.close()


def test_the_engine_in_the_training_process_truncates_too(monkeypatch, tmp_path):
    install(monkeypatch)
    base_model().save_pretrained(tmp_path / "base")
    model, backend = colocated_policy(tmp_path / "base"), ColocatedBackend(tmp_path / "adapters")
    backend.sync(model, 0)
    chosen = params(5, temperature=0.8, top_p=0.8, top_k=5)
    assert_truncated(model, backend.generate(PROMPTS, chosen, KEYS), chosen)
    backend.close()
