"""The value head: which state it reads, where its gradient goes, its dtype and its file."""

import pytest
import torch

from onetrunk.models.adapters import VALUE_HEAD_FILE, ValueHead, adapter_parameters
from onetrunk.models.base_model import backbone
from onetrunk.models.trunk import TrunkModel
from tests.models.branches import COMPLETIONS, PROMPTS, a_pack, a_trunk, gradients, lora, same
from tests.tiny import FAMILIES, tiny_model

HEAD = {"value_head.linear.weight", "value_head.linear.bias"}


def value_gradients(trunk, roles):
    trunk.zero_grad(set_to_none=True)
    output = trunk(pack=a_pack(), roles=roles)
    (output.values.sum() + output.next_values.sum()).backward()
    return {name for name, gradient in gradients(trunk).items() if gradient.any()}


def test_a_new_head_says_zero_in_float32_whatever_the_trunk():
    trunk = TrunkModel(tiny_model("llama").to(torch.bfloat16), lora())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = trunk(pack=a_pack())
    assert not output.values.any() and not output.next_values.any()
    assert output.values.dtype == output.next_values.dtype == torch.float32
    assert output.values.requires_grad


@pytest.mark.parametrize("autocast", [False, True])
def test_the_head_multiplies_in_float32(autocast):
    head = ValueHead(3)
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[1.0, 1 / 512, 1 / 1024]]))
        head.linear.bias.fill_(2.0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        values = head(torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.0, 4.0]], dtype=torch.bfloat16))
    # 2 + 1 + 1/512 + 1/1024, and 2 + 2 + 4/1024: bf16 knows neither.
    assert values.tolist() == [3.0029296875, 4.00390625]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("value_head", ["shared", "detached", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_read_the_state_that_predicts_their_token(family, value_head):
    trunk = a_trunk(family, value_head=value_head).eval()
    output = trunk(pack=a_pack(), roles=("value",))
    weight, bias = trunk.value_head.linear.weight[0], trunk.value_head.linear.bias[0]
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        with torch.no_grad(), trunk.as_role("value"):
            hidden = backbone(trunk)(input_ids=torch.tensor([prompt + completion])).last_hidden_state[0]
            every = [(state * weight).sum() + bias for state in hidden]
        # The first completion token is predicted by the last prompt token; the state after the last one is the last.
        expected = torch.stack(every[len(prompt) - 1 :])
        assert len(expected) == len(completion) + 1
        # 1e-4: states of size 1 in fp32 at another width, weights of up to .5 over 32 entries.
        torch.testing.assert_close(output.values[row, : len(completion)], expected[:-1], atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(output.next_values[row], expected[-1], atol=1e-4, rtol=1e-5)
        assert not output.values[row, len(completion) :].any()


def test_the_gradient_of_the_value_goes_where_the_kind_of_head_says():
    roles = ("policy", "value")
    shared, detached, own = (a_trunk(value_head=kind) for kind in ("shared", "detached", "adapter"))
    assert value_gradients(shared, roles) == HEAD | set(adapter_parameters(shared, "default"))
    assert value_gradients(detached, roles) == HEAD
    assert value_gradients(own, roles) == HEAD | set(adapter_parameters(own, "value"))


@pytest.mark.parametrize("value_head", ["shared", "detached", "adapter"])
def test_asked_alone_the_value_leaves_the_policy_without_gradient(value_head):
    trunk = a_trunk(value_head=value_head, adapter_layers="top-2")
    with_policy = trunk(pack=a_pack(), roles=("policy", "value"))
    own = set(adapter_parameters(trunk, "value")) if value_head == "adapter" else set()
    assert value_gradients(trunk, ("value",)) == HEAD | own
    assert all(p.grad is None for p in adapter_parameters(trunk, "default").values())
    assert same(trunk(pack=a_pack(), roles=("value",)).values, with_policy.values)
    assert trunk(pack=a_pack(), roles=("value",)).logprobs is None


def test_a_head_comes_back_from_its_file_bit_for_bit(tmp_path):
    head, other = ValueHead(8), ValueHead(8)
    torch.nn.init.normal_(head.linear.weight)
    torch.nn.init.normal_(head.linear.bias)
    head.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [VALUE_HEAD_FILE]
    other.load(tmp_path)
    assert same(dict(head.state_dict()), dict(other.state_dict())) and head.linear.weight.any()


def test_a_missing_head_or_one_of_another_width_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"{tmp_path}/value_head.safetensors is missing.*a folder with both"):
        ValueHead(8).load(tmp_path)
    ValueHead(16).save(tmp_path)
    with pytest.raises(ValueError, match=r"value_head.safetensors holds .*\(1, 16\).* needs .*\(1, 8\).*another base"):
        ValueHead(8).load(tmp_path)
