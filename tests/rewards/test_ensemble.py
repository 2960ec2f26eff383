"""Ensembles: members on a common scale, a penalty by hand, the text that names one, and what is refused."""

import pytest
import torch

from onetrunk.models.reward_model import SCALE_FILE, ScoreScale, read_score_scale
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.setup import ModelInputs, resolve_rewards
from onetrunk.rewards import EnsembleReward, ModelReward
from onetrunk.rewards.model import ensemble_reward, names_an_ensemble
from tests.rewards.test_model import scorer
from tests.tiny import tiny_tokenizer

PROMPTS = ["the cat ", "a dog ", "big "]
COMPLETIONS = ["runs fast", "sings", "no no"]


def member(folder, seed, scale=None):
    model = scorer(pad_token_id=0)
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(seed)))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if scale:
        scale.save(folder)
    return str(folder)


@pytest.fixture
def members(tmp_path):
    return [member(tmp_path / f"rm-{i}", i, ScoreScale(mean=i - 1.0, std=i + 0.5)) for i in range(3)]


def test_the_score_is_the_mean_of_standardised_scores_less_the_penalised_spread(members):
    kwargs = {"prompts": PROMPTS, "completions": COMPLETIONS}
    raw = [ModelReward(path)(**kwargs) for path in members]
    z = [[(s - (i - 1.0)) / (i + 0.5) for s in scores] for i, scores in enumerate(raw)]
    expected = []
    for a, b, c in zip(*z, strict=True):
        mean = (a + b + c) / 3
        std = (((a - mean) ** 2 + (b - mean) ** 2 + (c - mean) ** 2) / 3) ** 0.5
        expected.append(mean - 0.5 * std)
    logged = {}
    given = EnsembleReward(members, penalty=0.5)(**kwargs, completion_ids=None, log_metric=logged.__setitem__)
    assert given == pytest.approx(expected, abs=1e-5)
    assert logged["score/ensemble_disagreement"] > 0
    assert EnsembleReward(members[:2])(prompts=[], completions=[]) == []


def test_an_ensemble_is_named_in_a_recipe(members, tmp_path):
    spec = f"ensemble:{members[0]}, {members[1]}, penalty=0.25"
    assert names_an_ensemble(spec) and not names_an_ensemble(members[0])
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    (reward,) = resolve_rewards(ModelInputs(None, spec), config.device, "", tiny_tokenizer())
    assert isinstance(reward, EnsembleReward) and reward.penalty == 0.25 and len(reward.members) == 2


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("ensemble:{0}", "name two different"),
        ("ensemble:{0},{0}", "name two different"),
        ("ensemble:", "no list of reward models"),
        ("ensemble:{0},{1},weight=2", "no list of reward models"),
        ("ensemble:{0},{1},penalty=much", "the penalty is no number; write 'ensemble:"),
        ("ensemble:{0},{1},penalty=-1", "set a finite number of at least 0"),
    ],
)
def test_another_form_is_refused_with_the_right_one(members, spec, sentence):
    with pytest.raises(ValueError, match=sentence):
        ensemble_reward(spec.format(*members))


def test_a_member_without_a_scale_is_refused(members, tmp_path):
    (tmp_path / "rm-1" / SCALE_FILE).unlink()
    with pytest.raises(ValueError, match="rm-1 has no score_scale.json, so.*onetrunk reward"):
        EnsembleReward(members)


def test_a_scale_reads_back_and_a_damaged_or_flat_one_is_refused(tmp_path):
    scale = ScoreScale.of(torch.tensor([1.0, 3.0]))
    assert (scale.mean, scale.std) == (2.0, pytest.approx(2**0.5))
    scores = torch.tensor([0.5, -4.0])
    torch.testing.assert_close(scale.restore(scale.standardize(scores)), scores)
    scale.save(tmp_path)
    assert read_score_scale(str(tmp_path)) == scale
    (tmp_path / SCALE_FILE).write_text('{"mean": 1}')
    with pytest.raises(RuntimeError, match="does not hold the mean and std"):
        read_score_scale(str(tmp_path))
    for flat in ([1.0, 1.0], [1.0], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="tell nothing apart"):
            ScoreScale.of(torch.tensor(flat))
