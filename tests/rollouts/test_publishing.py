"""Adapters as files for a server: what is written, and of which adapter."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel, get_peft_model

from onetrunk.rollouts.publishing import ADAPTER_FILE, AdapterFolder, active_adapter
from onetrunk.utils.files import load_tensors
from tests.ppo.support import base_model, lora, sft_model
from tests.tiny import tiny_model


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
