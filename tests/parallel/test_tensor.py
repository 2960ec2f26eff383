"""What tensor parallelism cannot divide is rejected with what to do."""

import pytest
import torch
from peft import get_peft_model

from onetrunk.parallel.sharding import Layout
from onetrunk.parallel.tensor import divide_frozen
from tests.models.branches import a_trunk, lora
from tests.tiny import tiny_model


def divided(trunk, size=2):
    return divide_frozen(trunk, Layout(1, 1, tensor=size), torch.device("cpu"))


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


def test_a_model_whose_weights_all_train_is_rejected():
    with pytest.raises(ValueError, match="all weights of this model train; set use_peft: true"):
        divided(tiny_model("llama"))


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
