from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from onetrunk.ops import Head, fused_token_logprobs, token_logprobs
from tests.ops.test_losses import EXACT, many

WAYS = [
    {},
    {"temperature": 0.7},
    {"softcap": 2.0},
    {"logit_scale": 0.25},
    {"bias": True},
    {"temperature": 0.7, "softcap": 2.0, "logit_scale": 1.5, "bias": True},
]


def case(n=7, width=5, vocab=11, dtype=torch.float64, seed=0, bias=False, **options):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(vocab, (n,), generator=generator)
    if bias:
        options["bias"] = torch.randn(vocab, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, Head(weight, **options), targets


def gradient(function, hidden, head, targets, *, upstream, entropy_upstream=None, **sizes):
    logprobs, entropy = function(hidden, head, targets, **sizes)
    objective = (upstream * logprobs).sum()
    if entropy_upstream is not None:
        objective = objective + (entropy_upstream * entropy).sum()
    return torch.autograd.grad(objective, hidden)[0]


class LargestTensor(TorchDispatchMode):
    """Remember the number of elements of the largest result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("function", [token_logprobs, fused_token_logprobs])
def test_logprobs_and_entropy_of_two_tokens_by_hand(function):
    # Logits log 1, log 3: probabilities 1/4 and 3/4.
    hidden, weight = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[1.0], [3.0]], dtype=torch.float64).log()
    logprobs, entropy = function(hidden, Head(weight), torch.tensor([0, 1]))
    assert_close(logprobs, torch.tensor([0.25, 0.75], dtype=torch.float64).log(), **EXACT)
    # -(.25 * log .25 + .75 * log .75) = .562335
    assert_close(entropy, torch.full((2,), 0.562335, dtype=torch.float64), rtol=0, atol=1e-6)
    # Temperature .5 doubles the logits: probabilities 1/10 and 9/10.
    cooler, _ = function(hidden, Head(weight, temperature=0.5), torch.tensor([0, 1]))
    assert_close(cooler.exp(), torch.tensor([0.1, 0.9], dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("function", [token_logprobs, fused_token_logprobs])
def test_scale_comes_before_the_cap_and_temperature_after_it(function):
    hidden, weight = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, 1.0], dtype=torch.float64)
    head = Head(weight, bias, temperature=4.0, softcap=2.0, logit_scale=0.5)
    logprobs, _ = function(hidden, head, torch.tensor([1]))
    # (3 + 1) * .5 = 2; 2 * tanh(2 / 2) = 1.523188; / 4 = .380797; against logit 0: sigmoid
    expected = torch.tensor([1.5231883119115297 / 4], dtype=torch.float64).sigmoid().log()
    assert_close(logprobs, expected, **EXACT)


def test_no_operation_returns_more_than_one_tile_of_logits():
    n, vocab, chunk_size = 40, 50, 4
    operands = case(n, 3, vocab)
    for chunk_bytes, columns in ((10**6, 50), (8 * chunk_size * 20, 20)):
        with LargestTensor() as fused:
            logprobs, entropy = fused_token_logprobs(
                *operands, chunk_size=chunk_size, chunk_bytes=chunk_bytes, entropy_grad=True
            )
            (logprobs + entropy).sum().backward()
        # With 20 columns the largest tensors are those of the tokens, [40, 3]
        assert fused.numel == max(chunk_size * columns, n * 3)
    with LargestTensor() as naive:
        token_logprobs(*operands)
    assert naive.numel == n * vocab


@many
@given(
    n=st.integers(0, 9),
    vocab=st.integers(1, 12),
    columns=st.integers(1, 13),
    chunk_size=st.integers(1, 10),
    seed=st.integers(0, 99),
    way=st.sampled_from(WAYS),
    scale=st.sampled_from([0.1, 1.0, 40.0]),
    entropy_grad=st.booleans(),
)
def test_fused_is_naive_for_any_tile(n, vocab, columns, chunk_size, seed, way, scale, entropy_grad):
    operands = case(n, 4, vocab, seed=seed, **{"logit_scale": scale, **way})
    upstream = torch.linspace(-1, 1, n, dtype=torch.float64)
    tile = {"chunk_size": chunk_size, "chunk_bytes": max(1, 8 * min(n, chunk_size) * columns)}
    assert_close(fused_token_logprobs(*operands, **tile), token_logprobs(*operands), **EXACT)
    upstreams = {"upstream": upstream, "entropy_upstream": upstream.flip(0) if entropy_grad else None}
    ours = gradient(fused_token_logprobs, *operands, **tile, entropy_grad=entropy_grad, **upstreams)
    assert_close(ours, gradient(token_logprobs, *operands, **upstreams), **EXACT)
    assert not fused_token_logprobs(*operands, **tile)[1].requires_grad


@pytest.mark.parametrize("order", [1, -1])
def test_logits_of_any_size_overflow_nothing_whichever_tile_has_the_largest(order):
    # Logits from -9,000 to 9,000, rising or falling from tile to tile: exp of any but the largest is 0 or infinite
    weight = torch.linspace(-900, 900, 37)[:, None] * order
    hidden, targets = torch.full((3, 1), 10.0, requires_grad=True), torch.tensor([0, 18, 36])
    operands, upstream = (hidden, Head(weight), targets), torch.ones(3)
    fused = fused_token_logprobs(*operands, chunk_bytes=4 * 3 * 5)
    assert_close(fused, token_logprobs(*operands), rtol=1e-6, atol=0)
    ours = gradient(fused_token_logprobs, *operands, upstream=upstream, chunk_bytes=4 * 3 * 5)
    assert_close(ours, gradient(token_logprobs, *operands, upstream=upstream), rtol=1e-6, atol=0)


def test_a_tile_of_forbidden_tokens_leaves_the_logprobs_as_they_are():
    # A padded vocabulary whose tail, and here its head too, has the bias -inf
    hidden, head, targets = case(vocab=12)
    bias = torch.zeros(12, dtype=torch.float64)
    bias[:4] = bias[10:] = -torch.inf
    ours, _ = fused_token_logprobs(hidden, replace(head, bias=bias), 4 + targets % 6, chunk_bytes=8 * 7 * 2)
    allowed = (hidden, Head(head.weight[4:10]), targets % 6)
    assert_close(ours, token_logprobs(*allowed)[0], **EXACT)
    ours = torch.autograd.grad(ours.sum(), hidden)[0]
    assert_close(ours, gradient(token_logprobs, *allowed, upstream=torch.ones(7, dtype=torch.float64)), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_nearly_certain_token_keeps_its_digits(dtype):
    # Logits 0 and 12: 1 - p = 6e-6, which 1 - p in bfloat16, or W_y - sum p W in float32, would round to 0
    weight, hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype), torch.tensor([[0.0, 12.0]], dtype=dtype)
    operands = (hidden.requires_grad_(), Head(weight), torch.tensor([1]))
    ours = gradient(fused_token_logprobs, *operands, upstream=torch.ones(1))
    exact = torch.tensor([[-1.0, 1.0]], dtype=torch.float64) / (1 + torch.tensor(12.0, dtype=torch.float64).exp())
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6  # two roundings of the dtype
    assert_close(ours.double(), exact, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"chunk_size": 16, "chunk_bytes": 4 * 16 * 32}])
def test_the_forward_is_bitwise_the_same_with_and_without_grad(dtype, entropy_grad, sizes):
    hidden, head, targets = case(33, 24, 301, dtype=dtype, temperature=0.9, softcap=30.0)
    trained = fused_token_logprobs(hidden, head, targets, **sizes, entropy_grad=entropy_grad)
    with torch.no_grad():
        scored = fused_token_logprobs(hidden, head, targets, **sizes)
    frozen = fused_token_logprobs(hidden.detach(), head, targets, **sizes, entropy_grad=entropy_grad)
    for with_grad, without, detached in zip(trained, scored, frozen, strict=True):
        assert torch.equal(with_grad, without) and torch.equal(with_grad, detached)
    assert trained[0].requires_grad and not scored[0].requires_grad and not frozen[0].requires_grad


def test_no_gradient_vectors_are_computed_if_no_gradient_is_needed():
    hidden, head, targets = case(8, 3, 50)

    def products(states):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            fused_token_logprobs(states, head, targets, chunk_size=4)
        return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm_"))

    with torch.no_grad():
        assert products(hidden) == 2  # two chunks, one product each
    assert products(hidden.detach()) == 2
    assert products(hidden) == 4


def test_bfloat16_runs_the_arithmetic_of_the_naive_twin_and_returns_float32():
    hidden, head, targets = case(33, 24, 301, dtype=torch.bfloat16, temperature=0.9, softcap=30.0)
    naive, fused = token_logprobs(hidden, head, targets), fused_token_logprobs(hidden, head, targets, chunk_size=8)
    upstream = torch.randn(33, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(fused, naive, strict=True):
        assert ours.dtype == theirs.dtype == torch.float32
        # bfloat16 products of other heights may round a logit of about 16 by one unit, .06
        assert_close(ours, theirs, rtol=0, atol=0.1)
    precise = (hidden.detach().double().requires_grad_(), replace(head, weight=head.weight.double()), targets)
    exact = gradient(token_logprobs, *precise, upstream=upstream)
    ours = gradient(fused_token_logprobs, hidden, head, targets, upstream=upstream, chunk_size=8)
    assert ours.dtype == torch.bfloat16
    # Two roundings to bfloat16 of relative size 2^-8, the logits and the gradient of the logits
    assert (ours.double() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"weight": torch.zeros(11, 5).requires_grad_()}, "the weight of the head requires grad.*freeze the head"),
        ({"bias": torch.zeros(11).requires_grad_()}, "the bias of the head requires grad"),
        ({"weight": torch.zeros(11, 4)}, r"weight \[11, 4\] and targets \[7\]; expected \[N, H\], \[V, H\] and \[N\]"),
        ({"weight": torch.zeros(2, 5)}, "targets go from .*expected token ids of the head's vocabulary, 0 to 1"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    hidden, head, targets = case()
    with pytest.raises(ValueError, match=message):
        fused_token_logprobs(hidden, replace(head, **changes), targets)


class CastsOf(TorchDispatchMode):
    """Count the copies of one tensor into another dtype."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor, self.count = tensor, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default and args[0] is self.tensor
        return func(*args, **(kwargs or {}))


def test_float32_gradients_are_those_of_the_naive_twin_at_a_vocabulary_of_many_tiles():
    hidden, head, targets = case(40, 64, 30_000, dtype=torch.float32)
    args = (hidden * 0.3, head, targets)
    upstream = torch.randn(40, generator=torch.Generator().manual_seed(1))
    naive = gradient(token_logprobs, *args, upstream=upstream)
    ours = gradient(fused_token_logprobs, *args, upstream=upstream, chunk_bytes=4 * 40 * 512)
    # Sums of 30,000 terms in another order; entries are about 1
    assert_close(ours, naive, rtol=1e-5, atol=1e-5)


def test_autocast_acts_as_on_the_head_of_a_model_and_casts_the_weight_once():
    hidden, head, targets = case(33, 24, 301, dtype=torch.float32, bias=True)
    with torch.autocast("cpu", torch.bfloat16), CastsOf(head.weight) as casts:
        fused = fused_token_logprobs(hidden, head, targets, chunk_size=8)
        with torch.no_grad():
            scored = fused_token_logprobs(hidden, head, targets, chunk_size=8)
    assert casts.count == 2  # one in each of the two calls, whatever the number of chunks
    low = Head(head.weight.bfloat16(), head.bias.bfloat16())
    expected = fused_token_logprobs(hidden.bfloat16(), low, targets, chunk_size=8)
    for ours, without_grad, theirs in zip(fused, scored, expected, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(ours, without_grad)
    fused[0].sum().backward()
    assert hidden.grad.dtype == torch.float32
