"""PPO in pipeline stages (pipeline_training) gives the run of one process: completions, metrics, weights, resuming.

Two processes are one pipeline, which trains on all rows; four are two, which train on different rows.
"""

import json
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from onetrunk.ppo.setup import check_launch, check_pipeline, check_stage_training, divide
from onetrunk.rollouts.local import LocalBackend
from tests.models.branches import a_trunk
from tests.parallel.test_layout import FSDP, GROUPS
from tests.places import BACKENDS, CPU, GPU, on_gpus, places
from tests.ppo.launches import ALONE, Launch, Launches, launches
from tests.ppo.staged_runs import CASES
from tests.ppo.support import assert_same, base_model, make_config
from tests.rollouts.stub_vllm import StubVLLM

# By the number of processes.
LAUNCHES = Launches(
    "staged_runs.py", {1: ALONE, 2: Launch("pipelined", 2), 4: Launch("pipelined", 4, ("pretrained",))}
)
launched, facts, weights = LAUNCHES.folder, LAUNCHES.facts, LAUNCHES.weights
NAMES = [(processes, name) for processes in (2, 4) for name in LAUNCHES.named[processes].cases or CASES]
RUNS = [(CPU, *run) for run in NAMES] + [on_gpus(GPU, *run, processes=run[0]) for run in NAMES]


@launches
@pytest.mark.parametrize("place", places(2))
def test_a_process_has_the_weights_of_its_layers_only(place):
    first, second = (facts(place, 2, "layers", rank) for rank in (0, 1))
    # The embedding on the first stage, the head on the last.
    assert first == {"held": [0], "outer": [True, False]}
    assert second == {"held": [1], "outer": [False, True]}
    log = (launched(place, 2) / "stderr.txt").read_text()
    assert "pipelined training: the base is divided into stages of 1, 1 layers: " in log


@launches
@pytest.mark.parametrize(("place", "processes", "name"), RUNS)
def test_a_pipeline_counts_as_one_process_and_gives_its_completions_weights_log_and_evaluation(place, processes, name):
    for rank in range(processes):
        found = facts(place, processes, name, rank)
        assert (found["world_size"], found["backend"]) == (processes, BACKENDS[place])
        assert found["local_bytes"] < facts(place, 1, name)["local_bytes"]
    # Rewards are computed on the first stage only.
    LAUNCHES.require_run_of_one(place, processes, name, group=2)


@launches
@pytest.mark.parametrize("place", places(2))
def test_a_pipeline_resumes_in_the_middle_of_a_rollout(place):
    LAUNCHES.require_exact_resume(place, 2)
    # One process writes the adapters of all stages and the value head, as one normal PEFT folder.
    saved = load_file(launched(place, 2) / "stopped" / "checkpoint-6" / "adapter_model.safetensors")
    assert {int(name.split(".layers.")[1].split(".")[0]) for name in saved} == {0, 1}


@launches
@pytest.mark.parametrize(("written", "processes", "how"), [(2, 1, ()), (1, 2, ()), (2, 2, ("replicas",))])
def test_a_checkpoint_of_stages_goes_on_in_another_layout_and_the_other_way_round(written, processes, how):
    folder = launched(CPU, processes, "go-on", str(launched(CPU, written) / "stopped"), *how)
    whole = weights(CPU, 1, "whole")
    log = json.loads((launched(CPU, 1) / "resumed-0.json").read_text())
    for rank in range(processes):
        assert_same(load_file(folder / f"resumed-{rank}.safetensors"), whole, atol=1e-4, rtol=1e-3)
        # Also the metrics that were counted, but not yet logged, at the checkpoint.
        found = json.loads((folder / f"resumed-{rank}.json").read_text())
        assert [entry.keys() for entry in found] == [entry.keys() for entry in log]
        for entry, one in zip(found, log, strict=True):
            assert entry == pytest.approx(one, rel=2e-3, abs=0.03)


@launches
def test_stages_train_on_rows_of_a_server_as_one_process_does():
    logs, found = [], []
    for processes in (1, 2):
        with StubVLLM(base_model()) as server:
            folder = launched(CPU, processes, "served", server.url)
            loads = [event for kind, event in server.events if kind == "load" and "-policy-" in event]
            # Each adapter is published once, by the first process.
            assert len({event.rsplit("-", 1)[1] for event in loads}) == len(loads) >= 2 and not server.missing
        logs.append(json.loads((folder / "continued-0.json").read_text()))
        found.append(load_file(folder / "continued-0.safetensors"))
    alone, staged = logs
    assert sorted(staged["completions"]) == sorted(alone["completions"]) and len(alone["completions"]) == 16
    assert staged["local_bytes"] < alone["local_bytes"]
    assert_same(found[1], found[0], atol=2e-5, rtol=1e-4)
    assert_same(load_file(folder / "continued-1.safetensors"), found[1])
    for log in logs:
        gaps = [entry["sampling/logprob_gap_max"] for entry in log["history"] if "sampling/logprob_gap_max" in entry]
        assert gaps and max(gaps) < 1e-4


# --- settings ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_divided_is_rejected_before_a_model_loads(tmp_path, launch_env):
    config = make_config(tmp_path, rollout_backend="pipelined", pipeline_training=True)
    with pytest.raises(ValueError, match="forms pipelines of 2 processes and 1 run; launch a multiple of that number"):
        check_pipeline(config)
    with pytest.raises(ValueError, match="quantised base, which loads on one device.*load it in bfloat16"):
        check_stage_training(config, quantization=object())
    with pytest.raises(ValueError, match="reward adapter on the policy's base.*reward model on a server"):
        check_stage_training(config, quantization=None, scores_on_trunk=True)
    launch = SimpleNamespace(rollout_backend="pipelined", pipeline_stages=None, pipeline_training=True, world_size=2)
    check_pipeline(launch)
    launch_env(**GROUPS, WORLD_SIZE="2")
    with pytest.raises(ValueError, match="'pipelined' is not supported with tensor parallelism.*set .* to 'local'"):
        check_pipeline(launch)
    launch_env(**FSDP)
    with pytest.raises(ValueError, match="activation_offloading is not supported with a sharded or divided base"):
        check_launch(make_config(tmp_path, activation_offloading=True))
    with pytest.raises(ValueError, match="the launch shards them .fsdp_config.; launch with .*pipelined.yaml"):
        check_pipeline(launch)
    launch_env()
    check_stage_training(make_config(tmp_path), quantization=object(), scores_on_trunk=True)
    trunk = a_trunk()
    trunk.get_base_model().quantization_method = "bitsandbytes"
    with pytest.raises(ValueError, match="quantised base"):
        divide(trunk, config, LocalBackend())
