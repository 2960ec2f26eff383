"""PEFT's LoRA layers run fused where that is the same, and as PEFT has them everywhere else."""

import copy

import pytest
import torch

from onetrunk.models.speedups import fused_lora
from tests.models.branches import ALL_ROLES, a_pack, a_trunk, lora, step_gradients
from tests.tiny import FAMILIES


@pytest.fixture
def fused_calls(monkeypatch):
    """Count the calls that run fused."""
    calls = []
    original = fused_lora.lora_linear
    monkeypatch.setattr(fused_lora, "lora_linear", lambda *args: (calls.append(1), original(*args))[1])
    return calls


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layers", ["all", "top-2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_peft(family, layers, fused_calls):
    trunk = a_trunk(family, value_head="adapter", adapter_layers=layers).train()
    fused, fused_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert bool(fused_calls) == (family != "gpt2")  # GPT-2 has Conv1D layers.
    fused_calls.clear()
    for layer in trunk.tuner_layers:
        layer.__dict__.pop("forward", None)
    plain, gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert not fused_calls
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
def test_other_adapters_and_precisions_run_as_peft_has_them(settings, fused_calls):
    trunk = a_trunk(**settings)
    fused_calls.clear()
    trunk(pack=a_pack())
    assert not fused_calls


def test_a_copy_of_a_trunk_runs_on_its_own_weights():
    trunk = a_trunk()
    copied = copy.deepcopy(trunk)
    with torch.no_grad():
        before = copied(pack=a_pack()).logprobs
        for layer in trunk.tuner_layers:
            layer.lora_B["default"].weight.zero_()
        assert torch.equal(copied(pack=a_pack()).logprobs, before)
        assert not torch.equal(trunk(pack=a_pack()).logprobs, before)
