"""Sampling from packed weights: the same completions, and a model that is unchanged afterwards."""

import pytest
import torch

from onetrunk.models.speedups import merged as packed
from onetrunk.models.speedups.merged import merged_policy, packed_weights
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts import LocalBackend
from tests.models.branches import a_trunk, lora, move
from tests.rollouts.small import KEYS, PROMPTS, mixed_params, tiny
from tests.tiny import FAMILIES

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def packs_small_weights(monkeypatch):
    monkeypatch.setattr(packed, "LEAST_NUMBERS", 1)


def packed_layers(model):
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), packed._PackedForward)]


def trunk_of(family="llama", **settings):
    trunk = TrunkModel(tiny(family), lora(), **settings)
    move(trunk)
    return trunk


def sample(model, monkeypatch, packs=True, **settings):
    with monkeypatch.context() as patch:
        if not packs:
            patch.setattr(packed, "LEAST_NUMBERS", 10**9)
        return LocalBackend(model).generate(PROMPTS, mixed_params(**settings), KEYS, keeps_states=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 64), (16, 1, 64), (4, 50, 64), (64,)])
def test_a_packed_product_is_the_usual_one(shape, bias):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(64, 96, bias=bias), torch.randn(shape)
    with torch.no_grad():
        expected = linear(x)
        found = packed._PackedForward(linear)(x)
    assert found.shape == expected.shape
    # Sums of 64 float32 products in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", ["all", "top-2"])
def test_completions_logprobs_and_states_are_those_of_the_usual_products(layers, family, monkeypatch):
    trunk = trunk_of(family, adapter_layers=layers)
    with merged_policy(trunk), packed_weights(trunk):
        # GPT-2's blocks are no linear layers.
        assert bool(packed_layers(trunk)) == (family != "gpt2")
    found, usual = (sample(trunk, monkeypatch, packs) for packs in (True, False))
    assert found.completion_ids == usual.completion_ids
    for pair in zip(found.sampler_logprobs, usual.sampler_logprobs, strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-4)
    if layers == "top-2":
        # The frozen layers are not packed: what training starts from has the same bits.
        assert torch.equal(found.states[:, : max(map(len, PROMPTS))], usual.states[:, : max(map(len, PROMPTS))])


def test_packed_weights_take_the_place_of_merged_ones_and_everything_is_restored():
    trunk = trunk_of(adapter_layers="top-2")
    before = {name: (p.data_ptr(), p.clone()) for name, p in trunk.named_parameters()}
    with torch.no_grad(), merged_policy(trunk), packed_weights(trunk):
        layers = packed_layers(trunk)
        # Seven matrices in each of two layers.
        assert len(layers) == 2 * 7
        trunk(input_ids=torch.tensor([[5, 6, 7]]))
        assert all(layer.weight.numel() == 0 and layer.forward.packed is not None for layer in layers)
    assert not packed_layers(trunk)
    for name, parameter in trunk.named_parameters():
        pointer, value = before[name]
        assert parameter.data_ptr() == pointer and torch.equal(parameter, value)


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_build_whose_packed_products_are_wrong_or_fail_takes_the_usual_way(fault, monkeypatch):
    def faulty(x, weight, bias):
        if fault == "raises":
            raise RuntimeError("not supported")
        return torch.full((*x.shape[:-1], len(bias)), torch.nan)

    trunk = a_trunk()
    monkeypatch.setattr(packed, "_packed_linear", faulty)
    packed._is_right.cache_clear()
    try:
        with torch.no_grad(), merged_policy(trunk), packed_weights(trunk):
            assert not packed_layers(trunk)
    finally:
        packed._is_right.cache_clear()
