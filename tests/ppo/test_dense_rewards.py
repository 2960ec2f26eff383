"""Dense rewards inside a run: hand-worked returns, what they have in common with numbers, and where they are shown."""

import json
from dataclasses import replace

import pytest
import torch

from onetrunk.ops import token_rewards
from onetrunk.report.blocks import sample_blocks
from onetrunk.report.runs import Run
from onetrunk.rewards import PerToken, PerTurn
from onetrunk.utils.sample_text import score_text
from tests.fakes import CannedBackend
from tests.ppo import test_shaping
from tests.ppo.support import differ, even_share, logged, prompts, trained, trained_weights
from tests.ppo.test_shaping import by_row, check
from tests.ppo.test_tensorboard import events_of, text

# Two turns with an observation of one token between them, and a row of one turn.
TURNS = [[0, 0, -1, 1], [0, 0, 0]]
COMPLETIONS = [[5, 6, 7, 1], [5, 6, 1]]


class Episodes(CannedBackend):
    """Gives completions with the turn of each token, and perhaps an environment's rewards."""

    def __init__(self, turn_rewards=None):
        super().__init__(COMPLETIONS)
        self.turn_rewards = turn_rewards

    def generate(self, prompt_ids, params, keys):
        rows = [i % 2 for i in range(len(prompt_ids))]
        given = self.turn_rewards and [self.turn_rewards[i] for i in rows]
        rollout = super().generate(prompt_ids, params, keys)
        return replace(rollout, turn_ids=[TURNS[i] for i in rows], turn_rewards=given)


def rollout(folder, scores, turn_rewards=None, **settings):
    return test_shaping.rollout(folder, scores=scores, backend=Episodes(turn_rewards), **settings)


def test_returns_count_from_the_turn_in_which_a_reward_arrives_and_no_border_cuts_credit(tmp_path):
    given = [PerTurn([1.0, 2.0]), PerToken([4.0, 0.0, 1.0])]
    # The observation has no column here: tokens 0 and 1 of the first turn see 1 + 2, the second turn 2.
    check(by_row(rollout(tmp_path / "a", given), "returns"), [3.0, 3.0, 2.0], [5.0, 1.0, 1.0])
    # gamma .5 over counted tokens: 2 * .25 + 1 * .5, 2 * .5 + 1, 2.
    check(by_row(rollout(tmp_path / "b", given, gamma=0.5), "returns"), [1.0, 2.0, 2.0], [4.25, 0.5, 1.0])
    environment = rollout(tmp_path / "c", [0.0, 0.0], turn_rewards=[[1.0, 2.0], [5.0]])
    check(by_row(environment, "returns"), [3.0, 3.0, 2.0], [5.0] * 3)


def test_without_discount_turn_rewards_and_their_sum_give_the_first_token_the_same_return(tmp_path):
    dense = rollout(tmp_path / "a", [PerTurn([1.25, -3.5]), PerToken([0.5, 0.25, 1.0])], beta=0.5)
    at_end = rollout(tmp_path / "b", [-2.25, 1.75], beta=0.5)
    for one, other in zip(by_row(dense, "returns"), by_row(at_end, "returns"), strict=True):
        torch.testing.assert_close(one[0], other[0], atol=1e-6, rtol=1e-6)
        assert not torch.equal(one[1:], other[1:])


def test_penalties_and_clipping_act_on_the_sum_and_what_is_left_arrives_at_the_end(tmp_path):
    # 1 + 2 - 1 * 3/4 = 2.25 and 5 - 3/4, clipped to 2: the last token gets 2 - 1 and 2 - 4.
    settings = {"length_penalty": 1.0, "score_clip": 2.0}
    experiences = rollout(tmp_path, [PerTurn([1.0, 2.0]), PerToken([4.0, 0.0, 1.0])], **settings)
    check(by_row(experiences, "returns"), [2.0, 2.0, 1.0], [2.0, -2.0, -2.0])


def test_normalisation_scales_what_arrives_inside_by_the_same_deviation(tmp_path):
    # Sums 3 and 5: mean 4, deviation sqrt(2) = s. The last tokens get -1 / s - 1 / s and 1 / s - 4 / s.
    experiences = rollout(tmp_path, [PerTurn([1.0, 2.0]), PerToken([4.0, 0.0, 1.0])], normalize_scores=True)
    r = 2**-0.5
    check(by_row(experiences, "returns"), [-r, -r, -2 * r], [r, -3 * r, -3 * r])


@pytest.mark.parametrize(("kind", "last"), [(PerTurn, True), (PerToken, True), (PerToken, False)])
def test_only_a_reward_at_the_end_trains_the_same_weights_as_a_number(tmp_path, kind, last):
    def dense(prompts, completions, completion_ids, **kwargs):
        rows = zip(even_share(prompts, completions, completion_ids), map(len, completion_ids), strict=True)
        if kind is PerTurn:
            return [PerTurn([score]) for score, _ in rows]
        return [PerToken([score * (t == (n - 1 if last else 0)) for t in range(n)]) for score, n in rows]

    settings = {"num_rollouts": 2, "num_ppo_epochs": 2, "normalize_scores": True, "score_clip": 1.0, "beta": 0.1}
    settings |= {"missing_eos_penalty": 0.3, "length_penalty": 0.1, "whiten_rewards": True}
    number, other = (trained(tmp_path / n, reward=r, **settings) for n, r in (("a", even_share), ("b", dense)))
    assert bool(differ(trained_weights(other.model), trained_weights(number.model))) != last
    assert logged(other, "score/mean")[0] == logged(number, "score/mean")[0]


def test_token_rewards_place_the_rest_of_the_score_at_the_last_counted_token():
    mask = torch.tensor([[True, False, True, True, False]])
    dense = torch.tensor([[1.0, 7.0, 2.0, 5.0, 7.0]])
    rewards = token_rewards(torch.tensor([10.0]), torch.zeros(1, 5), None, mask, 0.0, dense=dense)
    # What is given for the last token is part of the rest, and what stands outside the mask does not count.
    assert rewards.tolist() == [[1, 0, 2, 7, 0]]


def test_metrics_samples_report_and_tensorboard_show_where_the_reward_fell(tmp_path):
    def reward(turn_ids, **kwargs):
        return [PerTurn([1.0, 2.0]) if max(turns) else PerToken([4.0, 0.0, 1.5]) for turns in turn_ids]

    settings = {"rollout_backend": Episodes(), "log_completions": True, "report_to": "tensorboard"}
    trainer = trained(tmp_path, reward=reward, eval_dataset=prompts(2), eval_strategy="steps", **settings)
    # Row 0 has turns of 1 and 2, row 1 one of 5.5.
    for prefix in ("", "eval_"):
        assert logged(trainer, f"{prefix}reward/turn_0") == [(1 + 5.5) / 2]
        assert logged(trainer, f"{prefix}reward/turn_1") == [2.0]
        assert not logged(trainer, f"{prefix}reward/turn_2")
    for name in ("step-000001", "eval-000001"):
        path = tmp_path / "completions" / f"{name}.jsonl"
        rows = sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["score"])
        assert rows[0]["turn_rewards"] == [1.0, 2.0] and "token_rewards" not in rows[0]
        assert rows[-1]["turn_rewards"] == [5.5] and rows[-1]["token_rewards"] == [[0, 4.0], [2, 1.5]]
    texts = text(events_of(tmp_path), "rollout/completions")[1]
    assert "**score 3.000 = 1 + 2 (by turn)**" in texts and "**score 5.500 = 4 + 1.5 (as it arrived)**" in texts
    many = {"turn_rewards": [1.5], "token_rewards": [[i, 0.1] for i in range(15)]}
    assert score_text("1.500", many) == "1.500 at 15 tokens"
    run = Run(tmp_path, "ppo", "finished", before=rows, after=rows)
    titles = [title for _, sides in sample_blocks(run)[0].blocks[0].samples for title, _ in sides]
    assert "after, score 3 = 1 + 2 (by turn)" in titles
