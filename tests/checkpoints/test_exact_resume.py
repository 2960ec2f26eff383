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

# Fast: between two passes over a rollout.
CASES = [
    ("ppo", 2),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("ppo", 8),  # between two passes over the prompts
            ("ppo_adaptive", 6),  # in a rollout, after beta moved
            ("ppo_in_loss", 5),  # steps may be skipped
            ("ppo_alarm", 9),  # while an alarm lasts
            ("ppo_stopped", 12),  # ended by an alarm
            ("ppo_best", 12),  # after the last step, which is not the best
            ("ppo_monitor", 7),  # between two measurements
            ("ppo_cut", 2),  # states at the cut in use
            ("ppo_nf4", 3),  # in a rollout, on a base in 4 bit
            ("sft", 2),  # before the short last step of a pass
            ("sft_lengths", 5),  # in the second pass, whose order a sampler draws
            ("reward", 5),  # between two logs
            ("distill", 6),  # at the end of a pass
        ]
    ),
]
pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize(("kind", "step"), CASES)
def test_killed_after_any_step_and_resumed_equals_never_killed(tmp_path, kind, step):
    assert exit_code(crash_runs.killed_after, kind, tmp_path, step) == -signal.SIGKILL
    assert checkpoint_folders(tmp_path)[-1].name == f"checkpoint-{step}"
    resumed_equals_uninterrupted(kind, tmp_path)


@pytest.mark.slow
def test_the_monitor_of_these_runs_measures(tmp_path):
    trainer = crash_runs.ppo_monitor(tmp_path)
    trainer.train()
    assert trainer.monitor.best is not None and trainer.monitor.num_left_out == 0
    assert trainer.monitor.best[0] < trainer.state.global_step


def test_another_seed_is_another_run(tmp_path):
    """What is compared would show a difference."""
    crash_runs.finish("ppo", tmp_path, None, seed=4)
    other, whole = digest_of(tmp_path), digest_of(uninterrupted("ppo"))
    assert all(other[part] != whole[part] for part in ("weights", "optimizer", "metrics", "torch"))


@pytest.mark.parametrize("kind", ["sft", "reward", "distill"])
def test_the_steps_after_the_last_interval_are_logged_at_the_end_of_every_training(tmp_path, kind):
    trainer = crash_runs.KINDS[kind](tmp_path, logging_steps=100, num_train_epochs=1)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [3]
