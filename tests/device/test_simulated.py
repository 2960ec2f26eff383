"""On a pretended GPU: no configuration that one process can run mixes devices, and the waits for it are counted."""

import inspect

import pytest

from tests.device import runs

CAREFUL = [name for name in runs.RUNS if name not in ("measured", "small packs", "large packs", "careless")]
FAST = [
    ["defaults", "top layer, states on the CPU", "checkpointing", "reward adapter"],
    ["one step ahead", "sft", "reward training", "distillation", "causal judge"],
]
REST = [name for name in CAREFUL if name not in sum(FAST, [])]
SLOW = [pytest.param(REST[i::3], marks=pytest.mark.slow) for i in range(3)]


@pytest.mark.parametrize("names", [*FAST, *SLOW], ids=lambda names: names[0])
def test_no_run_mixes_devices(names, tmp_path):
    outcomes = runs.found(tmp_path, names)
    assert [*outcomes] == names
    errors = {name: outcome["error"] for name, outcome in outcomes.items() if outcome["error"]}
    assert not errors, "\n".join(f"{name}: {error}" for name, error in errors.items())


def test_a_tensor_without_a_device_in_the_loss_fails_with_its_line(tmp_path):
    error = runs.found(tmp_path, ["careless"])["careless"]["error"]
    lines, first = inspect.getsourcelines(runs.Careless.compute_loss)
    line = first + next(i for i, text in enumerate(lines) if "torch.ones" in text)
    assert f"mul got tensors of sim:0 and of the cpu [(2,)] at {runs.__file__}:{line}" in error


ROLLOUTS, STEPS, TOKENS = 3, 12, 18
# Where 3 rollouts of 16 rows wait: 12 steps, logged one by one, and 6 tokens of every rollout.
WAITS = {
    "rollouts/decoding.py:draw tolist": TOKENS,
    # A step: whether its gradient is finite. Its log: the metrics of the step, and Trainer's loss.
    "ppo/trainer.py:on_grad_norm item": STEPS,
    "monitoring/metrics.py:_step_numbers tolist": STEPS + ROLLOUTS,
    "checkpoints/resumable_trainer.py:_maybe_log_save_evaluate item": STEPS,
    **dict.fromkeys(
        (
            "ppo/forward.py:run item",
            "ppo/experience.py:require_finite item",
            "ppo/experience.py:_use tolist",
            "monitoring/metrics.py:rollout_metrics to cpu",
            "monitoring/metrics.py:value_metrics tolist",
            "ops/masking.py:on_cpu to cpu",
            "ppo/value_fit.py:_rescale tolist",
            "ppo/value_fit.py:_run item",
        ),
        ROLLOUTS,
    ),
    # Of a run: the base's fingerprint, and Trainer's sum of losses.
    "models/loading.py:_fingerprint to cpu": 1,
    "checkpoints/resumable_trainer.py:train from cpu": 1,
    "checkpoints/resumable_trainer.py:train item": 1,
}


@pytest.fixture(scope="module")
def waits_of(tmp_path_factory):
    outcomes = runs.found(tmp_path_factory.mktemp("waits"), ["measured", "small packs", "large packs"])
    return {name: outcome["waits"] for name, outcome in outcomes.items()}


def test_a_rollout_waits_9_times_a_step_once_and_a_token_once(waits_of):
    waits = waits_of["measured"]
    assert waits == WAITS
    assert (sum(waits.values()) - TOKENS) / STEPS <= 6


def test_packs_do_not_wait(waits_of):
    assert waits_of["small packs"] and waits_of["small packs"] == waits_of["large packs"]
