"""Every configuration that one process can run, on a pretended GPU: nothing mixes devices."""

import inspect

import pytest

from tests.device import runs

CAREFUL = [name for name in runs.RUNS if name != "careless"]
FAST = [
    ["shared head", "top layer, states on the CPU", "checkpointing", "evaluation", "reward adapter"],
    ["value adapter", "top layer, padding free", "resumed", "turns"],
    ["one step ahead", "reward model", "sft", "reward training", "distillation", "causal judge"],
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
