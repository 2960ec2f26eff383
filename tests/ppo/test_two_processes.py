"""One process and two give the same run: the same completions, the same metrics, the same weights.

Two processes run twice: under DDP, and through the shipped fsdp2.yaml with a sharded base. Where there are two GPUs,
they run there too, with nccl.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from safetensors.torch import load_file

from tests.places import BACKENDS, CPU, GPU, REPEATED, launch_environment, on_gpus, places
from tests.ppo.support import assert_same, differ
from tests.ppo.two_processes import CASES

ROOT = Path(__file__).parents[2]
SCRIPT = [str(Path(__file__).with_name("two_processes.py"))]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


CONFIGS = ["ddp", "fsdp2"]
LAUNCHES = [(CPU, how) for how in CONFIGS] + [on_gpus(GPU, how) for how in CONFIGS]


@cache
def launched(place: str, how: str) -> Path:
    """Run all cases in one launch ("alone", or with an accelerate config); return the folder of the results."""
    folder = Path(mkdtemp())
    env = launch_environment(place, 1 if how == "alone" else 2)
    config = ["--config_file", str(ROOT / f"accelerate_configs/{how}.yaml"), "--num_processes", "2"]
    launcher = ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0"]
    command = [sys.executable, *(launcher if how != "alone" else []), *SCRIPT, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def facts(place, how, name, rank=0):
    return json.loads((launched(place, how) / f"{name}-{rank}.json").read_text())


def weights(place, how, name, rank=0, part=""):
    return load_file(launched(place, how) / f"{name}-{rank}{part}.safetensors")


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_there_really_are_two_processes(place, how):
    for rank in (0, 1):
        found = facts(place, how, "shared", rank)
        kind = f"MULTI_{'CPU' if place == CPU else 'GPU'}"
        assert (found["world_size"], found["distributed_type"], found["device"]) == (2, kind, place)
        assert found["backend"] == BACKENDS[place]
        assert found["is_wrapped"] == "DistributedDataParallel"
    assert (facts(place, "alone", "shared")["world_size"], facts(place, "alone", "shared")["backend"]) == (1, None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_processes_sample_the_completions_of_one(place, how, name):
    alone = facts(place, "alone", name)["completions"]
    ranks = [facts(place, how, name, rank)["completions"] for rank in (0, 1)]
    assert len(alone) == 16 and all(len(own) == 8 for own in ranks)
    for i in (0, 1):
        both = ranks[0][4 * i : 4 * i + 4] + ranks[1][4 * i : 4 * i + 4]
        assert sorted(both) == sorted(alone[8 * i : 8 * i + 8])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_processes_end_with_the_weights_of_one(place, how, name):
    alone, before = weights(place, "alone", name), weights(place, "alone", name, part="-before")
    ranks = [weights(place, how, name, rank) for rank in (0, 1)]
    assert_same(ranks[0], ranks[1])
    assert len(differ(alone, before)) > len(alone) / 2
    # Other packs and another order of the sums, over 4 or 6 steps of float32.
    assert_same(ranks[0], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_processes_log_what_one_logs(place, how, name):
    alone, both = facts(place, "alone", name)["history"], facts(place, how, name)["history"]
    assert len(both) == len(alone)
    for two, one in zip(both, alone, strict=True):
        assert two.keys() == one.keys()
        for key in set(one) - {"mine/rows"}:
            # A token at the edge of the clip range may fall on either side: one of 40.
            tolerance = 0.03 if key.endswith("clip_fraction") else 2e-4
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=tolerance), key
    assert facts(place, how, name)["beta"] == pytest.approx(facts(place, "alone", name)["beta"])
    assert facts(place, how, name)["moments"] == pytest.approx(facts(place, "alone", name)["moments"], rel=1e-5)
    assert facts(place, how, name)["mine"] == [4.0, 4.0] and facts(place, "alone", name)["mine"] == [8.0, 8.0]


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_value_pretraining_leaves_the_policy_alone_with_two_processes(place, how):
    history = facts(place, how, "adapter")["history"]
    assert ["policy/loss" in entry for entry in history if "loss" in entry] == [False, False, True, True]


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_after_target_kl_all_processes_skip_the_same_steps(place, how):
    for launch in ("alone", how):
        history = [e for e in facts(place, launch, "stopped")["history"] if "loss" in e]
        assert [e.get("policy/skipped_steps", 0) for e in history] == [0, 1, 1] * 2
    assert facts(place, how, "stopped")["steps"] == 6


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_processes_resume_in_the_middle_of_a_rollout(place, how):
    for rank in (0, 1):
        assert_same(weights(place, how, "resumed", rank), weights(place, how, "whole", rank), **REPEATED[place])


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_held_out_prompts_are_evaluated_by_both(place, how):
    # Three prompts on two processes: one is sampled twice and counts once.
    for rank in (0, 1):
        # What float rounding makes of 0 (sampling/logprob_gap_*) is absolute.
        alone = pytest.approx(facts(place, "alone", "shared")["evaluation"], rel=1e-3, abs=1e-5)
        assert facts(place, how, "shared", rank)["evaluation"] == alone


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", places(2))
def test_fsdp2_shards_what_is_frozen_and_nothing_else(place, name):
    whole, sharded = facts(place, "ddp", name), facts(place, "fsdp2", name)
    assert whole["kinds"] == [["Parameter", False], ["Parameter", True]]
    reward_adapter = [["Parameter", False]] if name == "judged" else []
    assert sharded["kinds"] == [["DTensor", False], *reward_adapter, ["Parameter", True]]
    assert sharded["local_bytes"] < whole["local_bytes"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", places(2))
def test_fsdp2_ends_with_the_weights_of_ddp(place, name):
    # Bitwise where both form the same packs; a process with fewer packs splits one, which changes the order of sums.
    assert_same(weights(place, "fsdp2", name), weights(place, "ddp", name), atol=2e-5, rtol=1e-4)
