"""PPO in pipeline stages (pipeline_training) gives the run of one process: completions, metrics, weights, resuming.

Two processes are one pipeline, which trains on all rows; four are two, which train on different rows.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from onetrunk.models import parallel
from onetrunk.models.parallel import Layout
from onetrunk.ppo.checks import check_pipeline, check_stage_training
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.dry_run import ModelSize, memory_lines
from tests.places import BACKENDS, CPU, GPU, REPEATED, launch_environment, on_gpus, places
from tests.ppo.staged_runs import CASES
from tests.ppo.support import assert_same, differ, make_config
from tests.stages.small_runs import make_material
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("staged_runs.py"))
CONFIG = str(ROOT / "accelerate_configs/pipelined.yaml")
# Which cases a launch runs; no names: all of them, and resuming.
LAUNCHED = {2: (), 4: ("shared", "kept")}
NAMES = [(processes, name) for processes, names in LAUNCHED.items() for name in names or CASES]
RUNS = [(CPU, *run) for run in NAMES] + [on_gpus(GPU, *run, processes=run[0]) for run in NAMES]
several = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(3600)]


def launches(function):
    for mark in several:
        function = mark(function)
    return function


@cache
def launched(place: str, processes: int, *words: str) -> Path:
    """Run the cases in one launch; return the folder of the results."""
    folder = Path(mkdtemp())
    config = ["--config_file", CONFIG, "--num_processes", str(processes), "--main_process_port", "0"]
    launcher = [] if processes == 1 else ["-m", "accelerate.commands.launch", *config]
    command = [sys.executable, *launcher, SCRIPT, str(folder), *(words or LAUNCHED.get(processes, ()))]
    done = subprocess.run(command, env=launch_environment(place, processes), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


def facts(place, processes, name, rank=0):
    return json.loads((launched(place, processes) / f"{name}-{rank}.json").read_text())


def weights(place, processes, name, rank=0, part=""):
    return load_file(launched(place, processes) / f"{name}-{rank}{part}.safetensors")


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
def test_a_pipeline_counts_as_one_process_and_samples_its_rows(place, processes, name):
    for rank in range(processes):
        found = facts(place, processes, name, rank)
        assert (found["world_size"], found["backend"]) == (processes, BACKENDS[place])
        assert found["local_bytes"] < facts(place, 1, name)["local_bytes"]
    alone = facts(place, 1, name)["completions"]
    ranks = [facts(place, processes, name, rank)["completions"] for rank in range(processes)]
    firsts = ranks[::2]
    # Rewards are computed on the first stage only.
    assert all(len(own) * len(firsts) == 16 for own in firsts) and not any(ranks[1::2])
    rows = 8 // len(firsts)
    for i in (0, 1):
        together = [row for own in firsts for row in own[rows * i : rows * (i + 1)]]
        assert sorted(together) == sorted(alone[8 * i : 8 * i + 8])


@launches
@pytest.mark.parametrize(("place", "processes", "name"), RUNS)
def test_all_processes_end_with_the_weights_of_one(place, processes, name):
    alone, before = weights(place, 1, name), weights(place, 1, name, part="-before")
    ranks = [weights(place, processes, name, rank) for rank in range(processes)]
    for other in ranks[1:]:
        assert_same(other, ranks[0])
    assert len(differ(alone, before)) > len(alone) / 2
    # Another order of the sums, over 4 or 6 steps of float32.
    assert_same(ranks[0], alone, atol=2e-5, rtol=1e-4)


@launches
@pytest.mark.parametrize(("place", "processes", "name"), RUNS)
def test_the_log_is_that_of_one_process(place, processes, name):
    alone, found = facts(place, 1, name), facts(place, processes, name)
    assert len(found["history"]) == len(alone["history"])
    for entry, one in zip(found["history"], alone["history"], strict=True):
        assert entry.keys() == one.keys()
        for key in set(one) - {"mine/rows"}:
            # A token at the edge of the clip range may fall on either side: one of 40.
            tolerance = 0.03 if key.endswith("clip_fraction") else 2e-4
            assert entry[key] == pytest.approx(one[key], rel=2e-3, abs=tolerance), key
    assert found["mine"] == [16 / processes] * 2
    assert found["beta"] == pytest.approx(alone["beta"])
    assert found["moments"] == pytest.approx(alone["moments"], rel=1e-5)
    for rank in range(processes):
        # What float rounding makes of 0 (sampling/logprob_gap_*) is absolute.
        expected = pytest.approx(alone["evaluation"], rel=1e-3, abs=1e-5)
        assert facts(place, processes, name, rank)["evaluation"] == expected


@launches
@pytest.mark.parametrize("place", places(2))
def test_a_pipeline_resumes_in_the_middle_of_a_rollout(place):
    whole = weights(place, 2, "whole")
    for rank in (0, 1):
        assert_same(weights(place, 2, "resumed", rank), whole, **REPEATED[place])
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
@pytest.mark.parametrize("place", places(2))
def test_rows_sampled_ahead_are_those_of_the_pipeline_and_are_resumed(place):
    folder = launched(place, 2, "ahead")
    whole, resumed = (load_file(folder / f"ahead{part}-0.safetensors") for part in ("", "-resumed"))
    assert_same(resumed, whole, **REPEATED[place])
    for part, expected in (("", whole), ("-resumed", resumed)):
        assert_same(load_file(folder / f"ahead{part}-1.safetensors"), expected)
    first, *later = json.loads((folder / "ahead-0.json").read_text())
    assert first == 0 and all(0 <= share < 1 for share in later) and max(later) > 0


OPTIONS = "--model_name_or_path base --dataset_name prompts.jsonl --output_dir out --reward_funcs reward.py:shortest"
OPTIONS += " --rollout_batch_size 4 --num_rollouts 2 --num_minibatches 1 --max_completion_length 6 --lora_r 2"
OPTIONS += " --use_cpu true --report_to none --disable_tqdm true --eval_size 2 --value_head adapter"
REWARD = """
def shortest(completions, **kwargs):
    return [-float(len(c)) for c in completions]
"""


def commanded(folder: Path, processes: int, *options: str) -> subprocess.CompletedProcess:
    """Run the script of PPO on small files, alone or launched."""
    folder.mkdir()
    make_material(folder)
    (folder / "reward.py").write_text(REWARD)
    config = ["--config_file", CONFIG, "--num_processes", str(processes), "--main_process_port", "0"]
    launcher = [] if processes == 1 else ["-m", "accelerate.commands.launch", *config]
    command = [sys.executable, *launcher, str(ROOT / "scripts/ppo.py"), *OPTIONS.split(), *options]
    env = launch_environment(CPU, processes)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@launches
def test_the_command_trains_in_stages_and_saves_what_one_process_saves(tmp_path):
    staged = ("--rollout_backend", "pipelined", "--pipeline_training", "true")
    for name, processes, options in (("one", 1, ()), ("two", 2, staged)):
        done = commanded(tmp_path / name, processes, *options)
        assert done.returncode == 0, done.stderr[-4000:]
    one, two = (tmp_path / name / "out" for name in ("one", "two"))
    for name in ("adapter_model.safetensors", "value_head.safetensors", "value/adapter_model.safetensors"):
        assert_same(load_file(two / name), load_file(one / name), atol=1e-4, rtol=1e-3)
    metrics, expected = (json.loads((folder / "metrics.json").read_text()) for folder in (two, one))
    assert metrics["policy"] == pytest.approx(expected["policy"], rel=1e-2, abs=1e-3)
    done = commanded(tmp_path / "dry", 1, *staged, "--pipeline_stages", "2", "--dry_run")
    assert done.returncode == 0 and "dry run: nothing is trained" in done.stdout, done.stdout + done.stderr


# --- settings ------------------------------------------------------------------------------------------------------

STAGED = {"rollout_backend": "pipelined", "pipeline_training": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_training": True}, "pipeline_training is set and rollout_backend is not 'pipelined'"),
        ({**STAGED, "pipeline_training": "yes"}, "pipeline_training is 'yes'; it must be true or false"),
        (
            {**STAGED, "trunk_cache": "cpu"},
            "trunk_cache is 'cpu' and pipeline_training .*set trunk_cache to auto or off",
        ),
        ({**STAGED, "activation_offloading": True}, "activation_offloading, which .*; set activation_checkpointing"),
        ({**STAGED, "capture_trunk_states": True}, "capture_trunk_states, which .*; leave it out"),
    ],
)
def test_a_setting_that_does_not_fit_is_rejected_with_what_to_change(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **settings)


def test_the_dry_run_counts_the_weights_of_the_largest_stage(tmp_path):
    size, model = (
        ModelSize(num_layers=4, first_layer=0, base=2**30, trained=1000),
        ModelArguments("base", dtype="float32"),
    )
    # A layer has 9,216 weights in its matrices, embedding and head 2,048 each: the second stage has 29,696 of 40,960.
    for settings, expected in (({}, 4.0), ({**STAGED, "pipeline_split": [1, 3]}, 2.9)):
        args = make_config(tmp_path, **settings)
        lines = memory_lines(tiny_model("llama").config, size, args, model, longest=8)
        assert lines[0] == f"{expected:9.3f} GiB weights of the base"


def test_what_cannot_be_divided_is_rejected_before_a_model_loads(tmp_path, monkeypatch):
    config = make_config(tmp_path, **STAGED)
    with pytest.raises(ValueError, match="forms pipelines of 2 processes and 1 run"):
        check_pipeline(config)
    with pytest.raises(ValueError, match="quantised base, which loads on one device.*load it in bfloat16"):
        check_stage_training(config, quantization_config=object(), scores_on_trunk=False)
    with pytest.raises(ValueError, match="reward adapter on the policy's base.*reward model on a server"):
        check_stage_training(config, quantization_config=None, scores_on_trunk=True)
    launch = SimpleNamespace(rollout_backend="pipelined", pipeline_stages=None, pipeline_training=True, world_size=2)
    check_pipeline(launch)
    monkeypatch.setattr(parallel, "launch_layout", Layout)
    with pytest.raises(ValueError, match="the launch shards them .fsdp_config.; launch with .*pipelined.yaml"):
        check_pipeline(launch)
    check_stage_training(make_config(tmp_path), quantization_config=object(), scores_on_trunk=True)
