"""`onetrunk merge`: the merged model computes what base and adapter do, and what cannot be merged says why."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from onetrunk import cli
from tests.ppo.support import base_model, sft_model
from tests.tiny import tiny_tokenizer


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Return a working folder with a base, and an adapter on it that names it by a relative path."""
    monkeypatch.chdir(tmp_path)
    base_model().save_pretrained("base")
    tiny_tokenizer().save_pretrained("base")
    torch.manual_seed(0)  # Of the adapter: how far it moves the logits decides what rounding to bfloat16 may.
    model = sft_model()
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained("adapter")
    return tmp_path


def merge(*words):
    return cli.main(["merge", *map(str, words)])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(2, 14)[None]).logits.float()


@pytest.mark.parametrize(("dtype", "tolerance"), [("auto", 1e-5), ("bfloat16", 0.05)])
def test_the_merged_model_computes_what_base_and_adapter_compute(there, capsys, dtype, tolerance):
    assert merge("adapter", "--output_dir", "merged", "--dtype", dtype) == 0
    written = "float32" if dtype == "auto" else dtype
    assert f"merge: saved the merged model in merged ({written})" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained("base")
    without = logits(base)
    expected = logits(PeftModel.from_pretrained(base, "adapter"))
    model = AutoModelForCausalLM.from_pretrained("merged")
    assert model.dtype == getattr(torch, written) and not Path("merged/adapter_config.json").exists()
    scale = (expected - without).abs().max()
    # bfloat16 rounds each weight by 2**-9; the adapter itself moves the logits far more than that.
    assert (logits(model) - expected).abs().max() < tolerance * scale
    assert AutoTokenizer.from_pretrained("merged").eos_token == "<eos>"
    assert not list(Path("merged").glob(".saving*"))


def test_the_lines_of_its_card_run_in_its_folder(there, monkeypatch):
    assert merge("adapter", "--output_dir", "merged") == 0
    monkeypatch.chdir("merged")
    text = Path("README.md").read_text()
    scope = {}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    assert scope["tokenizer"].eos_token == "<eos>" and not isinstance(scope["model"], PeftModel)
    assert str(there) not in text and "The base model `base`" in text


def test_a_second_merge_needs_leave_to_replace_the_first(there, capsys):
    assert merge("adapter", "--output_dir", "merged") == 0
    assert merge("adapter", "--output_dir", "merged") == 1
    assert "merged is not empty" in capsys.readouterr().err
    assert merge("adapter", "--output_dir", "merged", "--overwrite_output_dir", "true", "--dtype", "bfloat16") == 0
    assert AutoModelForCausalLM.from_pretrained("merged").dtype == torch.bfloat16
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("")
    assert merge("adapter", "--output_dir", "mine", "--overwrite_output_dir", "true") == 1
    assert "mine is not empty (thesis.txt); name another output_dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["base", "--output_dir", "out"], 1, "base is a model already, and not an adapter"),
        (["nowhere/at/all", "--output_dir", "out"], 1, "there is no such folder"),
        (["reward", "--output_dir", "out"], 1, "is an adapter of task type SEQ_CLS"),
        (["adapter", "--output_dir", "out", "--push_to_hub", "true"], 1, "out cannot be pushed to: "),
        (["--output_dir", "out"], 2, "no adapter is named; write onetrunk merge ADAPTER"),
        (["adapter", "--output_dir", "out", "--dtype", "int8"], 2, "int8"),
    ],
)
def test_what_cannot_be_merged_says_why_and_writes_nothing(there, capsys, words, code, message):
    if words[0] == "reward":
        model = AutoModelForSequenceClassification.from_pretrained("base", num_labels=1)
        config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], base_model_name_or_path="base")
        get_peft_model(model, config).save_pretrained("reward")
    assert merge(*words) == code
    assert message in capsys.readouterr().err
    assert not list(Path("out").glob("*.safetensors")) and not list(Path("out").glob("*.json"))
