"""A base in 4 and in 8 bits, on the CPU: adapters in float32 train over it, and the base stays as it is."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from onetrunk.models.base_model import decoder_layers, load_base
from onetrunk.models.build import build_trunk
from onetrunk.models.trunk import TrunkModel
from tests.models.branches import ALL_ROLES, a_pack, base_weights, counted, lora, move, same, step_gradients
from tests.tiny import tiny_model

bitsandbytes = pytest.importorskip("bitsandbytes")

CONFIGS = {
    "nf4-float32": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "nf4-bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    # Hidden 64: bitsandbytes quantises in blocks of 64.
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(path)
    return path


def quantized_base(folder, kind):
    config = BitsAndBytesConfig(**CONFIGS[kind])
    return load_base(str(folder), quantization_config=config, device_map="cpu", dtype=torch.float32)


def quantized_trunk(folder, kind, **settings) -> TrunkModel:
    settings |= {"model_init_kwargs": {"device_map": "cpu", "dtype": torch.float32}}
    trunk = build_trunk(folder, lora(), quantization_config=BitsAndBytesConfig(**CONFIGS[kind]), **settings)
    expected = bitsandbytes.nn.Linear8bitLt if kind == "int8" else bitsandbytes.nn.Linear4bit
    linear = decoder_layers(trunk)[-1].mlp.up_proj.base_layer
    assert isinstance(linear, expected) and linear.weight.dtype in (torch.uint8, torch.int8)
    return trunk


@pytest.mark.parametrize("kind", ["nf4-bfloat16", "int8"])
def test_adapters_train_over_a_quantized_base(folder, kind):
    trunk = quantized_trunk(folder, kind, adapter_layers="top-2").train()
    start = trunk(pack=a_pack(), roles=("policy", "reference"))
    assert same(start.logprobs.detach(), start.ref_logprobs)
    move(trunk)
    trained = {name: p for name, p in trunk.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32} and all("lora_" in name for name in trained)
    before, optimizer = base_weights(trunk), torch.optim.Adam(trained.values(), lr=0.05)
    output, found = step_gradients(trunk, a_pack(), roles=("policy", "value", "reference"))
    assert found.keys() == trained.keys() and all(g.isfinite().all() and g.any() for g in found.values())
    optimizer.step()
    after = trunk(pack=a_pack(), roles=("policy", "value", "reference"))
    assert same(before, base_weights(trunk)) and same(after.ref_logprobs, start.ref_logprobs)
    assert not same(after.logprobs, output.logprobs)


def dequantized_twin(trunk, base):
    """Return a trunk over an ordinary float32 model that holds the numbers which the quantised one stands for."""
    plain = dict(base.named_modules())
    for name, module in trunk.get_base_model().named_modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            # It moves at the first forward.
            scale = module.weight.SCB if module.state.SCB is None else module.state.SCB
            weight = module.weight.data.float() * scale[:, None] / 127
        elif isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
        else:
            continue
        layer = plain[name.removesuffix(".base_layer")]
        assert 0 < (layer.weight - weight).abs().max() < 0.25  # really quantised, and really this layer
        layer.weight.data = weight
    twin = TrunkModel(base, lora())
    own = {n: p for n, p in trunk.named_parameters() if "lora_" in n or "value_head" in n}
    assert not twin.load_state_dict(own, strict=False).unexpected_keys
    return twin


@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_outputs_and_gradients_are_those_of_the_dequantized_base(folder, kind):
    # bitsandbytes' kernels for inference on the CPU pass no gradient on: the base's part would be missing, silently.
    trunk = quantized_trunk(folder, kind)
    move(trunk)
    twin = dequantized_twin(trunk, AutoModelForCausalLM.from_pretrained(folder))
    with torch.no_grad():
        trunk.eval()(pack=a_pack(), roles=("policy", "value", "reference"))
    for mode in (True, False):
        found, gradient = step_gradients(trunk.train(mode), a_pack())
        expected, expected_gradient = step_gradients(twin, a_pack())
        # float32 sums in another order; logprobs of up to 15.
        torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-3, rtol=0)
        assert gradient.keys() == expected_gradient.keys()
        for name, grad in expected_gradient.items():
            torch.testing.assert_close(gradient[name], grad, rtol=0, atol=2e-3 * grad.abs().max().item())


def test_a_model_whose_weights_were_repacked_for_inference_is_refused(folder):
    base = quantized_base(folder, "nf4-float32")
    if bitsandbytes.functional.has_avx512bf16():
        with torch.no_grad():
            base.eval()(input_ids=a_pack().input_ids)
    else:
        base.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="repacked the 4-bit weights.*load the model again"):
        build_trunk(base, lora())
    unused = build_trunk(quantized_base(folder, "nf4-float32").eval(), lora())
    for layer in unused.eval().modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            assert layer.training and not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
    assert not unused.training


def test_the_cut_and_checkpointing_change_no_bit_over_a_quantized_base(folder):
    trunk = quantized_trunk(folder, "nf4-float32", adapter_layers="top-2").train()
    move(trunk)
    cut, cut_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    trunk.activation_checkpointing_enable()
    with counted(decoder_layers(trunk)) as counts:
        checkpointed = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert counts == [1, 1, 3, 3] and same(checkpointed, (cut, cut_gradients))
    trunk.cut = 0
    full, full_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert same(cut._replace(states=None), full) and same(cut_gradients, full_gradients)
