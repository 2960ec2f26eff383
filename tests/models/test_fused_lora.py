"""A linear layer and its low-rank update in one operation: PEFT's numbers and gradients, and PEFT itself elsewhere."""

import contextlib
import copy

import pytest
import torch

from onetrunk.models.speedups.fused_lora import casting_once, lora_linear, lora_linear_reference
from onetrunk.parallel.groups import pack_outputs
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from tests.models.branches import ALL_ROLES, PROMPTS, a_pack, a_trunk, logits, lora, move, same, step_gradients
from tests.tiny import FAMILIES


def calls_of_adapters(trunk):
    """Return a list that grows with each call of an adapter's own module: PEFT calls them, a fused layer does not."""
    calls = []
    for layer in trunk.tuner_layers:
        layer.lora_A["default"].register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("family", "layers"), [("llama", "all"), ("gemma2", "top-2"), ("gpt2", "all")])
def test_plain_adapters_on_linear_layers_are_fused(family, layers):
    """That outputs and gradients are those of PEFT, test_trunk.py shows."""
    trunk = a_trunk(family, adapter_layers=layers).train()
    calls = calls_of_adapters(trunk)
    step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert bool(calls) == (family == "gpt2")  # GPT-2 has Conv1D layers.


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


# --- bfloat16 autocast ----------------------------------------------------------------------------------------------

# Scales 2 and 4, which move into B, and 1.5, which does not.
SCALES = {"2": {}, "4, rsLoRA": {"use_rslora": True}, "1.5": {"lora_alpha": 6}}


def autocast(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


def cast_outputs(trunk, *blocks):
    """Return outputs of all roles and logits, twice: the second time it is known which layers read one tensor."""
    with autocast(), torch.no_grad(), contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        return [(tuple(trunk(pack=a_pack(), roles=ALL_ROLES)), logits(trunk)) for _ in range(2)]


@pytest.mark.parametrize(
    ("family", "scale"),
    [
        *((family, "1.5") for family in FAMILIES),
        ("llama", "2"),
        ("llama", "4, rsLoRA"),
        ("gpt2", "2"),
        ("gpt2", "4, rsLoRA"),
    ],
)
def test_adapters_that_are_cast_once_compute_the_bits_of_peft_under_autocast(family, scale):
    for dtype in (torch.bfloat16, torch.float32):
        trunk = a_trunk(family, config=lora(**SCALES[scale]), dtype=dtype).eval()
        calls = calls_of_adapters(trunk)
        once = cast_outputs(trunk, casting_once(trunk))
        assert not calls
        plain = cast_outputs(trunk)
        assert calls
        for (outputs, scores), (peft_outputs, peft_scores) in zip(once, plain, strict=True):
            assert same(outputs, peft_outputs) and same(scores, peft_scores)


@pytest.mark.parametrize(
    ("settings", "dtype", "grad"),
    [
        ({"config": lora(use_dora=True)}, torch.bfloat16, False),
        ({"config": lora(lora_bias=True), "family": "phi3"}, torch.bfloat16, False),
        ({}, torch.float16, False),
        ({}, torch.bfloat16, True),
    ],
)
def test_other_adapters_precisions_and_gradients_are_those_of_peft_also_where_adapters_are_cast_once(
    settings, dtype, grad
):
    trunk = a_trunk(dtype=torch.bfloat16, **settings)
    calls = calls_of_adapters(trunk)
    with casting_once(trunk), autocast(dtype), torch.set_grad_enabled(grad):
        trunk(pack=a_pack())
    assert calls


def test_layers_that_read_one_tensor_are_still_those_of_their_role_and_of_a_changed_tensor():
    trunk = a_trunk(dtype=torch.bfloat16).eval()
    attention = trunk.get_base_model().model.layers[0].self_attn
    kinds = (attention.q_proj, attention.k_proj)
    drawn = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()

    def outputs(x):
        first = kinds[0](x)
        with trunk.as_role("reference"):
            bare = kinds[1](x)
        between = kinds[1](x)
        x.mul_(3)
        # The same layer twice, and in another order.
        return first, bare, between, kinds[1](x), kinds[1](x), kinds[0](x)

    with autocast(), torch.no_grad():
        expected = outputs(drawn.clone())
        with casting_once(trunk):
            for _ in range(3):
                assert same(outputs(drawn.clone()), expected)


def test_sampling_and_scoring_cast_once_and_see_the_weights_of_their_step():
    trunk = a_trunk(dtype=torch.bfloat16).eval()
    trunk.forward = autocast()(trunk.forward)  # As accelerate does.
    calls = calls_of_adapters(trunk)
    backend, params = LocalBackend(trunk), SamplingParams(5, stop_token_ids=(1,))

    def results():
        rollout = backend.generate(PROMPTS, params, [(0, row) for row in range(len(PROMPTS))])
        return rollout, tuple(next(pack_outputs(trunk, [a_pack()], ALL_ROLES, 1.0)))

    seen = []
    for seed in (1, 2):
        move(trunk, seed)
        calls.clear()
        rollout, scored = results()
        assert not calls
        with torch.no_grad():
            expected = tuple(trunk(pack=a_pack(), roles=ALL_ROLES))
        assert calls and same(scored, expected)
        seen.append((rollout, scored))
    assert not torch.equal(seen[0][0].sampler_logprobs[0], seen[1][0].sampler_logprobs[0])
    assert not torch.equal(seen[0][1][0], seen[1][1][0])
