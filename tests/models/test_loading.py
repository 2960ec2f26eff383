"""What is looked at before and after a load: headers, JSON, finite weights, patterns and templates within limits."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn

from onetrunk.models.base import load_base, verify_head
from onetrunk.models.loading import (
    check_config_file,
    check_finite,
    check_weight_files,
    is_finite,
    read_adapter_config,
    reading,
    source_file,
)
from onetrunk.models.trials import check_chat_template, check_patterns
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(dtype, value):
    for place in (0, 500, 999):
        tensor = torch.linspace(-1, 1, 1000).to(dtype)
        assert is_finite(tensor)
        tensor[place] = value
        assert not is_finite(tensor)


def test_the_largest_float_is_finite_and_what_holds_no_floats_is_not_looked_at():
    assert is_finite(torch.full((2,), torch.finfo(torch.float16).max, dtype=torch.float16))
    assert is_finite(torch.empty(0)) and is_finite(torch.ones(2, dtype=torch.uint8))
    assert is_finite(torch.empty(2, device="meta"))


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


def test_shapes_are_read_off_one_file_or_off_all_that_an_index_names(tmp_path):
    model = tiny_model("llama", num_hidden_layers=2)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for name in ("one", "many"):
        assert check_weight_files("model", str(tmp_path / name)) == expected
        load_base(str(tmp_path / name))


def test_a_config_as_deep_as_the_reader_of_json_goes_is_walked_through(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' + "[" * 900 + "]" * 900 + "}")
    assert list(check_config_file("model", str(tmp_path))) == ["a"]
    assert check_config_file("model", str(tmp_path / "nothing")) == {}


def test_a_file_of_a_name_that_is_nowhere_is_none():
    assert source_file("nobody/nothing", "config.json") is None


def test_missing_packages_and_files_are_no_damage():
    with pytest.raises(ImportError), reading("model", "x", "config.json"):
        raise ImportError("pip install autoround")
    with pytest.raises(RuntimeError, match="Give a folder that holds config.json"):
        with reading("model", "x", "config.json"):
            raise FileNotFoundError("gone")


def adapter_config(folder, **fields):
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "base", **fields}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(4, 32)}, folder / "adapter_model.safetensors")
    return str(folder)


def test_ranks_are_held_against_the_adapter_s_own_weights(tmp_path):
    assert read_adapter_config(adapter_config(tmp_path, r=4)).r == 4
    with pytest.raises(RuntimeError, match="says r 5, and the weights next to it are of rank 4 at most"):
        read_adapter_config(adapter_config(tmp_path, r=5))
    # With a pattern `r` may be the rank of nothing: only what no tensor could be of is refused.
    assert read_adapter_config(adapter_config(tmp_path, r=8, rank_pattern={"q_proj": 4})).r == 8
    with pytest.raises(RuntimeError, match="says r 33"):
        read_adapter_config(adapter_config(tmp_path, r=33, rank_pattern={"q_proj": 4}))


NAMES = [f"model.layers.{i}.{name}" for i in range(40) for name in ("self_attn.q_proj", "mlp.down_proj")]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"], "rank_pattern": {"model.layers.0.self_attn.q_proj": 2}},
        {"target_modules": r".*\.(q|k|v)_proj$|model\.layers\.\d+\.mlp\.down_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "alpha_pattern": {r"layers\.[0-3]\..*q_proj": 2}},
    ],
)
def test_patterns_as_people_write_them_pass(settings):
    check_patterns(LoraConfig(**settings), NAMES)


def test_a_template_runs_with_the_tokenizer_s_own_tokens_and_may_want_other_messages():
    check_chat_template(tiny_tokenizer())
    check_chat_template(tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    check_chat_template(tiny_tokenizer(chat_template="{{ bos_token + 'x' }}{{ raise_exception('system first') }}"))
    with pytest.raises(ValueError, match="is of type int, expected a text"):
        check_chat_template(tiny_tokenizer(chat_template=3))
