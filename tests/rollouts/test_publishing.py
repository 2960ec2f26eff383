"""Adapters as files for a server: how many bytes travel, and what is written."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from onetrunk.models.adapters import adapter_parameters
from onetrunk.rollouts.publishing import ADAPTER_FILE, AdapterFolder, active_adapter
from onetrunk.utils.files import load_tensors
from tests.ppo.support import base_model, lora, sft_model
from tests.tiny import tiny_model

# Qwen2.5-0.5B.
HALF_BILLION = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def test_an_adapter_of_a_half_billion_model_is_56_times_smaller_than_its_weights(tmp_path):
    config = LoraConfig(r=16, target_modules="all-linear")
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(HALF_BILLION), config)
    for name, parameter in adapter_parameters(model, "default").items():
        module, _, field = name.rpartition(".")
        setattr(model.get_submodule(module), field, nn.Parameter(torch.zeros(parameter.shape)))
    folder = AdapterFolder(tmp_path)
    folder.write(model, "default", "policy", 1)
    # 24 layers; rank 16 times the widths of q, o (896 + 896), k, v (896 + 128), gate, up, down (896 + 4864).
    numbers = 24 * 16 * (2 * 1792 + 2 * 1024 + 3 * 5760)
    weights = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" not in name)
    assert (numbers, weights) == (8_798_208, 494_032_768)
    size = (tmp_path / folder.nonce / "1-policy-v1" / ADAPTER_FILE).stat().st_size
    assert 4 * numbers <= size < 1.01 * 4 * numbers and 4 * weights / size > 56
    folder.delete()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_peft_reads_what_is_written(family, tmp_path):
    model = sft_model(family)
    folder = AdapterFolder(tmp_path)
    published = folder.write(model, "default", "policy", 3)
    again = PeftModel.from_pretrained(tiny_model(family, num_hidden_layers=2), published.folder).eval()
    ids = torch.tensor([[5, 9, 11]])
    torch.testing.assert_close(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=0, rtol=0)
    assert published.name == f"onetrunk-{folder.nonce}-1-policy-v3"
    assert all(name.startswith("base_model.model.") for name in load_tensors(f"{published.folder}/{ADAPTER_FILE}"))
    folder.delete()


def test_the_active_adapter_is_found_and_two_at_once_are_rejected():
    model = get_peft_model(base_model(), lora())
    assert active_adapter(base_model()) is None and active_adapter(model) == "default"
    with model.disable_adapter():
        assert active_adapter(model) is None
    model.add_adapter("second", replace(lora(), r=2))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match=r"adapters \['default', 'second'\] are active together"):
        active_adapter(model)
