"""The base model: layers, dropout, padding; and what is refused, such as a head of another formula."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertModel, GenerationConfig, T5Config
from transformers import T5ForConditionalGeneration as T5

from onetrunk.models import base_model as bb
from tests.models.branches import logits
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", lambda logits: 4 * (logits / 4).tanh()),
        ("llama", lambda logits: 5 * (logits / 5).tanh()),
        ("granite", lambda logits: 4 * logits),
        ("qwen2", lambda logits: 1.01 * logits),
        ("gpt2", lambda logits: logits + 0.1),
    ],
)
def test_a_wrong_head_formula_is_caught(family, change):
    model = tiny_model(family)
    # The model computes something else than its config says.
    model.register_forward_hook(lambda _module, _args, output: setattr(output, "logits", change(output.logits)))
    with pytest.raises(ValueError, match="head of .* is not supported"):
        bb.verify_head(model)


def test_unsupported_heads_are_refused():
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="carries an adapter"):
        bb.output_head(adapted)
    copied = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match="carries an adapter"):
        bb.output_head(copied)
    model = tiny_model("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="only nn.Linear"):
        bb.output_head(model)


def test_a_quantised_head_is_refused():
    import bitsandbytes

    model = tiny_model("llama")
    for kind in (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt):
        model.lm_head = kind(64, 64, bias=False)
        with pytest.raises(ValueError, match="is quantised"):
            bb.output_head(model)


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt2", "sdpa")])
def test_without_dropout_train_computes_what_eval_does(family, attention):
    names = {"gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop")}.get(family, ("attention_dropout",))
    model = tiny_model(family, attn_implementation=attention, **dict.fromkeys(names, 0.5))
    expected = logits(model)
    assert not torch.equal(logits(model.train()), expected)
    bb.disable_dropout(model)
    assert torch.equal(logits(model.train()), expected)
    assert all(getattr(model.config, name) == 0 for name in names)


def test_two_lists_of_layers_are_refused():
    model = tiny_model("llama")
    model.model.more = nn.ModuleList(nn.Identity() for _ in range(4))
    with pytest.raises(ValueError, match="2 lists of 4"):
        bb.decoder_layers(model)


def test_a_checkpoint_of_pickles_is_refused(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(RuntimeError, match="safetensors"):
        bb.load_base(str(tmp_path))


def test_encoders_and_encoder_decoders_are_refused(tmp_path):
    small = {"vocab_size": 64, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16}
    T5(T5Config(**small, decoder_start_token_id=0)).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="encoder-decoder"):
        bb.load_base(str(tmp_path / "t5"))
    config = BertConfig(vocab_size=64, hidden_size=24, num_hidden_layers=1, intermediate_size=32)
    BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="lacks .* weights"):
        bb.load_base(str(tmp_path / "bert"))


def test_padding_outside_the_vocabulary_is_repaired_and_told_to_the_config():
    tokenizer, config = tiny_tokenizer(), tiny_model("llama").config
    assert bb.repair_padding(tokenizer, config).pad_token_id == 0 == config.pad_token_id
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert tokenizer.pad_token_id == 64
    assert bb.repair_padding(tokenizer, config).pad_token_id == 1 == config.pad_token_id


def test_a_tokenizer_that_cannot_end_a_completion_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<new>"})
    with pytest.raises(ValueError, match="id 64, but the model knows 64"):
        bb.repair_padding(tokenizer, tiny_model("llama").config)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        bb.repair_padding(tokenizer)


@pytest.mark.parametrize(("more", "expected"), [(None, (1,)), (1, (1,)), (9, (1, 9)), ([9, 1, 5], (1, 5, 9))])
def test_stop_tokens_are_those_of_tokenizer_and_generation_config(more, expected):
    assert bb.stop_token_ids(tiny_tokenizer(), GenerationConfig(eos_token_id=more)) == expected
    assert bb.stop_token_ids(tiny_tokenizer()) == (1,)
