"""One rule for completions that were cut off at the length limit: they are scored as they are, without an end token.

Wherever a reward model reads rows, the token ids must be those that a reward adapter on the policy's trunk reads.
"""

import pytest
import torch
from datasets import Dataset

from onetrunk.data.prompts import decode_completion, prepare_prompts
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Pair, Principle, Single
from onetrunk.judges.judge_config import EnsembleJudge
from onetrunk.judges.local import load_reward_judge
from onetrunk.ops.packing import make_pack
from onetrunk.reward_models.distill import Teacher
from onetrunk.rewards import RewardSet
from onetrunk.rewards.judge import JudgeReward
from onetrunk.rewards.model import load_reward
from tests.models.reward_adapters import a_reward_trunk, saved_base, saved_reward_adapter
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

TOKENIZER = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
# The same text ends by itself in one row and is cut off in the next.
TEXTS = ["runs fast", "runs fast", "sees old and", "no", "no"]
STOPPED = [True, False, False, True, False]
PLAIN = ["the cat ", "the cat ", "a dog ", "how warm is the sun ", "how warm is the sun "]
CHAT = [[{"role": "user", "content": text.strip()}] for text in PLAIN]
SINGLES = list(map(Single, PLAIN, TEXTS, STOPPED))
PRINCIPLE = Principle("Which is better?")


def sampled(prompts):
    """Return the rollout's token ids of prompts and completions, and the completions as reward functions get them."""
    prompt_ids = prepare_prompts(Dataset.from_dict({"prompt": prompts}), TOKENIZER)["prompt_ids"]
    ids = [TOKENIZER(text)["input_ids"] for text in TEXTS]
    ids = [[*row, TOKENIZER.eos_token_id] if stopped else row for row, stopped in zip(ids, STOPPED, strict=True)]
    completions = [decode_completion(TOKENIZER, *row) for row in zip(ids, STOPPED, prompts, strict=True)]
    return prompt_ids, ids, completions


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("prompts", [PLAIN, CHAT], ids=["text", "conversation"])
def test_a_reward_adapter_gives_the_same_scores_on_the_trunk_and_as_a_model_of_its_own(tmp_path, family, prompts):
    base = saved_base(tmp_path / "base", family)
    adapter = saved_reward_adapter(tmp_path / "judge", base, tokenizer=TOKENIZER)
    trunk = a_reward_trunk(family, base, adapter)
    prompt_ids, ids, completions = sampled(prompts)
    with torch.no_grad():
        expected = trunk(pack=make_pack(prompt_ids, ids, 0), roles=("reward",)).scores
    rewards = RewardSet(load_reward(str(adapter)))
    scores = rewards.score(prompts, completions, ids, {}, completion_stopped=STOPPED).total
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)  # Other padded widths round otherwise.
    # The end token matters: the same text has another score where it was cut off.
    assert abs(scores[0] - scores[1]) > 1e-2 and abs(scores[3] - scores[4]) > 1e-2


def test_every_way_to_score_reads_the_same_token_ids(tmp_path):
    """Rows of judges (alone, several, as the reward) and of teachers: scores are those of the reward model in PPO."""
    base = saved_base(tmp_path / "base")
    adapter = saved_reward_adapter(tmp_path / "judge", base, tokenizer=TOKENIZER)
    reward = load_reward(str(adapter))
    expected = reward(prompts=PLAIN, completions=TEXTS, completion_stopped=STOPPED)
    judge = load_reward_judge(str(adapter))
    ratings = judge.rate(SINGLES, PRINCIPLE)
    assert [rating.details["score"] for rating in ratings] == pytest.approx(expected, abs=1e-5)
    (verdict,) = judge.compare([Pair(PLAIN[0], TEXTS[0], TEXTS[1], STOPPED[0], STOPPED[1])], PRINCIPLE)
    assert verdict.details["scores"] == pytest.approx(expected[:2], abs=1e-5)
    (flipped,) = judge.compare([Pair(PLAIN[0], TEXTS[0], TEXTS[1], True, False).flipped()], PRINCIPLE)
    assert flipped.details["scores"] == pytest.approx(expected[1::-1], abs=1e-5)
    as_reward = JudgeReward(judge, Constitution("test", (PRINCIPLE,)))
    rewarded = as_reward(prompts=PLAIN, completions=TEXTS, completion_stopped=STOPPED)
    assert rewarded == pytest.approx([rating.score for rating in ratings], abs=1e-6)
    teacher = Teacher([reward], tmp_path / "scores.jsonl")
    for _ in ("computed", "kept"):
        assert teacher.member_scores(PLAIN, TEXTS, STOPPED)[0].tolist() == pytest.approx(expected, abs=1e-5)
    other = saved_reward_adapter(tmp_path / "other", base, tokenizer=TOKENIZER, seed=6)
    scores = load_reward(str(other))(prompts=PLAIN, completions=TEXTS, completion_stopped=STOPPED)
    second = torch.tensor(scores).sigmoid()
    joined = EnsembleJudge([judge, load_reward_judge(str(other))]).rate(SINGLES, PRINCIPLE)
    means = [(a.score + b) / 2 for a, b in zip(ratings, second.tolist(), strict=True)]
    assert [rating.score for rating in joined] == pytest.approx(means, abs=1e-5)
