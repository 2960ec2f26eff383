"""Tensor parallelism through the shipped config gives the run of one process: completions, metrics, weights, resuming.

Two processes form one group, which trains on all rows; four form two groups, which train on different rows.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from safetensors.torch import load_file

from tests.ppo.support import assert_same, differ, make_trainer
from tests.ppo.two_processes import CASES, SHAPE

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("two_processes.py"))
CONFIG = str(ROOT / "accelerate_configs/tensor_parallel.yaml")
# Which cases a launch runs; no names: all of them, and resuming.
LAUNCHED = {2: (), 4: ("shared", "kept", "judged")}
RUNS = [(processes, name) for processes, names in LAUNCHED.items() for name in names or CASES]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


@cache
def launched(processes: int) -> Path:
    """Run the cases in one launch; return the folder of the results."""
    folder = Path(mkdtemp())
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    config = ["--config_file", CONFIG, "--num_processes", str(processes), "--main_process_port", "0"]
    launcher = [] if processes == 1 else ["-m", "accelerate.commands.launch", *config]
    command = [sys.executable, *launcher, SCRIPT, str(folder), *LAUNCHED.get(processes, ())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def facts(processes, name, rank=0):
    return json.loads((launched(processes) / f"{name}-{rank}.json").read_text())


def weights(processes, name, rank=0, part=""):
    return load_file(launched(processes) / f"{name}-{rank}{part}.safetensors")


@pytest.mark.parametrize(("processes", "name"), RUNS)
def test_the_base_is_really_divided_over_pairs_of_processes(processes, name):
    whole = facts(1, name)
    for rank in range(processes):
        found = facts(processes, name, rank)
        assert (found["world_size"], found["is_multi_cpu"], found["backend"]) == (processes, True, "gloo")
        assert found["is_wrapped"] == "DistributedDataParallel"
        # Norms and a reward adapter are frozen and whole; nothing that trains is divided.
        assert found["kinds"] == [["DTensor", False], ["Parameter", False], ["Parameter", True]]
        divided = whole["local_bytes"] - found["local_bytes"]
        # Half of all matrices: the rest are adapters, heads and norms.
        assert divided > 0.4 * (whole["local_bytes"] - whole["trained_bytes"])


@pytest.mark.parametrize(("processes", "name"), RUNS)
def test_a_group_samples_the_same_rows_and_all_groups_together_those_of_one_process(processes, name):
    alone = facts(1, name)["completions"]
    ranks = [facts(processes, name, rank)["completions"] for rank in range(processes)]
    firsts = ranks[::2]
    # Rewards are computed on the first process of a group only.
    assert all(len(own) * len(firsts) == 16 for own in firsts) and not any(ranks[1::2])
    rows = 8 // len(firsts)
    for i in (0, 1):
        together = [row for own in firsts for row in own[rows * i : rows * (i + 1)]]
        assert sorted(together) == sorted(alone[8 * i : 8 * i + 8])


@pytest.mark.parametrize(("processes", "name"), RUNS)
def test_all_processes_end_with_the_weights_of_one(processes, name):
    alone, before = weights(1, name), weights(1, name, part="-before")
    ranks = [weights(processes, name, rank) for rank in range(processes)]
    for other in ranks[1:]:
        assert_same(other, ranks[0])
    assert len(differ(alone, before)) > len(alone) / 2
    # Another order of the sums, over 4 or 6 steps of float32.
    assert_same(ranks[0], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("processes", "name"), RUNS)
def test_the_log_is_that_of_one_process(processes, name):
    alone, several = facts(1, name), facts(processes, name)
    assert len(several["history"]) == len(alone["history"])
    for found, one in zip(several["history"], alone["history"], strict=True):
        assert found.keys() == one.keys()
        for key in set(one) - {"mine/rows"}:
            # A token at the edge of the clip range may fall on either side: one of 40.
            tolerance = 0.03 if key.endswith("clip_fraction") else 2e-4
            assert found[key] == pytest.approx(one[key], rel=2e-3, abs=tolerance), key
    assert several["mine"] == [16 / processes] * 2
    assert several["beta"] == pytest.approx(alone["beta"])
    assert several["moments"] == pytest.approx(alone["moments"], rel=1e-5)
    for rank in range(processes):
        # What float rounding makes of 0 (sampling/logprob_gap_*) is absolute.
        expected = pytest.approx(alone["evaluation"], rel=1e-3, abs=1e-5)
        assert facts(processes, name, rank)["evaluation"] == expected


def test_a_group_resumes_in_the_middle_of_a_rollout():
    whole = weights(2, "whole")
    for rank in (0, 1):
        assert_same(weights(2, "resumed", rank), whole)
    # One process writes the adapters and the value head, as one normal PEFT folder.
    saved = launched(2) / "stopped" / "checkpoint-6"
    assert {"adapter_model.safetensors", "value_head.safetensors", "value"} <= {p.name for p in saved.iterdir()}


def test_a_run_without_tensor_parallelism_does_not_resume_its_checkpoint(tmp_path):
    case = {**SHAPE, "num_minibatches": 2, "value_head": "adapter", "num_rollouts": 2}
    checkpoint = launched(2) / "stopped" / "checkpoint-6"
    with pytest.raises(ValueError, match="was written with tensor_parallel 2 .here 1."):
        make_trainer(tmp_path, **case).train(resume_from_checkpoint=str(checkpoint))
