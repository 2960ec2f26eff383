"""The Triton kernels do the same as their naive twins. Run by test_kernels.py in a process of its own.

That process sets TRITON_INTERPRET=1 before anything imports Triton, or runs on a GPU; small shapes, since the
interpreter takes some milliseconds a program.
"""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from onetrunk.ops import fused_token_logprobs
from onetrunk.ops.kernels import SWITCH
from onetrunk.ops.kernels import logprob as logprob_kernel
from onetrunk.ops.losses import ppo_loss
from onetrunk.types import Experience, LossCoefficients, PackOutput

naive_ppo_loss = partial(ppo_loss, use_kernel=False)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# exp and tanh round differently on a GPU than on a CPU, and so do sums in another order.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
TILE = {
    "chunk_size": 3,
    "chunk_bytes": 8 * 3 * 20,
}  # float64: tiles of 3 x 20, then 2 x 30; float32: twice the columns
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
    return hidden.to(DEVICE, dtype).requires_grad_(), weight.to(DEVICE, dtype), targets.to(DEVICE), options


def both_ways(monkeypatch, function):
    """Return the result of the kernels and that of plain torch."""
    results = []
    for setting in ("on", "off"):
        monkeypatch.setenv(SWITCH, setting)
        results.append(function())
    return results


def logprobs_and_gradients(hidden, weight, targets, entropy_grad, options):
    logprobs, entropy = fused_token_logprobs(hidden, weight, targets, entropy_grad=entropy_grad, **TILE, **options)
    upstream = torch.linspace(-1, 2, len(hidden), device=DEVICE, dtype=logprobs.dtype)
    objective = (upstream * logprobs).sum() + ((upstream.flip(0) * entropy).sum() if entropy_grad else 0)
    return logprobs.detach(), entropy.detach(), torch.autograd.grad(objective, hidden)[0]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("block", [8, 4096])
def test_the_kernel_of_a_tile_is_its_torch_twin(monkeypatch, block, dtype, entropy_grad, options):
    monkeypatch.setattr(logprob_kernel, "BLOCK", block)  # 8: rows of 20 and 40 logits are read in several blocks
    hidden, weight, targets, options = head_case(dtype, **options)
    case = (hidden, weight, targets, entropy_grad, options)
    ours, theirs = both_ways(monkeypatch, lambda: logprobs_and_gradients(*case))
    assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_kernel_of_a_tile_takes_bfloat16_logits(monkeypatch):
    hidden, weight, targets, options = head_case(torch.bfloat16, softcap=2.0)
    case = (hidden, weight, targets, True, options)
    ours, theirs = both_ways(monkeypatch, lambda: logprobs_and_gradients(*case))
    # The same bfloat16 logits, and float32 after them; the weights of the rows may round to a neighbour, 2^-8
    assert_close(ours[:2], theirs[:2], rtol=2e-5, atol=2e-5)
    assert_close(ours[2], theirs[2], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_logprobs_bitwise_the_same_with_and_without_gradients(monkeypatch, dtype):
    monkeypatch.setenv(SWITCH, "on")
    hidden, weight, targets, options = head_case(dtype, softcap=2.0)
    scored = fused_token_logprobs(hidden.detach(), weight, targets, **TILE, **options)
    for entropy_grad in (False, True):
        trained = fused_token_logprobs(hidden, weight, targets, entropy_grad=entropy_grad, **TILE, **options)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained, scored, strict=True))


def loss_case(dtype, rows=37, width=31, seed=0):
    """Return tensors by name, of more tokens than one block of the kernel, with NaN outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    names = "values returns old_values logprobs old_logprobs advantages weights ref_logprobs entropy".split()
    tensors = {name: torch.randn(rows, width, generator=generator, dtype=torch.float64) for name in names}
    tensors["logprobs"] = tensors["old_logprobs"] + 0.3 * tensors["logprobs"]
    tensors["logprobs"][0, :2] = tensors["old_logprobs"][0, :2] + torch.tensor([25.0, -25.0])  # past the limit of 20
    tensors["old_values"] = tensors["values"] + 0.3 * tensors["old_values"]
    tensors["ref_logprobs"][1:] = tensors["logprobs"][1:] + 0.1 * tensors["ref_logprobs"][1:]
    for name in ("advantages", "values", "logprobs"):
        tensors[name][~mask] = torch.nan
    return {"mask": mask.to(DEVICE)} | {name: x.to(DEVICE, dtype) for name, x in tensors.items()}


def loss_and_gradients(function, tensors, coefs, num_tokens):
    trained = {name: tensors.get(name) for name in ("values", "logprobs", "entropy")}
    trained = {name: x.clone().requires_grad_() for name, x in trained.items() if x is not None}
    names = "old_logprobs old_values advantages returns ref_logprobs weights".split()
    experience = Experience(None, loss_mask=tensors["mask"], **{name: tensors.get(name) for name in names})
    loss, stats = function(experience, PackOutput(**trained), coefs, num_tokens)
    (3 * loss).backward()
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in trained.items()}
    return loss.detach(), stats, grads


EVERYTHING = LossCoefficients(0.2, 0.3, 1.5, 0.2, 0.4, 0.05, 0.7, "k3")
POLICY = "logprobs old_logprobs advantages weights ref_logprobs entropy".split()


@pytest.mark.parametrize(
    ("coefs", "left_out"),
    [
        (EVERYTHING, []),
        (LossCoefficients(0.2, beta=0.7, kl_estimator="k2"), ["weights", "entropy"]),
        (LossCoefficients(0.1, beta=0.7, kl_estimator="k1"), ["values", "returns", "old_values"]),
        (LossCoefficients(0.1, value_coef=0.5), ["ref_logprobs"]),
        (LossCoefficients(value_clip=0.2, value_coef=0.5), POLICY),
        (LossCoefficients(), [*POLICY, "old_values"]),
    ],
)
@pytest.mark.parametrize("num_tokens", [None, 1000.0, torch.tensor(77)])
def test_the_kernel_of_the_loss_is_its_naive_twin(monkeypatch, coefs, left_out, num_tokens):
    monkeypatch.setenv(SWITCH, "on")
    tensors = {name: x for name, x in loss_case(torch.float64).items() if name not in left_out}
    num_tokens = num_tokens.to(DEVICE) if isinstance(num_tokens, torch.Tensor) else num_tokens
    ours = loss_and_gradients(ppo_loss, tensors, coefs, num_tokens)
    assert_close(ours, loss_and_gradients(naive_ppo_loss, tensors, coefs, num_tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_the_loss_works_in_float32(monkeypatch, dtype):
    monkeypatch.setenv(SWITCH, "on")
    tensors = loss_case(dtype, rows=3)
    ours, theirs = (loss_and_gradients(f, tensors, EVERYTHING, 40.0) for f in (ppo_loss, naive_ppo_loss))
    assert ours[0].dtype == torch.float32 and ours[2]["logprobs"].dtype == dtype
    # Ratios reach e^20, so that the sums have few digits. The twin rounds two bfloat16 gradients, and their sum.
    assert_close(ours[:2], theirs[:2], rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    assert_close(ours[2], theirs[2], rtol=tolerance, atol=1e-6)


def test_tensors_that_are_not_contiguous_give_the_same_loss(monkeypatch):
    monkeypatch.setenv(SWITCH, "on")
    tensors = loss_case(torch.float64)
    turned = {name: x.T.contiguous().T for name, x in tensors.items()}
    assert not turned["mask"].is_contiguous()
    ours, theirs = (loss_and_gradients(ppo_loss, each, EVERYTHING, None) for each in (turned, tensors))
    assert_close(ours, theirs, rtol=0, atol=0)


def test_a_token_that_is_not_finite_shows_in_the_loss_and_in_its_gradient(monkeypatch):
    monkeypatch.setenv(SWITCH, "on")
    tensors = loss_case(torch.float32, rows=3)
    row, column = tensors["mask"].nonzero()[0].tolist()
    tensors["logprobs"][row, column] = torch.nan
    loss, _, grads = loss_and_gradients(ppo_loss, tensors, EVERYTHING, None)
    assert loss.isnan() and grads["logprobs"][row, column].isnan()
    assert grads["logprobs"].isnan().sum() == 1


def test_a_pack_without_a_counted_token_gives_a_loss_of_zero(monkeypatch):
    monkeypatch.setenv(SWITCH, "on")
    tensors = loss_case(torch.float32, rows=3)
    tensors["mask"][:] = False
    loss, stats, grads = loss_and_gradients(ppo_loss, tensors, EVERYTHING, None)
    assert loss == 0 and not any(x.any() for x in grads.values())
    assert not any(x.any() for group in stats.values() for x in group.values())


def test_a_small_kl_keeps_its_digits(monkeypatch):
    # exp(d) - 1 - d in float32 at d = 1e-4 would be 0 or 1e-7; it is d^2 / 2 = 5e-9
    monkeypatch.setenv(SWITCH, "on")
    d = torch.full((1, 4), 1e-4, device=DEVICE)
    zero = torch.zeros_like(d)
    experience = Experience(None, zero == 0, zero, zero, zero, zero, ref_logprobs=zero)
    _, stats = ppo_loss(experience, PackOutput(logprobs=d), LossCoefficients(kl_estimator="k3", beta=1.0))
    for kl in (stats["policy"]["approx_kl"], stats["kl"]["loss"]):
        assert kl.item() == pytest.approx(5e-9, rel=1e-3)
