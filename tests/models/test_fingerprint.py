"""The line that says which base a trunk stands on: equal for equal bases, however they were loaded or adapted."""

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from onetrunk.models.loading import base_fingerprint
from tests.models.branches import lora
from tests.tiny import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_that_was_saved_and_loaded_has_the_line_it_had(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert base_fingerprint(loaded) == base_fingerprint(model) != base_fingerprint(tiny_model(family, seed=1))
    assert base_fingerprint(loaded.to(torch.bfloat16)) != base_fingerprint(model)


def test_adapters_and_padding_change_nothing_and_the_config_does():
    line = base_fingerprint(tiny_model("llama"))
    adapted = get_peft_model(tiny_model("llama"), lora(use_dora=True))
    adapted.add_adapter("reference", lora())
    assert base_fingerprint(adapted.get_base_model()) == line
    few = get_peft_model(tiny_model("llama"), lora(target_modules=["q_proj"]))
    assert base_fingerprint(few.get_base_model()) == line
    padded = tiny_model("llama")
    padded.config.pad_token_id = 3
    assert base_fingerprint(padded) == line
    assert base_fingerprint(tiny_model("llama", rms_norm_eps=1e-3)) != line


@pytest.mark.parametrize("parameter", range(3))
def test_another_weight_matrix_anywhere_is_another_base(parameter):
    model, line = tiny_model("llama"), base_fingerprint(tiny_model("llama"))
    weights = list(model.parameters())[[0, 7, -1][parameter]]
    weights.data += 1e-3
    assert base_fingerprint(model) != line


@pytest.mark.parametrize("kind", ["load_in_4bit", "load_in_8bit"])
def test_a_quantised_base_is_known_by_what_is_stored(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    for seed in (0, 1):
        tiny_model("llama", seed=seed, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / str(seed))
    config = BitsAndBytesConfig(**{kind: True})

    def load(seed):
        return AutoModelForCausalLM.from_pretrained(tmp_path / str(seed), quantization_config=config)

    first, again, other = load(0), load(0), load(1)
    line = base_fingerprint(first)
    assert line == base_fingerprint(again) != base_fingerprint(other)
    again.train()(torch.tensor([[5, 6, 7]]))
    assert base_fingerprint(again) == line
