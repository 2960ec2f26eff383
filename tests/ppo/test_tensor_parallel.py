"""Tensor parallelism through the shipped config gives the run of one process: completions, metrics, weights, resuming.

Two processes form one group, which trains on all rows; four form two groups, which train on different rows.
"""

import pytest

from tests.places import BACKENDS, CPU, GPU, on_gpus, places
from tests.ppo.launches import Launch, Launches
from tests.ppo.support import make_trainer
from tests.ppo.two_processes import SHAPE

CASES = ("pretrained", "kept", "judged")
# By the number of processes.
NAMED = {1: Launch(processes=1, cases=CASES), 2: Launch("tensor_parallel", 2, (*CASES, "resumed"))}
NAMED[4] = Launch("tensor_parallel", 4, ("pretrained",))
LAUNCHES = Launches("two_processes.py", NAMED)
launched, facts = LAUNCHES.folder, LAUNCHES.facts
NAMES = [*((2, name) for name in CASES), (4, "pretrained")]
RUNS = [(CPU, *run) for run in NAMES] + [on_gpus(GPU, *run, processes=run[0]) for run in NAMES]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


@pytest.mark.parametrize(("place", "processes", "name"), RUNS)
def test_a_base_divided_over_pairs_gives_completions_weights_log_and_evaluation_of_one(place, processes, name):
    whole = facts(place, 1, name)
    for rank in range(processes):
        found = facts(place, processes, name, rank)
        kind = f"MULTI_{'CPU' if place == CPU else 'GPU'}"
        assert (found["world_size"], found["distributed_type"], found["device"]) == (processes, kind, place)
        assert found["backend"] == BACKENDS[place]
        assert found["is_wrapped"] == "DistributedDataParallel"
        # Norms and a reward adapter are frozen and whole; nothing that trains is divided.
        assert found["kinds"] == [["DTensor", False], ["Parameter", False], ["Parameter", True]]
        divided = whole["local_bytes"] - found["local_bytes"]
        # Half of the base's matrices: the rest are norms, and a frozen reward adapter.
        assert divided > 0.4 * (whole["local_bytes"] - whole["kept_bytes"])
    # Rewards are computed on the first process of a group only.
    LAUNCHES.require_run_of_one(place, processes, name, group=2)


@pytest.mark.parametrize("place", places(2))
def test_a_group_resumes_in_the_middle_of_a_rollout(place):
    LAUNCHES.require_exact_resume(place, 2)
    # One process writes the adapters and the value head, as one normal PEFT folder.
    saved = launched(place, 2) / "stopped" / "checkpoint-6"
    assert {"adapter_model.safetensors", "value_head.safetensors"} <= {p.name for p in saved.iterdir()}


def test_a_run_without_tensor_parallelism_does_not_resume_its_checkpoint(tmp_path):
    case = {**SHAPE, "num_minibatches": 2, "num_rollouts": 2}
    checkpoint = launched(CPU, 2) / "stopped" / "checkpoint-6"
    with pytest.raises(ValueError, match="was written with tensor_parallel 2 .here 1."):
        make_trainer(tmp_path, **case).train(resume_from_checkpoint=str(checkpoint))
