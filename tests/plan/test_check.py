"""Calibration fits what it is given, and a run's log is compared with the prediction of its own settings."""

import json
import statistics

import pytest
import yaml

from onetrunk.plan.calibrate import Observation, check_run, descend, fit_rates, hardware_text, predicted
from onetrunk.plan.hardware import Rates, load_catalog
from onetrunk.stages.options.table import load_options
from tests.plan.support import LENGTHS, device, job

DEFAULTS = {name: option.default for name, option in load_options("ppo").items()}
CPU = load_catalog().devices["CPU"]


def test_a_search_by_factors_finds_the_least_error():
    found = descend(lambda values: abs(values[0] * values[1] - 6) + abs(values[0] - 2), [1.0, 1.0], 4.0, 0.001)
    assert found == pytest.approx([2, 3], rel=0.02)


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


@pytest.fixture
def run_dir(tmp_path):
    """Return the folder of a run of 3 rollouts, with record and log as onetrunk ppo writes them."""
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "llama", "vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 128, "dtype": "float32"}  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "run"
    (folder / "_report").mkdir(parents=True)
    settings = {"rollout_batch_size": 16, "num_ppo_epochs": 2, "max_completion_length": 48, "max_prompt_length": 40,
                "model_name_or_path": str(model), "reward_funcs": ["rewards.py:polite"], "lora_r": 8}  # fmt: skip
    about = {"verb": "ppo", "base": str(model), "slots_per_rollout": 2, "settings": settings}
    (folder / "_report" / "run.json").write_text(json.dumps(about))
    log = [{"event": "begin", "num_processes": 1, "num_gpus": 0}]
    for step in range(1, 7):
        entry = {"step": step, "time/update_s": 0.2, "memory/peak_gib": 1.0}
        if step % 2:
            entry |= {"time/generate_s": 1.0, "time/score_s": 0.5, "completion/length": 24.0}
        log.append(entry)
    (folder / "_report" / "log.jsonl").write_text(
        "".join(json.dumps(entry) + "\n" for entry in log) + '{"step": 7, "ti'
    )
    return folder


def test_a_run_is_compared_per_rollout_with_its_own_settings(run_dir):
    checked = check_run(run_dir, DEFAULTS, load_catalog(), {"prompt_tokens": 20.0})
    measured = {line.what: line.measured for line in checked.lines}
    # Two steps of 0.2 s in each rollout.
    assert measured == {"generate": 1.0, "score": 0.5, "update": pytest.approx(0.4), "peak memory": 1.0}
    one = checked.job
    assert (one.rows, one.lora_rank, one.lengths.completion, one.lengths.prompt) == (16, 8, 24.0, 20.0)
    assert checked.plan.train.device is CPU and one.base_bytes == 4.0
    assert all(line.predicted > 0 for line in checked.lines)
    assert checked.rollouts == 3 and "the reward rewards.py:polite counts as free" in checked.notes


def test_a_run_that_trained_in_stages_is_planned_so(run_dir):
    record, log = run_dir / "_report" / "run.json", run_dir / "_report" / "log.jsonl"
    about = json.loads(record.read_text())
    about["settings"] |= {"rollout_backend": "pipelined", "pipeline_training": True, "pipeline_stages": 2}
    record.write_text(json.dumps(about))
    log.write_text(log.read_text().replace('"num_processes": 1', '"num_processes": 4'))
    checked = check_run(run_dir, DEFAULTS, load_catalog(), {"prompt_tokens": 20.0})
    train, sample = checked.plan.train, checked.plan.sample
    # Two pipelines of two stages: each has half of the 16 rows.
    assert (train.data, train.stages, train.count) == (2, 2, 4) == (sample.replicas, sample.stages, sample.count)


@pytest.mark.parametrize(
    ("change", "message"), [({"verb": "sft"}, "run of sft"), ({"slots_per_rollout": 6}, "fewer than 2 rollouts")]
)
def test_a_run_that_cannot_be_compared_says_why(run_dir, change, message):
    path = run_dir / "_report" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        check_run(run_dir, DEFAULTS, load_catalog(), {})


def test_an_unknown_gpu_of_a_run_asks_for_its_name(run_dir):
    path = run_dir / "_report" / "log.jsonl"
    path.write_text(path.read_text().replace('"num_gpus": 0', '"num_gpus": 1, "device": "Imaginary 9"'))
    with pytest.raises(ValueError, match="Imaginary 9.*--hardware"):
        check_run(run_dir, DEFAULTS, load_catalog(), {})
    checked = check_run(run_dir, DEFAULTS, load_catalog(), {"hardware": "1xT4"})
    assert checked.plan.train.device.name == "T4-16GB"


@pytest.mark.slow
def test_this_machine_can_be_calibrated():
    from onetrunk.plan.calibrate import calibrate

    device, observations = calibrate(load_catalog())
    # Generous: other programs may run.
    assert statistics.median(abs(seen.error(device)) for seen in observations) < 0.5
    assert 0.2 < device.rates.runtime_gib < 4 and device.tflops > 0.001
