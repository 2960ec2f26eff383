"""top_p and top_k: which tokens may be drawn, with which logprobs, by every sampler."""

import math

import pytest
import torch

from onetrunk.rollouts import ColocatedBackend, LocalBackend, SamplingParams
from onetrunk.rollouts.decoding import draw, truncation
from tests.ppo.support import base_model
from tests.rollouts.small import KEYS, MANY_KEYS, PROMPTS, generate, mixed_params, tiny
from tests.rollouts.stub_engine import install
from tests.rollouts.stub_vllm import StubVLLM
from tests.rollouts.test_colocate import policy as colocated_policy
from tests.rollouts.test_vllm import MADE, backend_of, policy
from tests.tiny import VOCAB_SIZE

# Probabilities of four tokens.
P = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
HALVES = [{"top_p": 0.6}, {"top_k": 3}, {"top_p": 0.8, "top_k": 5}]


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
    """The probabilities [V] that are left, renormalised, and of each token how far it is inside the limit of top_p."""
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


@pytest.mark.parametrize("settings", HALVES, ids=str)
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
        MADE.pop().close()


def test_the_engine_in_the_training_process_truncates_too(monkeypatch, tmp_path):
    install(monkeypatch)
    base_model().save_pretrained(tmp_path / "base")
    model, backend = colocated_policy(tmp_path / "base"), ColocatedBackend(tmp_path / "adapters")
    backend.sync(model, 0)
    chosen = params(5, temperature=0.8, top_p=0.8, top_k=5)
    assert_truncated(model, backend.generate(PROMPTS, chosen, KEYS), chosen)
    backend.close()
