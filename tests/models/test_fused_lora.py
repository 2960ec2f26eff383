"""A linear layer and its low-rank update in one operation: PEFT's numbers and gradients, and PEFT itself elsewhere."""

import copy

import pytest
import torch

from onetrunk.models.speedups.fused_lora import lora_linear, lora_linear_reference
from tests.models.branches import ALL_ROLES, a_pack, a_trunk, lora, step_gradients


def calls_of_adapters(trunk):
    """Return a list that grows with each call of an adapter's own module: PEFT calls them, a fused layer does not."""
    calls = []
    for layer in trunk.tuner_layers:
        layer.lora_A["default"].register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("family", "layers"), [("llama", "all"), ("gemma2", "top-2"), ("gpt2", "all")])
def test_outputs_and_gradients_are_those_of_peft(family, layers):
    trunk = a_trunk(family, adapter_layers=layers).train()
    calls = calls_of_adapters(trunk)
    fused, fused_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert bool(calls) == (family == "gpt2")  # GPT-2 has Conv1D layers.
    for layer in trunk.tuner_layers:
        layer.__dict__.pop("forward", None)
    plain, gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert calls
    # float32 sums in another order, through 4 layers with wide weights.
    for name in ("logprobs", "entropy", "values", "next_values", "ref_logprobs"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), atol=2e-5, rtol=1e-5)
    assert fused_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"config": lora(use_dora=True)}, {"dtype": torch.bfloat16}, {"config": lora(lora_bias=True), "family": "phi3"}],
)
def test_other_adapters_and_precisions_run_as_peft_has_them(settings):
    trunk = a_trunk(**settings)
    calls = calls_of_adapters(trunk)
    trunk(pack=a_pack())
    assert calls


def test_a_copy_of_a_trunk_runs_on_its_own_weights():
    trunk = a_trunk()
    copied = copy.deepcopy(trunk)
    with torch.no_grad():
        before = copied(pack=a_pack()).logprobs
        for layer in trunk.tuner_layers:
            layer.lora_B["default"].weight.zero_()
        assert torch.equal(copied(pack=a_pack()).logprobs, before)
        assert not torch.equal(trunk(pack=a_pack()).logprobs, before)


def tensors(shape, has_bias):
    generator = torch.Generator().manual_seed(0)

    def drawn(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    weight, bias = drawn(7, 5), drawn(7) if has_bias else None
    x, lora_a, lora_b = drawn(*shape, 5), drawn(3, 5), drawn(7, 3)
    return x.requires_grad_(), weight, bias, lora_a.requires_grad_(), lora_b.requires_grad_()


def test_by_hand():
    # x = [1, 2]; W x = [1, 2] + b [1, 1]; A x = 1 * 1 + 1 * 2 = 3; B A x = [3, 6], times 0.5.
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.eye(2), torch.ones(2)
    lora_a, lora_b = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0], [2.0]])
    assert lora_linear(x, weight, bias, lora_a, lora_b, 0.5).tolist() == [[3.5, 6.0]]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (2, 1, 3), (0,)])
def test_it_is_its_naive_twin_with_all_gradients(shape, has_bias):
    results = []
    for function in (lora_linear, lora_linear_reference):
        x, weight, bias, lora_a, lora_b = tensors(shape, has_bias)
        y = function(x, weight, bias, lora_a, lora_b, 1.5)
        (y**2 * torch.linspace(1, 2, y.shape[-1], dtype=y.dtype)).sum().backward()
        results.append((y.detach(), x.grad, lora_a.grad, lora_b.grad))
    for fused, naive in zip(*results, strict=True):
        torch.testing.assert_close(fused, naive, atol=1e-10, rtol=1e-10)
