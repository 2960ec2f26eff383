"""Sampling from merged and packed weights: the same policy and completions, and a base that comes back bitwise."""

import contextlib

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import JambaConfig, JambaForCausalLM

from onetrunk.models.adapters import POLICY
from onetrunk.models.speedups import merged as packed
from onetrunk.models.speedups.merged import can_merge, merged_policy, packed_weights
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts import LocalBackend
from tests.models.branches import FEW, a_trunk, lora
from tests.rollouts.small import KEYS, PROMPTS, assert_same, logprobs_of, mixed_params, tiny
from tests.tiny import VOCAB_SIZE, tiny_model

IDS = torch.tensor([[4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]])


@contextlib.contextmanager
def restored(model):
    """Check that after the block every weight is the same object where it was, bit for bit, and trains as before."""
    before = {name: (p, p.data_ptr(), p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    yield
    assert num_merged(model) == 0
    for name, parameter in model.named_parameters():
        kept, place, value, requires_grad = before[name]
        assert kept is parameter and parameter.data_ptr() == place and torch.equal(parameter, value), name
        assert parameter.requires_grad == requires_grad, name


def num_merged(trunk):
    return sum(bool(layer.merged_adapters) for layer in trunk.tuner_layers)


@pytest.mark.parametrize(("family", "layers"), [("llama", "top-2"), ("gemma2", "all"), ("gpt2", "all")])
def test_the_merged_policy_is_the_policy_and_the_base_comes_back_bitwise(family, layers):
    trunk = a_trunk(family, adapter_layers=layers).eval()
    with torch.no_grad(), restored(trunk):
        apart = trunk(IDS).logits
        with merged_policy(trunk):
            assert num_merged(trunk) == sum(POLICY in layer.lora_A for layer in trunk.tuner_layers) > 0
            merged = trunk(IDS).logits
        again = trunk(IDS).logits
    # 4 layers of float32 products in another order.
    torch.testing.assert_close(merged, apart, atol=2e-4, rtol=2e-4)
    assert torch.equal(again, apart)


def test_sampling_runs_no_adapter_and_draws_what_it_draws_with_one():
    trunk = a_trunk(base=tiny_model("llama", eos_token_id=None))
    assert can_merge(trunk)  # The proof, made once, runs the adapter.
    calls = []
    for layer in trunk.tuner_layers:  # Fused, an adapter's own modules are not called.
        layer.__dict__.pop("forward", None)
    down = next(iter(trunk.tuner_layers)).lora_A[POLICY]
    down.register_forward_hook(lambda *_: calls.append(1))
    merged = LocalBackend(trunk).generate(PROMPTS, mixed_params(), KEYS)
    assert calls == []
    trunk.merge_proofs.update(dict.fromkeys(trunk.merge_proofs, False))
    assert_same(merged, LocalBackend(trunk).generate(PROMPTS, mixed_params(), KEYS))
    assert calls


def test_a_frozen_adapter_below_the_cut_is_left_beside_its_weights():
    model = get_peft_model(tiny_model("llama"), lora(init_lora_weights=False))
    trunk = TrunkModel.from_adapter(model, adapter_layers="top-2")
    with merged_policy(trunk):
        merged = {layer for layer in trunk.tuner_layers if layer.merged_adapters}
    trained = {layer for layer in trunk.tuner_layers if layer.lora_A[POLICY].weight.requires_grad}
    assert merged == trained and 0 < len(trained) < len(trunk.tuner_layers)


def test_what_is_no_float32_sum_of_matrices_is_not_merged():
    assert not can_merge(tiny_model("llama"))
    assert not can_merge(a_trunk(dtype=torch.bfloat16))
    assert not can_merge(a_trunk(config=lora(use_dora=True)))
    assert not can_merge(a_trunk("gpt2", config=LoraConfig(r=4, lora_bias=True, target_modules=["c_proj"])))
    trunk = a_trunk(dtype=torch.bfloat16)
    with merged_policy(trunk):
        assert num_merged(trunk) == 0


# --- the proof ------------------------------------------------------------------------------------------------------


def jamba():
    """Return a tiny model whose Mamba layers multiply by `dt_proj.weight` and so run no adapter on `dt_proj`."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    mamba = {"mamba_d_state": 4, "mamba_d_conv": 3, "mamba_dt_rank": 4, "num_experts_per_tok": 1}
    special = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": 2, "initializer_range": 0.25}
    torch.manual_seed(0)
    return JambaForCausalLM(JambaConfig(vocab_size=VOCAB_SIZE, **sizes, **layers, **mamba, **special)).eval()


def test_a_family_that_reads_a_weight_directly_samples_from_the_policy_that_it_trains():
    trunk = a_trunk(base=jamba())
    assert any("dt_proj.lora_A" in name for name, _ in trunk.named_parameters())
    assert not can_merge(trunk)
    rollout = LocalBackend(trunk).generate(PROMPTS, mixed_params(), KEYS)
    # Merged, the largest difference is 2.2.
    for sampled, own in zip(rollout.sampler_logprobs, logprobs_of(trunk, rollout, 1.0), strict=True):
        torch.testing.assert_close(sampled, own, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FEW)
def test_under_autocast_nothing_is_merged(family):
    trunk = a_trunk(family, base=tiny_model(family, initializer_range=0.1)).eval()
    assert can_merge(trunk)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_merge(trunk)
        before = trunk(IDS).logits
    # Autocast keeps rounded copies of parameters: those of the proof must not stay.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(trunk(IDS).logits, before)
    assert can_merge(trunk)


def test_without_memory_for_a_copy_of_the_matrices_nothing_is_merged():
    trunk, calls = a_trunk().eval(), []

    def fails_when_merged(module, args, kwargs):
        calls.append(num_merged(trunk))
        if calls[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    trunk.get_base_model().register_forward_pre_hook(fails_when_merged, with_kwargs=True)
    with restored(trunk):
        assert not can_merge(trunk)
    assert calls[0] == 0 < calls[1]


def test_the_proof_leaves_no_trace_and_is_made_once():
    trunk = a_trunk(adapter_layers="top-2").eval()
    calls, random_state = [], torch.get_rng_state()
    trunk.get_base_model().register_forward_hook(lambda *_: calls.append(1))
    with restored(trunk):
        assert can_merge(trunk) and can_merge(trunk)
    assert len(calls) == 2 and torch.equal(torch.get_rng_state(), random_state)


# --- roles ----------------------------------------------------------------------------------------------------------


def test_only_the_policy_is_merged_and_no_other_role_can_be_played_meanwhile():
    model = get_peft_model(tiny_model("llama"), lora(init_lora_weights=False))
    for trunk in (a_trunk(), TrunkModel.from_adapter(model)):
        with trunk.as_role("reference"):
            assert not can_merge(trunk)
        with merged_policy(trunk), trunk.as_role("policy"):
            assert num_merged(trunk) > 0
            with pytest.raises(RuntimeError, match="an adapter is merged into the weights"):
                trunk.as_role("reference").__enter__()
        with trunk.as_role("reference"):
            pass


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def packs_small_weights(monkeypatch):
    monkeypatch.setattr(packed, "LEAST_NUMBERS", 1)


def packed_layers(model):
    return [m for m in model.modules() if type(m) is torch.nn.Linear and "forward" in vars(m)]


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 64), (4, 50, 64), (64,)])
def test_a_packed_product_is_the_usual_one(shape, bias):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(64, 96, bias=bias), torch.randn(shape)
    with torch.no_grad():
        expected = linear(x)
        found = packed._PackedForward(linear)(x)
    assert found.shape == expected.shape
    # Sums of 64 float32 products in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


@needs_onednn
@pytest.mark.usefixtures("packs_small_weights")
@pytest.mark.parametrize(("family", "layers"), [("llama", "top-2"), ("gpt2", "all"), ("gemma2", "top-2")])
def test_completions_logprobs_and_states_are_those_of_the_usual_products(layers, family, monkeypatch):
    trunk = a_trunk(base=tiny(family), adapter_layers=layers)
    with merged_policy(trunk), packed_weights(trunk):
        # GPT-2's blocks are no linear layers.
        assert bool(packed_layers(trunk)) == (family != "gpt2")
    found = LocalBackend(trunk).generate(PROMPTS, mixed_params(), KEYS, keeps="all but last")
    monkeypatch.setattr(packed, "LEAST_NUMBERS", 10**9)
    usual = LocalBackend(trunk).generate(PROMPTS, mixed_params(), KEYS, keeps="all but last")
    assert found.completion_ids == usual.completion_ids
    for pair in zip(found.sampler_logprobs, usual.sampler_logprobs, strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=1e-4)
    if layers == "top-2":
        # The frozen layers are not packed: what training starts from has the same bits.
        assert torch.equal(found.states[:, : max(map(len, PROMPTS))], usual.states[:, : max(map(len, PROMPTS))])


@needs_onednn
@pytest.mark.usefixtures("packs_small_weights")
def test_packed_weights_take_the_place_of_merged_ones_and_everything_is_restored():
    trunk = a_trunk(adapter_layers="top-2")
    with torch.no_grad(), restored(trunk), merged_policy(trunk), packed_weights(trunk):
        layers = packed_layers(trunk)
        # Seven matrices in each of two layers.
        assert len(layers) == 2 * 7
        trunk(input_ids=torch.tensor([[5, 6, 7]]))
        assert all(layer.weight.numel() == 0 and layer.forward.packed is not None for layer in layers)
    assert not packed_layers(trunk)


@needs_onednn
@pytest.mark.usefixtures("packs_small_weights")
@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_build_whose_packed_products_are_wrong_or_fail_takes_the_usual_way(fault, monkeypatch):
    def faulty(x, weight, bias, *_):
        if fault == "raises":
            raise RuntimeError("not supported")
        return torch.full((*x.shape[:-1], len(bias)), torch.nan)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", faulty)
    # Shapes that no other test has tried: each is tried once in a process.
    sizes = {"hidden_size": 40, "intermediate_size": 56} if fault == "raises" else {"hidden_size": 48}
    trunk = a_trunk(base=tiny_model("llama", **sizes))
    with torch.no_grad(), merged_policy(trunk), packed_weights(trunk):
        assert not packed_layers(trunk)
