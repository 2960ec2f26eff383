"""One process and two give the same run: the same completions, the same metrics, the same weights.

Two processes run twice: under DDP, and through the shipped fsdp2.yaml with a sharded base. Where there are two GPUs,
they run there too, with nccl.
"""

import pytest

from tests.places import BACKENDS, CPU, GPU, REPEATED, on_gpus, places
from tests.ppo.launches import ALONE, Launch, Launches
from tests.ppo.support import assert_same
from tests.ppo.two_processes import CASES

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

RUNS = Launches("two_processes.py", {"alone": ALONE, "ddp": Launch("ddp"), "fsdp2": Launch("fsdp2")})
facts, weights = RUNS.facts, RUNS.weights
CONFIGS = ["ddp", "fsdp2"]
LAUNCHES = [(CPU, how) for how in CONFIGS] + [on_gpus(GPU, how) for how in CONFIGS]


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_there_really_are_two_processes(place, how):
    for rank in (0, 1):
        found = facts(place, how, "shared", rank)
        kind = f"MULTI_{'CPU' if place == CPU else 'GPU'}"
        assert (found["world_size"], found["distributed_type"], found["device"]) == (2, kind, place)
        assert found["backend"] == BACKENDS[place]
        assert found["is_wrapped"] == "DistributedDataParallel"
        assert {"rank/slowest", "rank/update_s_mean", "rank/busy_max"} <= set(found["ranks"])
    assert (facts(place, "alone", "shared")["world_size"], facts(place, "alone", "shared")["backend"]) == (1, None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_processes_sample_the_completions_of_one(place, how, name):
    RUNS.require_rows_of_one(place, how, name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_processes_end_with_the_weights_of_one(place, how, name):
    RUNS.require_weights_of_one(place, how, name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_processes_log_what_one_logs(place, how, name):
    RUNS.require_log_of_one(place, how, name)
    assert facts(place, how, name)["mine"] == [4.0, 4.0] and facts(place, "alone", name)["mine"] == [8.0, 8.0]


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_value_pretraining_leaves_the_policy_alone_with_two_processes(place, how):
    history = facts(place, how, "pretrained")["history"]
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
    RUNS.require_evaluation_of_one(place, how, "shared")


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
