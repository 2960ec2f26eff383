"""What FSDP2 cannot shard, and what tensor parallelism cannot divide."""

import pytest
import torch
from peft import get_peft_model

from onetrunk.parallel.layout import Layout
from onetrunk.parallel.sharding import gathered, is_sharded, shard_frozen
from onetrunk.parallel.tensor import divide_frozen
from tests.models.branches import a_trunk, lora
from tests.parallel import split_worker
from tests.tiny import tiny_model


def test_one_process_has_nothing_to_shard():
    trunk = a_trunk()
    assert shard_frozen(trunk, Layout(), torch.device("cpu")) is None and not is_sharded(trunk)
    with gathered(trunk):
        assert not is_sharded(trunk)


def test_a_model_without_a_frozen_base_and_a_base_in_8_bit_are_rejected(monkeypatch, tmp_path):
    base = tiny_model("llama", hidden_size=64, intermediate_size=128)
    base.save_pretrained(tmp_path / "base")
    trunk = split_worker.quantized(tmp_path, load_in_8bit=True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for model, message in ((base, "use_peft: true"), (trunk, "set load_in_4bit instead of load_in_8bit")):
        with pytest.raises(ValueError, match=message):
            shard_frozen(model, Layout(), torch.device("cpu"))


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
