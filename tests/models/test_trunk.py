"""A pass over a pack against the plain model, row by row; and the value head: its state and its dtype."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.nn import functional as F
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from onetrunk.models.base_model import backbone, decoder_layers
from onetrunk.models.trunk import TrunkModel
from onetrunk.models.value_head import ValueHead
from onetrunk.ops.packing import make_pack
from tests.models import branches
from tests.models.branches import COMPLETIONS, FEW, PROMPTS, a_pack, a_trunk, lora, same, step_gradients
from tests.tiny import FAMILIES, tiny_model

# fp32, logits of up to 10, and another width of the row: sums in another order.
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


def plain_twin(trunk, family, config=None, **overrides):
    """Return a PEFT model made without our code, with the policy's weights."""
    plain = get_peft_model(tiny_model(family, **overrides), config or lora())
    set_peft_model_state_dict(plain, get_peft_model_state_dict(trunk, adapter_name="default"))
    return plain.eval()


def plain_logprobs(plain, prompt, completion, temperature):
    """Return logprobs and entropies of one unpadded row, from the model's own logits."""
    logits = plain(input_ids=torch.tensor([prompt + completion])).logits[0].float() / temperature
    predicting = F.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return predicting[range(len(completion)), completion], -(predicting.exp() * predicting).sum(-1)


@torch.no_grad()
def check_against_plain(trunk, plain, temperature):
    output = trunk(pack=a_pack(), roles=("policy",), temperature=temperature)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logprobs, entropy = plain_logprobs(plain, prompt, completion, temperature)
        count = len(completion)
        torch.testing.assert_close(output.logprobs[row, :count], logprobs, **CLOSE)
        torch.testing.assert_close(output.entropy[row, :count], entropy, **CLOSE)
        assert not output.logprobs[row, count:].any() and not output.entropy[row, count:].any()


@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), *((family, 0.7) for family in FAMILIES)])
def test_logprobs_are_those_of_the_plain_model_on_unpadded_rows(family, temperature):
    trunk = a_trunk(family)
    check_against_plain(trunk, plain_twin(trunk, family), temperature)


@pytest.mark.parametrize("config", [{"use_rslora": True}, {"use_dora": True}, {"lora_bias": True}])
def test_variants_of_lora_give_the_logprobs_of_the_plain_model(config):
    trunk = a_trunk(config=lora(**config))
    check_against_plain(trunk, plain_twin(trunk, "llama", lora(**config)), 1.0)
    fresh = TrunkModel(tiny_model("llama"), lora(**config))(pack=a_pack(), roles=("policy", "reference"))
    assert same(fresh.logprobs, fresh.ref_logprobs)


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_pack_gives_the_same_bits_in_every_mode(family, precision):
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    trunk = a_trunk(family, dtype=dtype)
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=precision == "autocast")
    outputs = []
    for grad, train in itertools.product((True, False), repeat=2):
        trunk.train(train)
        with torch.set_grad_enabled(grad), autocast():
            outputs.append(trunk(pack=a_pack(), roles=("policy", "value", "reference")))
        assert outputs[-1].logprobs.requires_grad == grad and outputs[-1].logprobs.dtype == torch.float32
    with torch.no_grad(), autocast():  # asked alone, and after other work
        alone = trunk(pack=a_pack(), roles=("policy",)).logprobs
    assert all(same(outputs[0], other) for other in outputs[1:]) and same(alone, outputs[0].logprobs)
    assert torch.equal((outputs[0].logprobs - outputs[3].logprobs).exp(), torch.ones_like(alone))
    # The bits depend on the precision: autocast and bf16 weights were really on.
    assert precision == "float32" or not same(alone, a_trunk(family)(pack=a_pack()).logprobs)


@functools.cache
def cached_trunk(family):
    return a_trunk(family, adapter_layers="top-3").eval()


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(3, 63), min_size=1, max_size=14), st.lists(st.integers(0, 63), min_size=1, max_size=10)
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(rows=ROWS, family=st.sampled_from(["llama", "gpt2", "mistral", "gemma3"]))
def test_what_a_row_gives_does_not_depend_on_its_pack(rows, family):
    trunk, roles = cached_trunk(family), ("policy", "value", "reference")
    with torch.no_grad():
        together = trunk(pack=make_pack([p for p, _ in rows], [c for _, c in rows], 0), roles=roles)
        for row, (prompt, completion) in enumerate(rows):
            alone = trunk(pack=make_pack([prompt], [completion], 0), roles=roles)
            for name in ("logprobs", "entropy", "values", "ref_logprobs"):
                expected, found = getattr(alone, name)[0], getattr(together, name)[row, : len(completion)]
                torch.testing.assert_close(found, expected, **CLOSE)
            torch.testing.assert_close(together.next_values[row], alone.next_values[0], **CLOSE)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral"])
def test_the_gradient_of_a_pack_is_that_of_the_plain_model_on_unpadded_rows(family):
    trunk = a_trunk(family)
    plain = plain_twin(trunk, family)
    _, found = step_gradients(trunk, a_pack(), roles=("policy",))
    logprobs = torch.zeros(a_pack().completion_mask.shape)
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        own, _ = plain_logprobs(plain, prompt, completion, 1.0)
        logprobs[row, : len(completion)] = own
    branches.loss_of(SimpleNamespace(logprobs=logprobs)).backward()
    expected = branches.gradients(plain)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        # Gradients of up to 100 in fp32, summed in another order.
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4 * grad.abs().max().item())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "nemotron_h"])
def test_in_the_update_nothing_of_the_base_is_in_training_mode_but_what_recomputes(family):
    trunk = a_trunk(family).eval().train()
    training = [module for module in trunk.get_base_model().modules() if module.training]
    assert trunk.training and training and all(hasattr(module, "gradient_checkpointing") for module in training)
    if family == "llama":
        assert {*decoder_layers(trunk), backbone(trunk)} <= {*training}


def test_the_noise_of_a_router_is_off():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "router_jitter_noise": 0.5}
    trunk = TrunkModel(MixtralForCausalLM(MixtralConfig(**sizes)), LoraConfig(r=2, target_modules=["q_proj"])).train()
    one, other = (trunk(pack=a_pack(), roles=("policy",)).logprobs for _ in range(2))
    assert one.equal(other)


def test_a_plain_forward_and_generate_play_the_policy():
    trunk = a_trunk().eval()
    plain, ids = plain_twin(trunk, "llama"), torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert torch.equal(trunk(input_ids=ids).logits, plain(input_ids=ids).logits)
        found, expected = (m.generate(input_ids=ids, max_new_tokens=5, do_sample=False) for m in (trunk, plain))
        with trunk.as_role("reference"):
            assert not torch.equal(trunk(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert torch.equal(found, expected)


def test_roles_that_were_not_asked_are_none_and_unknown_ones_are_refused():
    trunk = a_trunk(adapter_layers="top-2")
    asked = trunk(pack=a_pack(), roles=("reference",))
    assert asked.ref_logprobs is not None and all(x is None for n, x in asked._asdict().items() if n != "ref_logprobs")
    with pytest.raises(ValueError, match="'critic'.*policy, value, reference, reward, trunk"):
        trunk(pack=a_pack(), roles=("policy", "critic"))
    with pytest.raises(ValueError, match=r"\[16, 32\] are not of this pack, which has 35 tokens"):
        trunk(pack=a_pack(), states=trunk(pack=a_pack(rows=slice(0, 1)), roles=("trunk",)).states)
    with pytest.raises(ValueError, match="temperature"):
        trunk(pack=a_pack(), temperature=0.0)


def test_a_new_head_says_zero_in_float32_whatever_the_trunk():
    trunk = TrunkModel(tiny_model("llama").to(torch.bfloat16), lora())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = trunk(pack=a_pack())
    assert not output.values.any() and not output.next_values.any()
    assert output.values.dtype == output.next_values.dtype == torch.float32


@pytest.mark.parametrize("autocast", [False, True])
def test_the_head_multiplies_in_float32(autocast):
    head = ValueHead(2, 2)
    with torch.no_grad():
        head.hidden[1].weight.copy_(torch.tensor([[100.0, 0.0], [0.0, 100.0]]))
        head.hidden[1].bias.zero_()
        head.linear.weight.copy_(torch.tensor([[1 / 128, 1.0]]))
        head.linear.bias.fill_(2.0)
        head.moments.copy_(torch.tensor([1 / 512, 4.0]))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        values = head(torch.tensor([[512.0, 0.0], [0.0, 512.0]], dtype=torch.bfloat16))
    # The LayerNorm gives (1, -1) and (-1, 1), GELU (100, 0) and (0, 100): 4 * (2 + 100/128) + 1/512 and
    # 4 * (2 + 100) + 1/512, neither of which bfloat16 knows.
    assert values.tolist() == [11.126953125, 408.001953125]


@pytest.mark.parametrize("family", FEW)
def test_values_read_the_state_that_predicts_their_token(family):
    trunk = a_trunk(family).eval()
    output = trunk(pack=a_pack(), roles=("value",))
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        with torch.no_grad():
            hidden = backbone(trunk)(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
            every = [trunk.value_head(state) for state in hidden]
        # The first completion token is predicted by the last prompt token; the state after the last one is the last.
        expected = torch.stack(every[len(prompt) - 1 :])
        assert len(expected) == len(completion) + 1
        # 1e-4: states of size 1 in fp32 at another width, weights of up to .5 over 32 entries.
        torch.testing.assert_close(output.values[row, : len(completion)], expected[:-1], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(output.next_values[row], expected[-1], atol=1e-4, rtol=1e-5)
        assert not output.values[row, len(completion) :].any()


def test_the_head_gets_and_passes_no_gradient_and_hands_out_the_states_that_it_reads():
    trunk = a_trunk(adapter_layers="top-2")
    output, alone = (trunk(pack=a_pack(), roles=roles) for roles in (("policy", "value"), ("value",)))
    assert output.logprobs.requires_grad and not output.values.requires_grad and not alone.values.requires_grad
    assert same(trunk.value_head(output.value_states), output.values[a_pack().completion_mask])
    assert same(alone.values, output.values)


def test_a_model_without_a_key_value_cache_is_rejected_when_the_trunk_is_made():
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    config = LoraConfig(target_modules=["in_proj"], task_type="CAUSAL_LM")
    mamba2 = Mamba2ForCausalLM(Mamba2Config(**sizes, head_dim=8, num_heads=8, n_groups=1))
    for model in (MambaForCausalLM(MambaConfig(**sizes)), mamba2):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no key-value cache .* take a model with"):
            TrunkModel(model, config)
