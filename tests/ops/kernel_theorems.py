"""The Triton kernels do the same as their naive twins. Run by test_kernels.py in a process of its own.

That process sets TRITON_INTERPRET=1 before anything imports Triton, or runs on a GPU; small shapes, since the
interpreter takes some milliseconds a program.
"""

import pytest
import torch
from torch.testing import assert_close

from onetrunk.ops import Head, fused_token_logprobs
from onetrunk.ops.kernels import SWITCH
from onetrunk.ops.kernels import logprob as logprob_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# exp and tanh round differently on a GPU than on a CPU, and so do sums in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
# float64: tiles of 3 x 20, then 2 x 30; float32: twice the columns
TILE = {"chunk_size": 3, "chunk_bytes": 8 * 3 * 20}
WAYS = [
    {},
    {"temperature": 0.7, "logit_scale": 1.5, "bias": True},
    {"temperature": 0.7, "softcap": 2.0, "logit_scale": 1.5, "bias": True},
]


def head_case(dtype, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 8), (50, 8), (50,)))
    options = {name: bias if name == "bias" else value for name, value in options.items()}
    options = {name: x.to(DEVICE, dtype) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    targets = torch.randint(50, (5,), generator=generator)
    return hidden.to(DEVICE, dtype).requires_grad_(), Head(weight.to(DEVICE, dtype), **options), targets.to(DEVICE)


def both_ways(monkeypatch, function):
    """Return the result of the kernels and that of plain torch."""
    results = []
    for setting in ("on", "off"):
        monkeypatch.setenv(SWITCH, setting)
        results.append(function())
    return results


def logprobs_and_gradients(hidden, head, targets, entropy_grad):
    logprobs, entropy = fused_token_logprobs(hidden, head, targets, entropy_grad=entropy_grad, **TILE)
    upstream = torch.linspace(-1, 2, len(hidden), device=DEVICE, dtype=logprobs.dtype)
    objective = (upstream * logprobs).sum() + ((upstream.flip(0) * entropy).sum() if entropy_grad else 0)
    return logprobs.detach(), entropy.detach(), torch.autograd.grad(objective, hidden)[0]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("block", [8, 4096])
def test_the_kernel_of_a_tile_is_its_torch_twin(monkeypatch, block, dtype, entropy_grad, options):
    monkeypatch.setattr(logprob_kernel, "BLOCK", block)  # 8: rows of 20 and 40 logits are read in several blocks
    case = (*head_case(dtype, **options), entropy_grad)
    ours, theirs = both_ways(monkeypatch, lambda: logprobs_and_gradients(*case))
    assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_kernel_of_a_tile_takes_bfloat16_logits(monkeypatch):
    case = (*head_case(torch.bfloat16, softcap=2.0), True)
    ours, theirs = both_ways(monkeypatch, lambda: logprobs_and_gradients(*case))
    # The same bfloat16 logits, and float32 after them; the weights of the rows may round to a neighbour, 2^-8
    assert_close(ours[:2], theirs[:2], rtol=2e-5, atol=2e-5)
    assert_close(ours[2], theirs[2], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_logprobs_bitwise_the_same_with_and_without_gradients(monkeypatch, dtype):
    monkeypatch.setenv(SWITCH, "on")
    hidden, head, targets = head_case(dtype, softcap=2.0)
    scored = fused_token_logprobs(hidden.detach(), head, targets, **TILE)
    for entropy_grad in (False, True):
        trained = fused_token_logprobs(hidden, head, targets, entropy_grad=entropy_grad, **TILE)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained, scored, strict=True))
