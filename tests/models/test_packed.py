"""Sampling from packed weights: the same completions, and a model that is unchanged afterwards."""

import pytest
import torch
from torch import nn

from onetrunk.models.speedups import packed
from onetrunk.models.speedups.packed import packable_layers, packed_weights
from onetrunk.rollouts import LocalBackend
from tests.models.branches import a_trunk
from tests.rollouts.small import KEYS, PROMPTS, generate, mixed_params, tiny
from tests.tiny import FAMILIES

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def packs_small_weights(monkeypatch):
    monkeypatch.setattr(packed, "LEAST_NUMBERS", 1)


def layer(inputs=64, outputs=96, bias=True):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 64), (16, 1, 64), (4, 50, 64), (64,)])
def test_a_packed_product_is_the_usual_one(shape, bias, packs_small_weights):
    linear, x = layer(bias=bias), torch.randn(shape)
    with torch.no_grad():
        expected = linear(x)
        with packed_weights(linear):
            found = linear(x)
            assert linear.forward.packed is not None
    assert found.shape == expected.shape
    # Sums of 64 float32 products in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
def test_completions_and_logprobs_are_those_of_the_usual_products(family, packs_small_weights, monkeypatch):
    model, params = tiny(family), mixed_params()
    layers = packable_layers(model)
    calls = []
    original = packed._packed_linear
    monkeypatch.setattr(packed, "_packed_linear", lambda *args: calls.append(1) or original(*args))
    rollout = generate(model, params)
    # GPT-2's blocks are no linear layers; its head is one.
    assert len(layers) == (1 if family == "gpt2" else len(layers)) and len(calls) >= len(layers)
    monkeypatch.setattr(packed, "HOST_SHARE", 0.0)
    assert not packable_layers(model)
    expected = generate(model, params)
    assert rollout.completion_ids == expected.completion_ids
    for found, usual in zip(rollout.sampler_logprobs, expected.sampler_logprobs, strict=True):
        torch.testing.assert_close(found, usual, rtol=0, atol=1e-4)


@needs_onednn
def test_the_merged_policy_is_packed_and_everything_is_restored(packs_small_weights, monkeypatch):
    trunk, params = a_trunk(adapter_layers="top-2"), mixed_params()
    before = {name: (p.data_ptr(), p.clone()) for name, p in trunk.named_parameters()}
    rollout = LocalBackend(trunk).generate(PROMPTS, params, KEYS, keeps_states=True)
    assert not any(isinstance(vars(m).get("forward"), packed._PackedForward) for m in trunk.modules())
    for name, parameter in trunk.named_parameters():
        pointer, value = before[name]
        assert parameter.data_ptr() == pointer and torch.equal(parameter, value)
    monkeypatch.setattr(packed, "HOST_SHARE", 0.0)
    expected = LocalBackend(trunk).generate(PROMPTS, params, KEYS, keeps_states=True)
    assert rollout.completion_ids == expected.completion_ids
    # States at the cut are used in training: float32 sums in another order, through two layers.
    torch.testing.assert_close(rollout.states, expected.states, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_weights_that_changed_between_rollouts_are_packed_again(packs_small_weights):
    model, params = tiny(), mixed_params(temperature=0)
    first = generate(model, params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.0)
    changed = generate(model, params)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.0)
    assert generate(model, params).completion_ids == first.completion_ids != changed.completion_ids


def test_an_exception_inside_leaves_no_packed_layer(packs_small_weights):
    linear = layer()
    with pytest.raises(KeyError), packed_weights(linear):
        raise KeyError
    assert "forward" not in vars(linear)


@pytest.mark.parametrize("how", ["gradients", "autocast", "half input"])
def test_products_that_packing_does_not_compute_take_the_usual_way(how, packs_small_weights):
    linear, x = layer(), torch.randn(3, 64)
    if how == "half input":
        linear, x = linear.bfloat16(), x.bfloat16()
    is_autocast = how == "autocast"
    with torch.set_grad_enabled(how == "gradients"), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        expected = linear(x)
        with packed_weights(linear):
            found = linear(x)
    assert torch.equal(found, expected) and found.dtype == expected.dtype
    assert found.requires_grad == (how == "gradients")


@pytest.mark.parametrize("change", [lambda x: x.bfloat16(), lambda x: x.double(), lambda x: x.to("meta")])
def test_other_dtypes_and_devices_are_not_packed(change, packs_small_weights):
    assert packable_layers(change(layer())) == []


def test_small_matrices_and_copies_that_do_not_fit_are_not_packed(monkeypatch):
    assert packable_layers(layer(64, 96)) == []
    large = layer(256, 256)
    expected = [large] if torch.backends.mkldnn.is_available() else []
    assert packable_layers(large) == expected
    monkeypatch.setattr(packed, "HOST_SHARE", large.weight.nbytes / packed.host_memory_bytes() * 0.99)
    assert packable_layers(large) == []


@needs_onednn
@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_build_whose_packed_products_are_wrong_or_fail_takes_the_usual_way(fault, packs_small_weights, monkeypatch):
    def faulty(x, weight, bias):
        if fault == "raises":
            raise RuntimeError("not supported")
        return torch.full((*x.shape[:-1], len(bias)), torch.nan)

    monkeypatch.setattr(packed, "_packed_linear", faulty)
    packed._is_right.cache_clear()
    try:
        assert packable_layers(layer()) == []
    finally:
        packed._is_right.cache_clear()
