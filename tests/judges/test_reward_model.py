"""A reward model as a judge: sigmoid of the difference of its scores in either order, and its scale."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onetrunk.judges.judge import Judge, Pair, Principle, Single
from onetrunk.judges.local import RewardModelJudge, load_reward_judge
from onetrunk.models.reward_model import ScoreScale
from onetrunk.rewards.model import ModelReward
from tests.models.reward_adapters import a_scorer
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

PRINCIPLE = Principle("Which is better?")
TEXTS = ["the cat sings .", "a dog runs", "no", "the old house sees the red river and the moon"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    a_scorer(pad_token_id=0).save_pretrained(folder / "model")
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def judge(folder):
    return load_reward_judge(str(folder / "model"))


def test_a_verdict_is_the_sigmoid_of_the_difference_of_the_scores_that_ppo_would_see(folder, judge):
    scores = ModelReward(folder / "model")(prompts=["the bird "] * 4, completions=TEXTS)
    pairs = [Pair("the bird ", first, second) for first in TEXTS for second in TEXTS]
    found = [verdict.probability for verdict in judge.compare(pairs, PRINCIPLE)]
    expected = [1 / (1 + math.exp(other - one)) for one in scores for other in scores]
    assert found == pytest.approx(expected, abs=1e-6)
    assert [found[5 * i] for i in range(4)] == [0.5] * 4
    assert isinstance(judge, Judge) and judge.name == "model"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(TEXTS), st.sampled_from(TEXTS)), min_size=1, max_size=6))
def test_the_other_order_gives_the_complement_to_the_last_bit(judge, texts):
    pairs = [Pair("the bird ", *two) for two in texts]
    flipped = judge.compare([pair.flipped() for pair in pairs], PRINCIPLE)
    for one, other in zip(judge.compare(pairs, PRINCIPLE), flipped, strict=True):
        assert one.probability == 1 - other.probability


def test_a_rating_is_the_score_on_the_models_own_scale(folder, judge):
    (score,) = ModelReward(folder / "model")(prompts=["the bird "], completions=["no"])
    scaled = RewardModelJudge(judge.model, judge.tokenizer, scale=ScoreScale(score, 2.0))
    for rater, expected in ((judge, 1 / (1 + math.exp(-score))), (scaled, 0.5)):
        assert rater.rate([Single("the bird ", "no")], PRINCIPLE)[0].score == pytest.approx(expected, abs=1e-6)
    assert scaled.identity != judge.identity == load_reward_judge(str(folder / "model")).identity


def test_a_score_that_is_not_finite_is_an_abstention(folder):
    broken = load_reward_judge(str(folder / "model"))
    with torch.no_grad():
        broken.model.score.weight.fill_(math.nan)
    verdict = broken.compare([Pair("the ", "cat", "dog")], PRINCIPLE)[0]
    assert (verdict.probability, verdict.error, verdict.reason) == (None, None, "a score is not finite")
    assert broken.rate([Single("the ", "cat")], PRINCIPLE)[0].score is None
