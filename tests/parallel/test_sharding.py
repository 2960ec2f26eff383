"""A sharded base gives what a whole one gives: outputs, gradients, samples, files. Each process holds its share."""

import ctypes
import inspect
import os
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model
from transformers import TrainingArguments

from onetrunk.checkpoints.trainer import ResumableTrainer
from onetrunk.parallel import sharding
from onetrunk.parallel.groups import num_data_processes
from onetrunk.parallel.sharding import Layout, gathered, is_sharded, launch_layout, shard_frozen
from tests.models.branches import a_trunk, lora
from tests.parallel import sharding_worker
from tests.parallel.sharding_worker import CASES
from tests.places import CPU, found_by_ranks, places
from tests.tiny import tiny_model

LAYERS = 4
# Layers above the cut run once for each role; the root and the layers below it once for a pack.
GATHERS = {"shared": 14, "detached, top-2": 10, "adapter, top-2": 12, "checkpointing": 22}


def launch(folder, world_size, layout, cases, place):
    # Hidden 64: bitsandbytes quantises in blocks of 64.
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(folder / "base")
    return found_by_ranks(sharding_worker.work, folder, world_size, world_size, layout, cases, place)


@cache
def launched(place):
    return launch(Path(mkdtemp()), 2, Layout(), list(CASES), place)


def two(case, place):
    """Return what each of two processes found in a case; all cases share a launch."""
    return [rank[case] for rank in launched(place)]


def tolerance(case, place):
    """Return the largest relative difference: 0 on CPUs, where the gathered weights give the same bits.

    cuBLAS may choose another kernel for a weight at another address.
    """
    if place == CPU:
        return 0.0
    return 2e-2 if case == "bfloat16" else 1e-5


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", places(2))
def test_outputs_and_gradients_are_those_of_a_whole_base(place, case):
    for found in two(case, place):
        assert max(found["output"], found["gradients"]) <= tolerance(case, place)


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library than glibc")
def test_on_cpus_a_freed_layer_goes_back_to_the_system():
    # Of 128 MiB; without mallopt, nearly all of them stay.
    assert all(found["kept_mib"] < 16 for found in two("shared", CPU))


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", places(2))
def test_each_process_holds_its_share_of_the_frozen_base_and_all_that_trains(place, case):
    for found in two(case, place):
        assert found["is_sharded"]
        assert ["DTensor", True] not in found["kinds"] and ["Parameter", True] in found["kinds"]
        # A continued adapter's frozen part stays whole, like its trained part.
        assert (["Parameter", False] in found["kinds"]) == (case == "continued adapter")
        if case != "continued adapter":
            assert found["local"] * 2 == found["frozen"]


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", places(2))
def test_a_rollout_gathers_each_unit_once_and_samples_what_a_whole_base_samples(place, case):
    for found in two(case, place):
        assert found["gathers_in_rollout"] == LAYERS + 1
        assert found["completions"] and found["kinds_inside"] == ["Parameter"]


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", places(2))
def test_saved_files_and_the_identity_of_the_base_are_those_of_a_whole_base(place, case):
    for found in two(case, place):
        assert found["saved"] and found["identity"]
        assert {"adapter_model.safetensors", "value_head.safetensors", "base_model.json"} <= set(found["files"])


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize("case", GATHERS)
@pytest.mark.parametrize("place", places(2))
def test_a_step_gathers_the_frozen_layers_once_and_the_others_once_per_role_and_backward(place, case):
    assert two(case, place)[0]["gathers_in_two_steps"] == 2 * GATHERS[case]


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize("place", places(2))
def test_accelerate_wraps_a_sharded_model_on_several_gpus(place):
    """On a CPU accelerate wraps every model; on GPUs it rejects those with a DTensor, unless its test says no."""
    assert "if model_has_dtensor(model):" in inspect.getsource(Accelerator.prepare_model)
    assert [found["accepted"] for found in two("shared", place)] == [True, True]


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize("place", places(4))
def test_two_copies_of_two_shards_give_what_a_whole_base_gives(place, tmp_path):
    cases = ["shared", "adapter, top-2"]
    for rank in launch(tmp_path, 4, Layout(shards=2, replicas=2), cases, place):
        for case, found in rank.items():
            assert "over 2 processes, 2 copies" in found["line"] and found["completions"]
            assert max(found["output"], found["gradients"]) <= tolerance(case, place)
            assert found["local"] * 2 == found["frozen"]


# --- the request of the launch ---


@pytest.fixture
def launch_env(monkeypatch):
    """Return a function that sets the environment of a launch and asks for its layout."""
    names = (sharding.USE_FSDP, sharding.USE_PARALLELISM, "FSDP_CPU_RAM_EFFICIENT_LOADING")

    def asked(**variables):
        for name in names:
            monkeypatch.setenv(name, "false")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        launch_layout.cache_clear()
        return launch_layout()

    yield asked
    launch_layout.cache_clear()


DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
SIZES = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}


GROUPS = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}


def test_the_accelerate_config_decides_the_groups_of_tensor_parallelism(launch_env):
    assert launch_env(**GROUPS, WORLD_SIZE="2") == Layout(1, 1, tensor=2)
    assert launch_env(**GROUPS, WORLD_SIZE="6") == Layout(1, 3, tensor=2)
    assert num_data_processes(6) == 3 and os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"


def test_the_accelerate_config_decides_the_layout(launch_env, monkeypatch):
    assert launch_env() is None
    assert launch_env(**FSDP) == Layout()
    assert launch_env(**FSDP, **SIZES, PARALLELISM_CONFIG_DP_SHARD_SIZE="4") == Layout(shards=4, replicas=2)
    # accelerate must not wrap the model itself.
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            "ZeRO-2 is not supported.*fsdp2",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "ZeRO-3 is not supported.*fsdp2",
        ),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "set fsdp_version: 2"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true is not supported.*4 bit"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "set activation_checkpointing in the trainer"),
        ({**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward: false keeps"),
        ({**GROUPS, "WORLD_SIZE": "4", **FSDP}, "tp_size is 2 and the config also shards"),
        ({**GROUPS, "WORLD_SIZE": "4", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "tp_size is 2 and the config also"),
        ({**GROUPS, "WORLD_SIZE": "3"}, "groups of 2 processes.*and 3 processes"),
        (
            {**GROUPS, "WORLD_SIZE": "8", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"},
            "groups of 2 .*and 8",
        ),
        ({**SIZES, "PARALLELISM_CONFIG_CP_SIZE": "2"}, "parallelism_config_cp_size is 2; only 1"),
    ],
)
def test_what_is_not_supported_is_rejected_with_what_to_change(launch_env, variables, message):
    with pytest.raises(ValueError, match=message):
        launch_env(**variables)


@pytest.mark.parametrize(("layout", "world_size", "sizes"), [(Layout(), 4, (1, 4)), (Layout(2, 2), 4, (2, 2))])
def test_replicas_times_shards_is_the_number_of_processes(layout, world_size, sizes):
    assert layout.sizes(world_size) == sizes


@pytest.mark.parametrize(("layout", "world_size"), [(Layout(2, 2), 6), (Layout(None, 3), 4), (Layout(8, 1), 4)])
def test_a_layout_of_another_number_of_processes_is_rejected(layout, world_size):
    with pytest.raises(ValueError, match="must be the number of processes"):
        layout.sizes(world_size)


def test_one_process_has_nothing_to_shard():
    trunk = a_trunk()
    assert shard_frozen(trunk, Layout(), torch.device("cpu")) is None and not is_sharded(trunk)
    with gathered(trunk):
        assert not is_sharded(trunk)


def test_one_process_moves_its_base_to_its_device(launch_env, tmp_path):
    """A base is left where it is only if it will move shard by shard."""
    assert launch_env(**FSDP) == Layout()
    trainer = ResumableTrainer(a_trunk(), TrainingArguments(tmp_path, use_cpu=True, report_to=[]))
    trainer._move_model_to_device(trainer.model, torch.device("meta"))
    assert {weight.device.type for weight in trainer.model.parameters()} == {"meta"}


def test_a_model_is_needed_that_has_a_frozen_base(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="use_peft: true"):
        shard_frozen(tiny_model("llama"), Layout(), torch.device("cpu"))
    model = get_peft_model(tiny_model("llama"), lora(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="must be the number of processes"):
        shard_frozen(model, Layout(3, 1), torch.device("cpu"))


def test_a_base_in_8_bit_is_rejected(monkeypatch, tmp_path):
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    trunk = sharding_worker.quantized(tmp_path, load_in_8bit=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="set load_in_4bit instead of load_in_8bit"):
        shard_frozen(trunk, Layout(), torch.device("cpu"))
