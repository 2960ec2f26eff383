"""Calibration fits what it is given."""

import statistics

import pytest
import yaml

from onetrunk.plan.hardware import Rates, load_catalog
from onetrunk.stages.calibrate import Observation, calibrate, fit_rates, hardware_text, predicted
from tests.plan.support import LENGTHS, device, job


def observations(own):
    """Return what a machine of given rates would measure."""
    seen = []
    for rows in (4, 16, 64):
        for layers in (2, 6):
            one = job(lengths=LENGTHS, rollout_batch_size=rows, num_minibatches=1, num_ppo_epochs=1,
                      is_padding_free=True,
                      adapted_layers=4 if layers > 4 else 2, microbatch_rows=rows)  # fmt: skip
            for kind in ("decode", "score", "update"):
                seen.append(Observation(kind, one, predicted(kind, one, own)))
    return seen


@pytest.mark.parametrize("is_cpu", [True, False])
def test_calibration_finds_the_rates_of_a_machine(is_cpu):
    true = Rates(
        matmul=0.4, attention=0.4, decode_matmul=0.3, hidden_half=64.0, tokens_half=256.0, layer_s=2e-3,
        adapter_layer_s=1e-3, decode_layer_s=3e-4, decode_step_s=1e-3, row_s=1e-5, forward_s=4e-3, token_s=1e-6,
        bandwidth=0.5,
    )  # fmt: skip
    machine = {"is_cpu": is_cpu, "tflops": 0.05 if is_cpu else 1.0, "bandwidth_gb_s": 20.0}
    own = device(**machine, rates=true)
    seen = observations(own)
    found = device(**machine, rates=fit_rates(own, seen))
    errors = [abs(one.error(found)) for one in seen]
    assert sorted(errors)[int(0.9 * len(errors))] < 0.1
    assert found.rates.is_calibrated and not Rates().is_calibrated


def test_a_calibration_is_a_hardware_file(tmp_path):
    own = device(name="THIS-CPU", is_cpu=True, rates=Rates(layer_s=1.23456789e-7))
    path = tmp_path / "machine.yaml"
    path.write_text(hardware_text(own))
    assert yaml.safe_load(path.read_text())["devices"]["THIS-CPU"]["rates"]["layer_s"] == 1.23457e-7
    read = load_catalog(str(path)).devices["THIS-CPU"]
    assert read.is_cpu and read.rates.layer_s == pytest.approx(1.23457e-7) and read.memory_gib == own.memory_gib


@pytest.mark.slow
def test_this_machine_can_be_calibrated():
    device, observations = calibrate(load_catalog())
    # Generous: other programs may run.
    assert statistics.median(abs(seen.error(device)) for seen in observations) < 0.5
    assert 0.2 < device.rates.runtime_gib < 4 and device.tflops > 0.001
