"""What is looked at around a load: finite weights, the file to blame for an error, and how often layers repeat."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from onetrunk.models.base_model import load_base, verify_head
from onetrunk.models.loading import LoadError, check_finite, is_finite, reading
from tests.tiny import tiny_model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(dtype, value):
    for place in (0, 500, 999):
        tensor = torch.linspace(-1, 1, 1000).to(dtype)
        assert is_finite(tensor)
        tensor[place] = value
        assert not is_finite(tensor)


def test_a_model_made_in_memory_with_nan_is_not_said_to_have_another_head():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[1, 2] = float("nan")
        model.model.norm.weight[0] = float("inf")
    expected = r"1 of 2048 values of model\.layers\.2\.mlp\.down_proj\.weight \(torch\.float32\), and 1 more tensors"
    with pytest.raises(RuntimeError, match=expected):
        verify_head(model)
    with pytest.raises(RuntimeError, match="'Linear' has weights that are NaN or infinite: 4 of 4 values of weight"):
        layer = nn.Linear(2, 2)
        check_finite(layer.requires_grad_(False).apply(lambda m: m.weight.fill_(float("nan"))))


def test_weights_that_a_smaller_dtype_cannot_hold_are_named_with_it(tmp_path):
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_base(str(tmp_path)).model.norm.weight[0] == 1e6
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight \(torch\.float16\)\. .* load them in another dtype"):
        load_base(str(tmp_path), dtype="float16")


def test_a_damaged_file_is_blamed_before_the_one_that_was_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(LoadError, match=r"model\.safetensors cannot be used"), reading("model", str(tmp_path)):
        raise OSError("somewhere in the folder")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=rf"{tmp_path}' cannot be loaded: KeyError: 'layers'\. Give a folder that"):
        with reading("model", str(tmp_path)):
            raise KeyError("layers")
