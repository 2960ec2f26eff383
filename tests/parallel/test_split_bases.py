"""A sharded or divided base gives what a whole one gives: outputs, gradients, samples, files."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from onetrunk.parallel.layout import Layout
from tests.parallel import split_worker
from tests.parallel.split_worker import CASES
from tests.places import CPU, found_by_ranks, places

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]
LAYERS = 4
# Of FSDP2: layers above the cut are gathered once for each role; the root and the layers below it once for a pack.
GATHERS = {"all layers": 14, "top-2": 10, "checkpointing": 14}
LAYOUTS = {"FSDP2": Layout(), "TP": Layout(tensor=2)}
EVERY = [(kind, case) for kind, cases in CASES.items() for case in cases]


def launch(world_size, layout, cases, place):
    folder = Path(mkdtemp())
    split_worker.prepare(folder)
    return found_by_ranks(split_worker.work, folder, world_size, world_size, layout, list(cases), place)


launched = cache(launch)


def two(kind, case, place=CPU):
    """Return what each of two processes found in a case; all cases share a launch."""
    return [rank[case] for rank in launched(2, LAYOUTS[kind], CASES[kind], place)]


def check_numbers(found, kind, case, place):
    if kind == "FSDP2":
        # On CPUs the gathered weights give the same bits. cuBLAS may choose another kernel at another address.
        bound = 0.0 if place == CPU else 2e-2 if case == "bfloat16" else 1e-5
        assert max(found["output"], found["gradients"]) <= bound
    elif case == "bfloat16":
        # As close to float32 as a whole base is.
        divided, whole = found["errors"]
        assert divided < 1.5 * whole
    else:
        # Sums in another order, relative to the largest entry of each tensor.
        assert found["output"] < 5e-5 and found["gradients"] < 1e-4


@pytest.mark.parametrize(("kind", "case"), EVERY)
@pytest.mark.parametrize("place", places(2))
def test_outputs_gradients_samples_and_files_are_those_of_a_whole_base(place, kind, case):
    for found in two(kind, case, place):
        check_numbers(found, kind, case, place)
        assert found["completions"] and found["saved"] and found["identity"]
        assert {"adapter_model.safetensors", "value_head.safetensors", "base_model.json"} <= set(found["files"])


@pytest.mark.parametrize(("kind", "case"), EVERY)
@pytest.mark.parametrize("place", places(2))
def test_each_process_holds_its_share_of_the_frozen_base_and_all_that_trains(place, kind, case):
    for found in two(kind, case, place):
        assert found["is_split"] == [True, False] and ["DTensor", True] not in found["kinds"]
        assert ["DTensor", False] in found["kinds"] and ["Parameter", True] in found["kinds"]
        assert found["share"] == pytest.approx(0.5, rel=0.02)
        # No view keeps a whole matrix in memory.
        assert kind == "FSDP2" or found["is_stored"]


@pytest.mark.parametrize("case", ["all layers", "nf4"])
@pytest.mark.parametrize("place", places(2))
def test_a_rollout_gathers_each_unit_once(place, case):
    for found in two("FSDP2", case, place):
        assert found["collectives_of_rollout"]["all_gather_single"] == LAYERS + 1
        assert found["kinds_inside"] == ["Parameter"]


@pytest.mark.parametrize("case", GATHERS)
@pytest.mark.parametrize("place", places(2))
def test_a_step_gathers_the_frozen_layers_once_and_the_others_once_per_role_and_backward(place, case):
    assert two("FSDP2", case, place)[0]["collectives"]["all_gather_single"] == 2 * GATHERS[case]


def test_tensor_parallelism_gathers_no_matrix_except_projections_that_a_layer_splits_inside():
    """Two forwards with three roles."""
    assert not any(name.startswith("all_gather") for name in two("TP", "all layers")[0]["collectives"])
    assert two("TP", "gathered projections")[0]["collectives"]["all_gather_single"] > 0


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("place", places(2))
def test_accelerate_wraps_a_split_model_on_several_gpus(place, kind):
    """On a CPU accelerate wraps every model; on GPUs it rejects those with a DTensor, unless its test says no."""
    assert [found["accepted"] for found in two(kind, "all layers", place)] == [True, True]


@pytest.mark.parametrize(("kind", "layout"), [("FSDP2", Layout(2)), ("TP", Layout(2, tensor=2))])
@pytest.mark.parametrize("place", places(4))
def test_two_copies_over_two_processes_each_give_what_a_whole_base_gives(place, kind, layout):
    for rank in launch(4, layout, ["all layers", "top-2"], place):
        for case, found in rank.items():
            assert "over 2 processes, 2 copies" in found["line"] and found["completions"]
            check_numbers(found, kind, case, place)


def test_every_process_group_of_a_training_waits_no_longer_than_the_limit(tmp_path):
    for limits in found_by_ranks(split_worker.work_on_limits, tmp_path, 4):
        # All processes, copies, shards, rows and stages.
        assert limits == [77.0] * 5
