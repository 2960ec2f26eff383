"""The gap between the sampler's logprobs and the trainer's: its numbers, its alarm, and what precision makes of it."""

import logging
import math

import pytest
import torch
from accelerate import Accelerator

from onetrunk.models.trunk import PackOutput
from onetrunk.ops.packing import make_pack
from onetrunk.ppo.monitoring.metrics import rollout_metrics
from onetrunk.ppo.packs import RolloutPack
from onetrunk.ppo.rollout import PromptBatch, ScoredRollout
from onetrunk.rewards.reward import Scores
from onetrunk.types import Rollout
from tests.fakes import CannedBackend
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


def test_a_sampler_that_is_not_the_policy_raises_an_alarm(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    # Its logprobs are 0, as if it were certain of every token.
    trainer = trained(tmp_path, rollout_backend=CannedBackend([[5, 6, 1]]), num_rollouts=3, alarm_patience=2)
    assert logged(trainer, "alarm/logprob_gap") == [0.0, 1.0, 1.0]
    assert min(logged(trainer, f"{GAP}mean")) > 1
    (text,) = [r.getMessage() for r in caplog.records if "alarm logprob_gap" in r.getMessage()]
    assert "above the limit 0.1 (alarm_limits logprob_gap 0.1)" in text and "rollout backend" in text
