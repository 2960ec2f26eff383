"""One process and two give the same run: the same completions, the same metrics, the same weights."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from safetensors.torch import load_file

from tests.ppo.support import assert_same, differ
from tests.ppo.two_processes import CASES

ROOT = Path(__file__).parents[2]
SCRIPT = [str(Path(__file__).with_name("two_processes.py"))]
pytestmark = pytest.mark.multi_process


@cache
def launched(processes: int) -> Path:
    """Run all cases in one launch; return the folder of the results."""
    folder = Path(mkdtemp())
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), *SCRIPT, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def facts(processes, name, rank=0):
    return json.loads((launched(processes) / f"{name}-{rank}.json").read_text())


def weights(processes, name, rank=0, part=""):
    return load_file(launched(processes) / f"{name}-{rank}{part}.safetensors")


def test_there_really_are_two_processes_under_ddp():
    for rank in (0, 1):
        found = facts(2, "shared", rank)
        assert (found["world_size"], found["is_multi_cpu"], found["backend"]) == (2, True, "gloo")
        assert found["is_wrapped"] == "DistributedDataParallel"
    assert (facts(1, "shared")["world_size"], facts(1, "shared")["backend"]) == (1, None)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_sample_the_completions_of_one(name):
    alone = facts(1, name)["completions"]
    ranks = [facts(2, name, rank)["completions"] for rank in (0, 1)]
    assert len(alone) == 16 and all(len(own) == 8 for own in ranks)
    for i in (0, 1):
        both = ranks[0][4 * i : 4 * i + 4] + ranks[1][4 * i : 4 * i + 4]
        assert sorted(both) == sorted(alone[8 * i : 8 * i + 8])


@pytest.mark.parametrize("name", CASES)
def test_two_processes_end_with_the_weights_of_one(name):
    alone, before = weights(1, name), weights(1, name, part="-before")
    ranks = [weights(2, name, rank) for rank in (0, 1)]
    assert_same(ranks[0], ranks[1])
    assert len(differ(alone, before)) > len(alone) / 2
    # Other packs and another order of the sums, over 4 or 6 steps of float32.
    assert_same(ranks[0], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_log_what_one_logs(name):
    alone, both = facts(1, name)["history"], facts(2, name)["history"]
    assert len(both) == len(alone)
    for two, one in zip(both, alone, strict=True):
        assert two.keys() == one.keys()
        for key in set(one) - {"mine/rows"}:
            # A token at the edge of the clip range may fall on either side: one of 40.
            tolerance = 0.03 if key.endswith("clip_fraction") else 2e-4
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=tolerance), key
    assert facts(2, name)["beta"] == pytest.approx(facts(1, name)["beta"])
    assert facts(2, name)["moments"] == pytest.approx(facts(1, name)["moments"], rel=1e-5)
    assert facts(2, name)["mine"] == [4.0, 4.0] and facts(1, name)["mine"] == [8.0, 8.0]


def test_value_pretraining_leaves_the_policy_alone_under_ddp():
    history = facts(2, "adapter")["history"]
    assert ["policy/loss" in entry for entry in history if "loss" in entry] == [False, False, True, True]


def test_after_target_kl_all_processes_skip_the_same_steps():
    for processes in (1, 2):
        history = [e for e in facts(processes, "stopped")["history"] if "loss" in e]
        assert [e.get("policy/skipped_steps", 0) for e in history] == [0, 1, 1] * 2
    assert facts(2, "stopped")["steps"] == 6


def test_two_processes_resume_in_the_middle_of_a_rollout():
    for rank in (0, 1):
        assert_same(weights(2, "resumed", rank), weights(2, "whole", rank))


def test_held_out_prompts_are_evaluated_by_both():
    # Three prompts on two processes: one is sampled twice and counts once.
    for rank in (0, 1):
        # What float rounding makes of 0 (sampling/logprob_gap_*) is absolute.
        alone = pytest.approx(facts(1, "shared")["evaluation"], rel=1e-3, abs=1e-5)
        assert facts(2, "shared", rank)["evaluation"] == alone
