"""The matrix of exact resume: kinds of runs x places in them.

sha256 of weights, heads, optimizer, schedule, generators, KL coefficient, reward statistics and log (but for times) of
a run that was killed there and resumed equal those of a run that was not. PPO: 12 steps in rollouts of 4, two passes
over each, two passes over the prompts; the others: 9 steps of two batches in 3 passes of 5 batches, with dropout in
SFT. All are logged every third step, so that most places lie between two logs.
"""

import signal

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders
from tests.checkpoints import crash_runs
from tests.checkpoints.killing import digest_of, exit_code, resumed_equals_uninterrupted, uninterrupted

PLACES = {
    "ppo": {
        1: "in the first rollout, in its first pass",
        2: "between two passes over a rollout",
        3: "in the second pass, after a log",
        4: "between two rollouts",
        8: "between two passes over the prompts",
        11: "before the last step",
    },
    "ppo_adaptive": {1: "before beta moves", 4: "after it moved", 6: "in a rollout", 9: "scores normalised"},
    "ppo_in_loss": {2: "value pretraining", 5: "steps may be skipped", 7: "steps may be skipped"},
    "ppo_alarm": {2: "in the first rollout", 7: "before it is raised", 9: "while it lasts", 14: "lengths compared"},
    "ppo_stopped": {5: "before the condition holds", 11: "before the step that ends the run", 12: "ended by an alarm"},
    "ppo_best": {6: "after the best evaluation", 12: "after the last step, which is not the best"},
    "ppo_monitor": {7: "between two measurements", 12: "after the last step"},
    "ppo_cut": {2: "states at the cut in use", 4: "between two rollouts", 7: "in the second rollout"},
    "sft": {1: "in a pass", 2: "before the short last step of a pass", 3: "at the end of a pass", 7: "in the last"},
    "reward": {1: "in a pass", 3: "at the end of a pass", 5: "between two logs", 8: "before the last step"},
    "distill": {2: "in a pass", 4: "in the second pass", 6: "at its end", 7: "in the last"},
    "sft_best": {9: "after the last step"},
    "reward_best": {9: "after the last step"},
    "distill_best": {9: "after the last step"},
}
pytestmark = pytest.mark.timeout(3600)
CASES = [(kind, step) for kind, steps in PLACES.items() for step in steps]


@pytest.mark.sampled(1, slow=15)
@pytest.mark.parametrize(("kind", "step"), CASES)
def test_killed_after_any_step_and_resumed_equals_never_killed(tmp_path, kind, step):
    assert exit_code(crash_runs.killed_after, kind, tmp_path, step) == -signal.SIGKILL
    assert checkpoint_folders(tmp_path)[-1].name == f"checkpoint-{step}"
    resumed_equals_uninterrupted(kind, tmp_path)


@pytest.mark.slow
def test_the_matrix_has_enough_cases_and_its_runs_differ():
    assert len(CASES) >= 24
    weights = {digest_of(uninterrupted(kind))["weights"] for kind in PLACES if kind != "ppo_monitor"}
    # Who only watches changes nothing.
    assert len(weights) == len(PLACES) - 1


def test_another_seed_is_another_run(tmp_path):
    """What is compared would show a difference."""
    crash_runs.finish("ppo", tmp_path, None, seed=4)
    other, whole = digest_of(tmp_path), digest_of(uninterrupted("ppo"))
    assert all(other[part] != whole[part] for part in ("weights", "optimizer", "metrics", "torch"))
