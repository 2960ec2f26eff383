"""policy_objective dis in a run: which logprobs it compares with, what is masked and logged, and what it rejects."""

import math

import pytest
import torch

from tests.ppo.support import logged, trained, trained_weights
from tests.ppo.test_importance_correction import Shifted, recorded
from tests.ppo.test_schedules import ahead, sampler

DIS = {"policy_objective": "dis"}


def test_on_samples_of_the_policy_itself_its_first_step_is_that_of_ppo(tmp_path):
    runs = [trained(tmp_path / name, policy_objective=name) for name in ("clip", "dis")]
    # The sampler's logprobs are those of decoding, which round differently.
    clip, dis = (trained_weights(run.model) for run in runs)
    assert all(torch.allclose(clip[name], dis[name], atol=2e-5) for name in clip)
    assert logged(runs[1], "policy/masked_below") == logged(runs[1], "policy/masked_above") == [0]


@pytest.mark.parametrize(("high", "above"), [(5.0, 0.0), (2.5, 1.0)])
def test_the_ratio_is_that_to_the_sampler_and_what_is_out_of_bounds_is_logged(tmp_path, high, above):
    # The sampler claims 4 times the probability of every other token and a quarter of the rest: ratios 1/4 and 4.
    backend = Shifted(math.log(4), turns=True)
    trainer, experiences = recorded(tmp_path, backend, **DIS, dis_epsilon_high=high)
    assert all(experience.weights is None for experience in experiences)
    masks = [experience.loss_mask for experience in experiences]
    even = sum(int(mask[:, ::2].sum()) for mask in masks) / sum(int(mask.sum()) for mask in masks)
    assert 0 < even < 1
    assert logged(trainer, "policy/masked_below") == pytest.approx([even])
    assert logged(trainer, "policy/masked_above") == pytest.approx([above * (1 - even)])
    outside = even + above * (1 - even)
    assert logged(trainer, "policy/clip_fraction") == pytest.approx([outside])
    assert logged(trainer, "sampling/masked_at_staleness_0") == pytest.approx([outside])
    assert "sampling/effective_sample_size" not in trainer.state.log_history[0]


def test_rows_sampled_ahead_are_compared_with_the_version_that_drew_them(tmp_path):
    trainer = ahead(tmp_path, sampler(), "async", max_staleness=2, **DIS)
    trainer.train()
    names = {name for log in trainer.state.log_history for name in log if name.startswith("sampling/masked_at")}
    assert {f"sampling/masked_at_staleness_{age}" for age in (0, 1, 2)} == names
    fresh, *_, stale = logged(trainer, "sampling/staleness_max")
    assert (fresh, stale) == (0, 2)
