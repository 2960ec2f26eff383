"""A linear layer and its low-rank update in one operation: the same numbers and gradients as one by one."""

import pytest
import torch

from onetrunk.models.speedups.fused_lora import lora_linear, lora_linear_reference


def tensors(shape, inputs=5, outputs=7, rank=3, dtype=torch.float64, has_bias=True):
    generator = torch.Generator().manual_seed(0)

    def drawn(*size):
        return torch.randn(size, generator=generator, dtype=dtype)

    weight, bias = drawn(outputs, inputs), drawn(outputs) if has_bias else None
    x, lora_a, lora_b = drawn(*shape, inputs), drawn(rank, inputs), drawn(outputs, rank)
    return x.requires_grad_(), weight, bias, lora_a.requires_grad_(), lora_b.requires_grad_()


def test_by_hand():
    # x = [1, 2]; W x = [1, 2] + b [1, 1]; A x = 1 * 1 + 1 * 2 = 3; B A x = [3, 6], times 0.5.
    x, weight, bias = torch.tensor([[1.0, 2.0]]), torch.eye(2), torch.ones(2)
    lora_a, lora_b = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0], [2.0]])
    assert lora_linear(x, weight, bias, lora_a, lora_b, 0.5).tolist() == [[3.5, 6.0]]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3), (0,)])
def test_it_is_its_naive_twin_with_all_gradients(shape, has_bias):
    results = []
    for function in (lora_linear, lora_linear_reference):
        x, weight, bias, lora_a, lora_b = tensors(shape, has_bias=has_bias)
        y = function(x, weight, bias, lora_a, lora_b, 1.5)
        (y**2 * torch.linspace(1, 2, y.shape[-1], dtype=y.dtype)).sum().backward()
        results.append((y.detach(), x.grad, lora_a.grad, lora_b.grad))
    for fused, naive in zip(*results, strict=True):
        torch.testing.assert_close(fused, naive, atol=1e-10, rtol=1e-10)


def test_the_gradient_is_that_of_finite_differences():
    x, weight, bias, lora_a, lora_b = tensors((2, 3))
    assert torch.autograd.gradcheck(
        lambda *moving: lora_linear(moving[0], weight, bias, *moving[1:], 1.5), (x, lora_a, lora_b)
    )
