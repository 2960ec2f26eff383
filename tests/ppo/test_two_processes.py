"""One process and two give the same run: the same completions, the same metrics, the same weights.

Two processes run twice: under DDP, and through the shipped fsdp2.yaml with a sharded base.
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

from tests.ppo.support import assert_same, differ
from tests.ppo.two_processes import CASES

ROOT = Path(__file__).parents[2]
SCRIPT = [str(Path(__file__).with_name("two_processes.py"))]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


LAUNCHES = ["ddp", "fsdp2"]


@cache
def launched(how: str) -> Path:
    """Run all cases in one launch ("alone", or with an accelerate config); return the folder of the results."""
    folder = Path(mkdtemp())
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    config = ["--config_file", str(ROOT / f"accelerate_configs/{how}.yaml"), "--num_processes", "2"]
    launcher = ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
    command = [sys.executable, *(launcher if how != "alone" else []), *SCRIPT, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def facts(how, name, rank=0):
    return json.loads((launched(how) / f"{name}-{rank}.json").read_text())


def weights(how, name, rank=0, part=""):
    return load_file(launched(how) / f"{name}-{rank}{part}.safetensors")


@pytest.mark.parametrize("how", LAUNCHES)
def test_there_really_are_two_processes(how):
    for rank in (0, 1):
        found = facts(how, "shared", rank)
        assert (found["world_size"], found["is_multi_cpu"], found["backend"]) == (2, True, "gloo")
        assert found["is_wrapped"] == "DistributedDataParallel"
    assert (facts("alone", "shared")["world_size"], facts("alone", "shared")["backend"]) == (1, None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", LAUNCHES)
def test_two_processes_sample_the_completions_of_one(how, name):
    alone = facts("alone", name)["completions"]
    ranks = [facts(how, name, rank)["completions"] for rank in (0, 1)]
    assert len(alone) == 16 and all(len(own) == 8 for own in ranks)
    for i in (0, 1):
        both = ranks[0][4 * i : 4 * i + 4] + ranks[1][4 * i : 4 * i + 4]
        assert sorted(both) == sorted(alone[8 * i : 8 * i + 8])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", LAUNCHES)
def test_two_processes_end_with_the_weights_of_one(how, name):
    alone, before = weights("alone", name), weights("alone", name, part="-before")
    ranks = [weights(how, name, rank) for rank in (0, 1)]
    assert_same(ranks[0], ranks[1])
    assert len(differ(alone, before)) > len(alone) / 2
    # Other packs and another order of the sums, over 4 or 6 steps of float32.
    assert_same(ranks[0], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", LAUNCHES)
def test_two_processes_log_what_one_logs(how, name):
    alone, both = facts("alone", name)["history"], facts(how, name)["history"]
    assert len(both) == len(alone)
    for two, one in zip(both, alone, strict=True):
        assert two.keys() == one.keys()
        for key in set(one) - {"mine/rows"}:
            # A token at the edge of the clip range may fall on either side: one of 40.
            tolerance = 0.03 if key.endswith("clip_fraction") else 2e-4
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=tolerance), key
    assert facts(how, name)["beta"] == pytest.approx(facts("alone", name)["beta"])
    assert facts(how, name)["moments"] == pytest.approx(facts("alone", name)["moments"], rel=1e-5)
    assert facts(how, name)["mine"] == [4.0, 4.0] and facts("alone", name)["mine"] == [8.0, 8.0]


@pytest.mark.parametrize("how", LAUNCHES)
def test_value_pretraining_leaves_the_policy_alone_with_two_processes(how):
    history = facts(how, "adapter")["history"]
    assert ["policy/loss" in entry for entry in history if "loss" in entry] == [False, False, True, True]


@pytest.mark.parametrize("how", LAUNCHES)
def test_after_target_kl_all_processes_skip_the_same_steps(how):
    for launch in ("alone", how):
        history = [e for e in facts(launch, "stopped")["history"] if "loss" in e]
        assert [e.get("policy/skipped_steps", 0) for e in history] == [0, 1, 1] * 2
    assert facts(how, "stopped")["steps"] == 6


@pytest.mark.parametrize("how", LAUNCHES)
def test_two_processes_resume_in_the_middle_of_a_rollout(how):
    for rank in (0, 1):
        assert_same(weights(how, "resumed", rank), weights(how, "whole", rank))


@pytest.mark.parametrize("how", LAUNCHES)
def test_held_out_prompts_are_evaluated_by_both(how):
    # Three prompts on two processes: one is sampled twice and counts once.
    for rank in (0, 1):
        # What float rounding makes of 0 (sampling/logprob_gap_*) is absolute.
        alone = pytest.approx(facts("alone", "shared")["evaluation"], rel=1e-3, abs=1e-5)
        assert facts(how, "shared", rank)["evaluation"] == alone


@pytest.mark.parametrize("name", CASES)
def test_fsdp2_shards_what_is_frozen_and_nothing_else(name):
    whole, sharded = facts("ddp", name), facts("fsdp2", name)
    assert whole["kinds"] == [["Parameter", False], ["Parameter", True]]
    reward_adapter = [["Parameter", False]] if name == "judged" else []
    assert sharded["kinds"] == [["DTensor", False], *reward_adapter, ["Parameter", True]]
    assert sharded["local_bytes"] < whole["local_bytes"]


@pytest.mark.parametrize("name", CASES)
def test_fsdp2_ends_with_the_weights_of_ddp(name):
    # Bitwise where both form the same packs; a process with fewer packs splits one, which changes the order of sums.
    assert_same(weights("fsdp2", name), weights("ddp", name), atol=2e-5, rtol=1e-4)
