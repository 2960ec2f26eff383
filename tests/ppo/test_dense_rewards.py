"""Dense rewards inside a run: hand-worked returns, what they have in common with numbers, and where they are shown."""

import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from onetrunk.ops import token_rewards
from onetrunk.report.blocks import sample_blocks
from onetrunk.report.runs import Run
from onetrunk.rewards import PerToken, PerTurn
from tests.fakes import CannedBackend
from tests.ppo.support import assert_same, differ, even_share, logged, make_trainer, prompts, trained, trained_weights
from tests.ppo.test_shaping import PLAIN, by_row, check
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
        rollout = super().generate(prompt_ids, params, keys)
        count = len(prompt_ids)
        given = None if self.turn_rewards is None else [self.turn_rewards[i % 2] for i in range(count)]
        return replace(rollout, turn_ids=[TURNS[i % 2] for i in range(count)], turn_rewards=given)


def rollout(folder, result, turn_rewards=None, **settings):
    dataset = Dataset.from_dict({"prompt": ["the cat"] * 2})
    settings = {**PLAIN, "rollout_batch_size": 2, "per_device_train_batch_size": 2, **settings}
    backend = Episodes(turn_rewards)
    trainer = make_trainer(
        folder, dataset=dataset, reward=lambda **kw: list(result), rollout_backend=backend, **settings
    )
    with torch.no_grad():
        trainer.model.value_head.linear.bias.zero_()
    return trainer.get_train_dataloader().make_rollout()


def test_returns_count_from_the_turn_in_which_a_reward_arrives(tmp_path):
    experiences = rollout(tmp_path, [PerTurn([1.0, 2.0]), PerToken([4.0, 0.0, 1.0])])
    # The observation has no column here: tokens 0 and 1 of the first turn see 1 + 2, the second turn 2.
    check(by_row(experiences, "returns"), [3.0, 3.0, 2.0], [5.0, 1.0, 1.0])


def test_a_border_between_turns_does_not_cut_credit(tmp_path):
    # gamma .5 over counted tokens: 1 at the second, 2 at the third: 2 * .25 + 1 * .5, 2 * .5 + 1, 2.
    experiences = rollout(tmp_path, [PerTurn([1.0, 2.0]), 0.0], gamma=0.5)
    check(by_row(experiences, "returns"), [1.0, 2.0, 2.0], [0.0] * 3)


def test_the_environments_rewards_arrive_like_those_of_a_function(tmp_path):
    experiences = rollout(tmp_path, [0.0, 0.0], turn_rewards=[[1.0, 2.0], [5.0]])
    check(by_row(experiences, "returns"), [3.0, 3.0, 2.0], [5.0] * 3)


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
    # Sums 3 and 5: mean 4, deviation sqrt(2). The last tokens get -1 / s - 1 / s and 1 / s - 4 / s.
    given = [PerTurn([1.0, 2.0]), PerToken([4.0, 0.0, 1.0])]
    experiences = rollout(tmp_path, given, normalize_scores=True)
    s = 2**0.5
    check(by_row(experiences, "returns"), [-1 / s, -1 / s, -2 / s], [1 / s, -3 / s, -3 / s])


def at_the_end(kind):
    """Return `even_share` of the completion as a dense reward that arrives at the last token."""

    def reward(prompts, completions, completion_ids, **kwargs):
        scores = even_share(prompts, completions, completion_ids)
        if kind is PerTurn:
            return [PerTurn([score]) for score in scores]
        return [PerToken([0.0] * (len(ids) - 1) + [s]) for ids, s in zip(completion_ids, scores, strict=True)]

    return reward


@pytest.mark.parametrize("kind", [PerTurn, PerToken])
def test_one_reward_at_the_end_trains_the_same_weights_as_a_number(tmp_path, kind):
    settings = {"num_rollouts": 2, "num_ppo_epochs": 2, "normalize_scores": True, "score_clip": 1.0, "beta": 0.1}
    settings |= {"missing_eos_penalty": 0.3, "length_penalty": 0.1, "whiten_rewards": True}
    number = trained(tmp_path / "number", **settings)
    dense = trained(tmp_path / "dense", reward=at_the_end(kind), **settings)
    assert_same(trained_weights(dense.model), trained_weights(number.model))
    assert logged(dense, "score/mean") == logged(number, "score/mean")
    # A reward that arrives earlier is another one.
    early = trained(
        tmp_path / "early",
        reward=lambda completion_ids, **kw: [
            PerToken([s] + [0.0] * (len(ids) - 1))
            for ids, s in zip(completion_ids, even_share([], [], completion_ids), strict=True)
        ],
        **settings,
    )
    assert differ(trained_weights(early.model), trained_weights(number.model))


def test_token_rewards_place_the_rest_of_the_score_at_the_last_counted_token():
    mask = torch.tensor([[True, False, True, True, False]])
    dense = torch.tensor([[1.0, 7.0, 2.0, 5.0, 7.0]])
    rewards = token_rewards(torch.tensor([10.0]), torch.zeros(1, 5), None, mask, 0.0, dense=dense)
    # What is given for the last token is part of the rest, and what stands outside the mask does not count.
    assert rewards.tolist() == [[1, 0, 2, 7, 0]]


def test_rewards_of_the_wrong_length_end_the_run_before_it_trains(tmp_path):
    trainer = make_trainer(tmp_path, reward=lambda prompts, **kw: [PerTurn([1.0, 2.0])] * len(prompts))
    before = trained_weights(trainer.model)
    with pytest.raises(ValueError, match="returned PerTurn with 2 numbers for row 0, which has 1 turn; give one"):
        trainer.train()
    assert_same(trained_weights(trainer.model), before)


def test_metrics_samples_report_and_tensorboard_show_where_the_reward_fell(tmp_path):
    given = {(1, 0): PerTurn([1.0, 2.0]), (0, 0): PerToken([4.0, 0.0, 1.5])}

    def reward(turn_ids, **kwargs):
        return [given[max(turns), 0] for turns in turn_ids]

    settings = {"rollout_backend": Episodes(), "log_completions": True, "report_to": "tensorboard"}
    trainer = make_trainer(tmp_path, reward=reward, eval_dataset=prompts(2), eval_strategy="steps", **settings)
    trainer.train()
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
    run = Run(tmp_path, "ppo", "finished", before=rows, after=rows)
    titles = [title for _, sides in sample_blocks(run)[0].blocks[0].samples for title, _ in sides]
    assert "after, score 3 = 1 + 2 (by turn)" in titles


def test_numbers_alone_add_no_metric_and_no_column(tmp_path):
    trainer = trained(tmp_path, log_completions=True)
    assert not any(name.startswith("reward/turn") for entry in trainer.state.log_history for name in entry)
    assert "turn_rewards" not in (tmp_path / "completions" / "step-000001.jsonl").read_text()
