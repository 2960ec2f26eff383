"""The layout that a launch asks for."""

import os

import pytest

from onetrunk.parallel.groups import num_data_processes
from onetrunk.parallel.layout import Layout

DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
SIZES = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}
GROUPS = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}


def test_the_accelerate_config_decides_the_groups_of_tensor_parallelism(launch_env):
    assert launch_env(**GROUPS, WORLD_SIZE="2") == Layout(tensor=2)
    assert launch_env(**GROUPS, WORLD_SIZE="6") == Layout(3, tensor=2)
    assert num_data_processes(6) == 3 and os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"


def test_the_accelerate_config_decides_the_layout(launch_env, monkeypatch):
    assert launch_env() is None
    assert launch_env(**FSDP) == Layout()
    assert launch_env(**FSDP, **SIZES, PARALLELISM_CONFIG_DP_SHARD_SIZE="4", WORLD_SIZE="8") == Layout(2)
    # accelerate must not wrap the model itself.
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (DEEPSPEED, "ZeRO-3 is not supported.*fsdp2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "set fsdp_version: 2"),
        ({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params: true is not supported.*4 bit"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "set activation_checkpointing in the trainer"),
        ({**FSDP, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward: false is .* set it to true"),
        ({**GROUPS, "WORLD_SIZE": "4", **FSDP}, "tp_size is 2 and the config also shards"),
        ({**GROUPS, "WORLD_SIZE": "3"}, "groups of 2 processes.*and 3 processes"),
        ({**GROUPS, "WORLD_SIZE": "8", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "groups of 2 .*and 8"),
        ({**FSDP, **SIZES, "WORLD_SIZE": "3"}, "dp_shard_size must be the number of processes"),
        (
            {**FSDP, **SIZES, "WORLD_SIZE": "6", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"},
            "must be the number of processes",
        ),
        ({**SIZES, "PARALLELISM_CONFIG_CP_SIZE": "2"}, "parallelism_config_cp_size is 2; only 1"),
    ],
)
def test_what_is_not_supported_is_rejected_with_what_to_change(launch_env, variables, message):
    with pytest.raises(ValueError, match=message):
        launch_env(**variables)
