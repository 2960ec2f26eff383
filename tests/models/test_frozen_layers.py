"""The layers below the cut run once, without gradient, to the same bits as a full forward; where states are kept."""

import pytest
import torch
from peft import get_peft_model

from onetrunk.models.adapters import adapter_parameters
from onetrunk.models.base_model import decoder_layers
from onetrunk.models.build import build_trunk
from onetrunk.models.frozen_layers import DEVICE_SHARE, TrunkCache, choose_place, verify_cut
from onetrunk.models.trunk import TrunkModel
from tests.models.branches import ALL_ROLES, a_pack, a_trunk, base_weights, counted, lora, same, step_gradients
from tests.tiny import tiny_model


def layers_of(trunk):
    return decoder_layers(trunk.get_base_model())


@pytest.mark.parametrize(
    ("family", "checkpointing"), [("llama", True), ("gemma2", False), ("gpt2", False), ("phi3", True)]
)
def test_outputs_and_gradients_above_the_cut_are_those_of_a_full_forward(family, checkpointing):
    trunk = a_trunk(family, adapter_layers="top-2").train()
    assert trunk.cut == 2
    if checkpointing:
        trunk.activation_checkpointing_enable()
    cut, cut_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    with torch.no_grad():
        states = trunk(pack=a_pack(), roles=("trunk",)).states
    kept, kept_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES, states=states)
    trunk.cut = 0
    full, full_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert same(cut, kept) and same(cut_gradients, kept_gradients) and same(cut.states, states)
    assert full.states is None and same(cut._replace(states=None), full) and same(cut_gradients, full_gradients)
    # Seven (GPT-2, Phi: four) linears in each of two layers, A and B.
    assert len(cut_gradients) == 2 * 2 * (4 if family in ("gpt2", "phi3") else 7)
    assert all(gradient.any() for gradient in cut_gradients.values())


@pytest.mark.parametrize(
    ("roles", "passes"), [(("policy", "value"), 1), (ALL_ROLES, 2), (("value",), 1), (("trunk",), 0)]
)
def test_lower_layers_run_once_a_pack_whatever_the_roles(roles, passes):
    trunk = a_trunk(adapter_layers="top-1")
    with counted(layers_of(trunk)) as counts:
        states = trunk(pack=a_pack(), roles=roles).states
    assert counts == [1, 1, 1, passes]
    assert (states is not None) == ("trunk" in roles)
    states = trunk(pack=a_pack(), roles=("trunk",)).states
    with counted(layers_of(trunk)) as counts:
        trunk(pack=a_pack(), roles=roles, states=states)
    assert counts == [0, 0, 0, passes]


def test_no_gradient_is_formed_below_the_cut_even_where_the_embedding_asks_for_it():
    trunk = a_trunk(adapter_layers="top-2").train()
    trunk.activation_checkpointing_enable()  # makes the embedding's output require grad
    before, seen = base_weights(trunk), []
    for layer in list(layers_of(trunk))[:2]:
        layer.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    output, found = step_gradients(trunk, a_pack(), roles=("policy", "trunk"))
    assert seen == [False, False] and not output.states.requires_grad
    assert found and not any(f".layers.{i}." in name for name in found for i in (0, 1))
    assert same(before, base_weights(trunk))


@pytest.mark.parametrize("setting", ["top-0", "top-5", "top-x", "half"])
def test_what_is_no_choice_of_layers_is_refused_with_a_sentence(setting):
    with pytest.raises(ValueError, match=rf"adapter_layers is '{setting}'; it must be .* 4 layers.*top-"):
        TrunkModel(tiny_model("llama"), lora(), adapter_layers=setting)


def test_a_model_that_shares_keys_and_values_is_refused_for_a_cut():
    base = tiny_model("llama")
    base.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="llama shares keys and values across 2 layers"):
        TrunkModel(base, lora(), adapter_layers="top-2")


def test_a_layer_that_reads_more_than_the_states_below_it_is_refused_for_a_cut():
    base = tiny_model("llama")
    layers, kept = decoder_layers(base), []
    layers[1].register_forward_hook(lambda _layer, _args, output: kept.append(output))
    layers[3].register_forward_hook(lambda _layer, _args, output: output + kept[-1])
    verify_cut(base, 1)  # both on the same side
    with pytest.raises(ValueError, match="LlamaModel can't be run in two halves"):
        verify_cut(base, 2)


def test_states_of_a_continued_adapter_are_those_of_the_frozen_part():
    sft = get_peft_model(tiny_model("llama"), lora(init_lora_weights=False))
    trunk = build_trunk(sft, adapter_layers="top-2")
    before = trunk(pack=a_pack(), roles=("trunk",)).states
    with torch.no_grad():
        for adapter in ("default", "reference"):
            named = adapter_parameters(trunk, adapter).items()
            lower = [p for name, p in named if ".layers.0." in name or ".layers.1." in name]
            assert len(lower) == 28 and not any(p.requires_grad for p in lower)
            assert all(p.any() for p in lower)
        for parameter in trunk.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert same(trunk(pack=a_pack(), roles=("trunk",)).states, before)
    with torch.no_grad():
        cut = trunk(pack=a_pack(), roles=("policy", "value", "reference"))
        trunk.cut = 0
        assert same(trunk(pack=a_pack(), roles=("policy", "value", "reference")), cut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["device", "cpu"])
def test_every_place_gives_back_the_same_bits(place, dtype):
    states = torch.randn(3, 7, 16).to(dtype)
    kept = TrunkCache(place).keep(states)
    assert kept.dtype == dtype and torch.equal(kept, states)


@pytest.mark.gpu
def test_auto_prefers_the_gpu_and_leaves_room_on_it():
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    assert choose_place("auto", 1, device) == "device"
    assert choose_place("auto", int(DEVICE_SHARE * total) + 1, device) == "cpu"
    states = torch.randn(3, 7, 16, device=device)
    kept = TrunkCache("cpu").keep(states)
    assert kept.is_pinned() and torch.equal(kept.to(device), states)
