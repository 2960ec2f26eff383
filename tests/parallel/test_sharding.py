"""The layout that a launch asks for, what FSDP2 cannot shard, and what tensor parallelism cannot divide."""

import os

import pytest
import torch
from peft import get_peft_model

from onetrunk.parallel.groups import num_data_processes
from onetrunk.parallel.sharding import Layout, gathered, is_sharded, shard_frozen
from onetrunk.parallel.tensor import divide_frozen
from tests.models.branches import a_trunk, lora
from tests.parallel import split_worker
from tests.tiny import tiny_model

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
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "ZeRO-3 is not supported.*fsdp2",
        ),
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


def test_one_process_has_nothing_to_shard():
    trunk = a_trunk()
    assert shard_frozen(trunk, Layout(), torch.device("cpu")) is None and not is_sharded(trunk)
    with gathered(trunk):
        assert not is_sharded(trunk)


def test_a_model_is_needed_that_has_a_frozen_base(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="use_peft: true"):
        shard_frozen(tiny_model("llama"), Layout(), torch.device("cpu"))


def test_a_base_in_8_bit_is_rejected(monkeypatch, tmp_path):
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    trunk = split_worker.quantized(tmp_path, load_in_8bit=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="set load_in_4bit instead of load_in_8bit"):
        shard_frozen(trunk, Layout(), torch.device("cpu"))


def divided(trunk, size=2):
    return divide_frozen(trunk, Layout(tensor=size), torch.device("cpu"))


@pytest.mark.parametrize(
    ("build", "size", "message"),
    [
        (lambda: a_trunk("gpt2"), 2, "not supported for GPT2LMHeadModel: transformers has no plan.*fsdp2.yaml"),
        (lambda: a_trunk(config=lora(use_dora=True)), 2, "DoRA needs the norms of whole matrices"),
        (a_trunk, 4, "num_key_value_heads 2, which 4 processes cannot divide; set parallelism_config_tp_size"),
        (a_trunk, 3, "num_attention_heads 4, which 3 processes cannot divide"),
    ],
)
def test_a_model_that_cannot_be_divided_is_rejected_with_what_to_do(build, size, message):
    with pytest.raises(ValueError, match=message):
        divided(build(), size)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, {}, "divides lm_head, and it trains; train adapters only"),
        ({"trainable_token_indices": {"embed_tokens": [5]}}, {}, "divides model.embed_tokens, and it trains"),
        ({"lora_dropout": 0.1}, {}, r"not supported with dropout \(model.layers.0.*lora_dropout.default\)"),
        ({}, {"attention_dropout": 0.1}, r"not supported with dropout \(model.layers.0.self_attn.attention_dropout\)"),
    ],
)
def test_what_would_not_be_alike_on_the_processes_of_a_group_is_rejected(changes, settings, message):
    model = get_peft_model(tiny_model("llama", **settings), lora(task_type="CAUSAL_LM", **changes))
    with pytest.raises(ValueError, match=message):
        divided(model)
