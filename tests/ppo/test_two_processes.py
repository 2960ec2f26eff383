"""One process and two give the same run: the same completions, the same metrics, the same weights.

Two processes run twice: under DDP, and through the shipped fsdp2.yaml with a sharded base. Where there are two GPUs,
they run there too, with nccl.
"""

import pytest

from tests.places import BACKENDS, CPU, GPU, on_gpus, places
from tests.ppo.launches import ALONE, Launch, Launches
from tests.ppo.two_processes import CASES

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

RUNS = Launches("two_processes.py", {"alone": ALONE, "ddp": Launch("ddp"), "fsdp2": Launch("fsdp2")})
facts = RUNS.facts
CONFIGS = ["ddp", "fsdp2"]
LAUNCHES = [(CPU, how) for how in CONFIGS] + [on_gpus(GPU, how) for how in CONFIGS]


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_there_really_are_two_processes(place, how):
    for rank in (0, 1):
        found = facts(place, how, "shared", rank)
        assert found["modes"] == [True]
        kind = f"MULTI_{'CPU' if place == CPU else 'GPU'}"
        assert (found["world_size"], found["distributed_type"], found["device"]) == (2, kind, place)
        assert found["backend"] == BACKENDS[place]
        assert found["is_wrapped"] == "DistributedDataParallel"
        assert {"rank/slowest", "rank/update_s_mean", "rank/busy_max"} <= set(found["ranks"])
    assert (facts(place, "alone", "shared")["world_size"], facts(place, "alone", "shared")["backend"]) == (1, None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_completions_weights_log_and_evaluation_of_two_processes_are_those_of_one(place, how, name):
    # Of three held-out prompts on two processes one is sampled twice and counts once.
    RUNS.require_run_of_one(place, how, name)


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_processes_resume_in_the_middle_of_a_rollout(place, how):
    RUNS.require_exact_resume(place, how)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("place", places(2))
def test_fsdp2_shards_what_is_frozen_and_nothing_else(place, name):
    whole, sharded = facts(place, "ddp", name), facts(place, "fsdp2", name)
    assert whole["kinds"] == [["Parameter", False], ["Parameter", True]]
    reward_adapter = [["Parameter", False]] if name == "judged" else []
    assert sharded["kinds"] == [["DTensor", False], *reward_adapter, ["Parameter", True]]
    assert sharded["local_bytes"] < whole["local_bytes"]
