"""Bytes and FLOPs against hand-worked numbers and against the modules that they describe."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from onetrunk.costs import ModelShape, reuse_saving, trunk_states_bytes
from onetrunk.models.base_model import decoder_layers
from onetrunk.plan.costs import (
    Gathers,
    Streams,
    forward_flops,
    gathers,
    head_flops,
    kv_cache_bytes,
    layers_above,
    packs_in_flight,
    stage_buffers,
    stage_streams,
    stage_weights,
)
from onetrunk.plan.job import shape_of_config
from tests.tiny import FAMILIES, tiny_model

# 10 x 4 embedding, 2 query heads and 1 key head of size 2, three 4 x 6 matrices.
SHAPE = ModelShape(10, 4, 8, 6, 2, 1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_of_a_layer_are_those_of_its_matrices(family):
    model = tiny_model(family)
    shape = ModelShape.from_config(model.config.get_text_config())
    layer = decoder_layers(model)[0]
    counted = sum(p.numel() for name, p in layer.named_parameters() if p.dim() == 2)
    assert shape.layer_parameters == counted
    assert shape.num_layers == len(decoder_layers(model))
    assert shape.head_parameters == model.get_output_embeddings().weight.numel()


SIZES = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 500}
# Learned positions are not counted, so there are few of them.
SIZES |= {"max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 1536}
MIXTURE = {**GROUPED, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
# Whether the feed-forward block is gated, how many key-value heads there are, and where a mixture has its experts.
KINDS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3", "stablelm", "granite", "starcoder2"), GROUPED),
    **dict.fromkeys(
        ("qwen3", "gemma", "gemma2", "gemma3_text", "nemotron", "arcee", "apertus"), {**GROUPED, "head_dim": 64}
    ),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "codegen", "bloom", "mpt", "persimmon", "gpt_neox", "biogpt"), {}),
    **dict.fromkeys(("opt", "xglm"), {"ffn_dim": 1536}),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "phi": {"intermediate_size": 1536},
    "falcon": {},
    "falcon of one key-value head per head": {"multi_query": False},
    "falcon of the new architecture": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "qwen2_moe": {**MIXTURE, "shared_expert_intermediate_size": 1024},
    "qwen3_moe": {**MIXTURE, "head_dim": 64},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "head_dim": 64},
    "glm4_moe": {**MIXTURE, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 64},
    "llama4_text": {**GROUPED, "num_local_experts": 4, "interleave_moe_layer_step": 1, "head_dim": 64},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_are_those_that_transformers_makes(kind, tmp_path):
    config = AutoConfig.for_model(kind.split()[0], **SIZES, **KINDS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config)
    # Norms, biases and learned positions are not counted: up to 0.41% of models of this width, less of wider ones.
    assert shape.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.005)
    config.save_pretrained(tmp_path)
    assert shape_of_config(json.loads((tmp_path / "config.json").read_text()), "here") == shape


def test_published_sizes():
    falcon = {"model_type": "falcon", "hidden_size": 4544, "n_layer": 32, "n_head": 71, "vocab_size": 65024}
    falcon |= {"multi_query": True, "new_decoder_architecture": False}
    pythia = {"model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    pythia |= {"intermediate_size": 16384, "vocab_size": 50432, "tie_word_embeddings": False}
    qwen = {"model_type": "qwen2_moe", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
    qwen |= {"num_key_value_heads": 4, "vocab_size": 151936, "tie_word_embeddings": False, "intermediate_size": 18944}
    qwen |= {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 2560}
    qwen |= {"shared_expert_intermediate_size": 20480}
    # Falcon's 7.2 counts the embedding twice, which is also its head.
    for config, billions in ((falcon, 7.2 - 0.3), (pythia, 6.9), (qwen, 57.4)):
        assert shape_of_config(config, "here").parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_hand_worked_numbers():
    assert SHAPE.layer_parameters == 4 * 2 * 2 * (2 + 1) + 3 * 4 * 6 == 120
    assert trunk_states_bytes(SHAPE, tokens=5, itemsize=2) == 5 * 4 * 2
    assert kv_cache_bytes(SHAPE, tokens=5, itemsize=2) == 2 * 5 * 8 * 1 * 2 * 2
    assert head_flops(SHAPE, tokens=3) == 2 * 3 * 40
    # Attention over 7 tokens: scores and sums, 2 products of 2 heads x 2 x 7 multiply-adds each.
    assert forward_flops(SHAPE, tokens=3, layers=2, context=7) == 3 * 2 * (2 * 120 + 4 * 7 * 2 * 2)


def test_what_reuse_saves_by_hand():
    # 6 of 8 layers below the cut, 4 epochs, half of the tokens completions: lower 720, upper 240, head 20.
    above = 4 * (1 + 4) * (240 + 20)
    assert reuse_saving(SHAPE, 6, 4, 0.5) == pytest.approx(1 - (above + 2 * 720) / (above + 5 * 2 * 720))
    assert reuse_saving(SHAPE, 0, 4, 0.5) == 0


def test_what_an_iteration_gathers_by_hand():
    # 3 packs, 2 epochs, adapters on all 8 layers: scoring is policy and reference, an update forward and backward.
    assert gathers(SHAPE, 0, 3, 2) == {
        "generate": Gathers(8, 1),
        "score": Gathers(3 * (8 + 8), 1),
        "update": Gathers(2 * 3 * (8 + 8), 2 * 3),
    }
    # Adapters on the top 2: the lower 6 run while sampling alone, once per pack in scoring, or in every forward.
    by_lower = [gathers(SHAPE, 6, 3, 2, lower_layers=lower) for lower in ("sampling", "scoring", "every")]
    assert [found["score"].layers for found in by_lower] == [3 * (2 + 2), 3 * (6 + 2 + 2), 3 * (6 + 2 + 2)]
    assert [found["update"].layers for found in by_lower] == [6 * (2 + 2), 6 * (2 + 2), 6 * (6 + 2 + 2)]
    alone = gathers(SHAPE, 6, 3, 2, has_reference=False)
    assert (alone["score"].layers, alone["update"].layers) == (3 * 2, 6 * (2 + 2))
    # Two layers of 120 weights and three times the 40 outside of them, in float32.
    assert Gathers(2, 3).num_bytes(SHAPE, 4) == 4 * (2 * 120 + 3 * 40)


def test_a_training_stage_holds_its_layers_and_the_embedding_or_the_head():
    # 8 layers of 120 weights, embedding and head of 40.
    assert stage_weights(replace(SHAPE, is_tied=False), (3, 5)) == (3 * 120 + 40, 5 * 120 + 40)
    # A stage in between has neither.
    assert stage_weights(SHAPE, (1, 6, 1))[1] == 6 * 120
    # Tied weights are on both ends, so that together the stages hold more than one process does.
    assert stage_weights(SHAPE, (5, 3)) == (5 * 120 + 40, 3 * 120 + 40)
    # The first layers of a mixture of experts may be dense.
    mixture = replace(SHAPE, num_experts=4, experts_per_token=1, expert_size=3, num_dense_layers=2, is_tied=False)
    assert sum(stage_weights(mixture, (1, 4, 3))) == mixture.parameters
    assert stage_weights(mixture, (1, 4, 3))[0] == 120 + 40


def test_what_a_training_stage_runs_and_keeps_by_hand():
    # Adapters on the last 5 of 8 layers, in stages of 2, 3 and 3: two of them are in the second stage.
    assert layers_above((2, 3, 3), 5) == (0, 2, 3)
    # Three stages: the first runs three forwards before its first backward, the last alternates at once.
    assert [packs_in_flight(stage, 3, 9) for stage in (0, 1, 2)] == [3, 2, 1]
    # Two packs: all forwards come first, on every stage.
    assert [packs_in_flight(stage, 3, 2) for stage in (0, 1, 2)] == [2, 2, 2]
    # The first boundary is below the adapters: one forward for all roles, and no gradients. Above them policy and
    # reference have each their own.
    boundaries = stage_streams((2, 3, 3), 5, has_reference=True)
    assert boundaries == (Streams(0, 0, 0), Streams(1, 1, 0), Streams(2, 1, 1), Streams(0, 0, 0))
    # 9 packs in a minibatch and 18 in a rollout, of which 12 are scored together. The second stage has a buffer for
    # what each pack receives and for its gradients, and keeps what it sent of the 2 packs in flight.
    assert stage_buffers(boundaries, 1, 9, 18) == (12 * (1 + 2), 9 * 1 + 9 * 1 + 2 * 1)
    assert stage_buffers(boundaries, 2, 9, 18) == (12 * 2, 9 * 1)
    # Scoring of few packs has fewer buffers.
    assert stage_buffers(boundaries, 2, 2, 4)[0] == 4 * 2
