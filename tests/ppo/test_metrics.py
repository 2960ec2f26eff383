"""The gap between the logprobs of sampler and trainer, and repeated n-grams: by hand, and in runs."""

import math

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.models.trunk import PackOutput
from onetrunk.ops.packing import make_pack
from onetrunk.ppo.monitoring.metrics import repeated_ngrams, rollout_metrics
from onetrunk.ppo.packs import RolloutPack
from onetrunk.ppo.rollout import PromptBatch, ScoredRollout
from onetrunk.rewards.reward import Scores
from onetrunk.types import Rollout
from tests.ppo.support import logged, prompts, trained

GAP = "sampling/logprob_gap_"


def test_the_gap_by_hand():
    """Rows of 2 and 3 tokens, in two packs, one of which is padded.

    The trainer's logprobs less the sampler's are d = .5, -1 | 0, .25, -.25: mean |d| = 2 / 5, largest 1. With the
    sampler as the policy k3 = exp(d) - 1 - d: .148721, .367879 | 0, .034025, .028801, and their mean is .115885.
    """
    prompt_ids, completion_ids = [[4], [5, 6], [7]], [[8, 1], [9, 10, 11], [12]]
    sampled = [torch.tensor([-2.0, -1.0]), torch.tensor([-3.0, -0.5, -0.25]), torch.tensor([-9.0])]
    rollout = Rollout(prompt_ids, completion_ids, sampled, [True, False, False])
    scores = Scores(torch.zeros(3), {"zero": torch.zeros(3)})
    scored = ScoredRollout(PromptBatch([], prompt_ids, {}, []), rollout, [], scores)
    packs = [make_pack(prompt_ids[1:], completion_ids[1:], 0), make_pack(prompt_ids[:1], completion_ids[:1], 0)]
    own = [torch.tensor([[-3.0, -0.25, -0.5], [-1.0, 0.0, 0.0]]), torch.tensor([[-1.5, -2.0]])]
    # The third row comes again on another process and does not count here.
    counted = torch.tensor([True, True, False])
    packs = [
        RolloutPack(pack, rows, output=PackOutput(logprobs=logprobs))
        for pack, rows, logprobs in zip(packs, [[1, 2], [0]], own, strict=True)
    ]
    figures = rollout_metrics(scored, packs, Accelerator(cpu=True), counted)
    k3 = [math.exp(d) - 1 - d for d in (0.5, -1.0, 0.0, 0.25, -0.25)]
    assert figures[f"{GAP}mean"] == pytest.approx(0.4)
    assert figures[f"{GAP}max"] == 1.0
    assert figures[f"{GAP}k3"] == pytest.approx(sum(k3) / 5) == pytest.approx(0.115885, abs=1e-6)


def test_in_float32_the_sampler_is_the_policy_that_trains(tmp_path):
    settings = {"adapter_layers": "top-1", "temperature": 0.7}
    trainer = trained(tmp_path, num_rollouts=3, eval_dataset=prompts(3), **settings)
    metrics = trainer.evaluate()
    # Float32 sums in another order.
    assert len(logged(trainer, f"{GAP}max")) == 3
    assert max(*logged(trainer, f"{GAP}max"), metrics[f"eval_{GAP}max"]) < 1e-4
    assert max(map(abs, logged(trainer, f"{GAP}k3"))) < 1e-8


def looped(rows, n):
    """Return the same two counts of every row, window by window."""
    repeated, totals = [], []
    for ids in rows:
        windows = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        repeated.append(sum(window in windows[:i] for i, window in enumerate(windows)))
        totals.append(len(windows))
    return repeated, totals


def test_the_turns_of_an_episode_count_each_for_itself():
    # 5 6 7 8 comes in two turns; the observation 9 stands between 3 4 and 1 2, which are no window of four.
    turn_ids = [[0] * 5 + [-1] + [1] * 4 + [-1] + [2] * 2 + [-1] + [3] * 2, [0] * 5]
    ids = [[5, 6, 7, 8, 5, 9, 5, 6, 7, 8, 9, 3, 4, 9, 1, 2], [7] * 5]
    rollout = Rollout([[1]] * 2, ids, [], [True] * 2, turn_ids=turn_ids)
    assert rollout.sampled_turns == [(0, [5, 6, 7, 8, 5]), (0, [5, 6, 7, 8]), (0, [3, 4]), (0, [1, 2]), (1, [7] * 5)]
    batch, scores = PromptBatch(["a"] * 2, [[1]] * 2, {}, [(0,), (1,)]), Scores(torch.tensor([1.0, 2.0]), {})
    scored = ScoredRollout(batch, rollout, ["a"] * 2, scores)
    assert scored.lengths.tolist() == [13, 5]
    # Windows: 2 + 1 + 0 + 0 and 2, of which one occurred before in its turn.
    assert rollout_metrics(scored, (), Accelerator(cpu=True))["completion/repeated_ngrams"] == pytest.approx(1 / 5)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.lists(st.sampled_from([0, 1, 2, 151_642]), min_size=1, max_size=24), min_size=1, max_size=6),
    n=st.integers(1, 5),
    fill=st.sampled_from([0, 2]),
)
def test_vectorised_equals_the_loop_and_padding_counts_nowhere(rows, n, fill):
    width = max(map(len, rows))
    padded = torch.tensor([row + [fill] * (width - len(row)) for row in rows])
    repeated, totals = repeated_ngrams(padded, torch.tensor([len(row) for row in rows]), n)
    assert (repeated.tolist(), totals.tolist()) == looped(rows, n)
