"""From what a user hands over to a trunk, from a trunk to files and back; and bases made out of nothing."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from onetrunk.models.adapters import ADAPTER_FILE, adapter_parameters
from onetrunk.models.base_model import load_base, load_tokenizer, stop_token_ids
from onetrunk.models.build import BaseShape, build_trunk, default_peft_config, make_base, train_tokenizer
from onetrunk.models.trunk import TrunkModel
from onetrunk.models.value_head import VALUE_HEAD_FILE
from onetrunk.models.value_model import load_value_model
from tests.models.branches import FEW, a_pack, a_trunk, an_sft_model, logits, lora, loss_of, move, same, step_gradients
from tests.tiny import tiny_model


def branches(trunk):
    return {n: p.detach().clone() for n, p in trunk.named_parameters() if "lora_" in n or "value_head" in n}


def test_a_trunk_is_built_from_a_model_a_name_and_a_path(tmp_path):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path)
    for model in (base, str(tmp_path), tmp_path):
        trunk = build_trunk(model, adapter_layers="top-2")
        assert trunk.peft_config["default"].r == 16 and trunk.cut == 2 and not trunk.has_reference_adapter
        assert same(logits(trunk), logits(tiny_model("llama")))
    assert default_peft_config().lora_dropout == 0
    trunk = build_trunk(str(tmp_path), lora(), model_init_kwargs={"dtype": "bfloat16"})
    assert trunk.peft_config["default"].r == 4 and trunk.get_base_model().dtype == torch.bfloat16


def test_a_trunk_goes_on_from_a_folder_with_an_adapter_as_from_its_model(tmp_path):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    loaded = build_trunk(str(tmp_path / "base"), lora()).get_base_model()  # so that it knows where it comes from
    sft = an_sft_model(tiny_model("llama").from_pretrained(loaded.name_or_path), lora_dropout=0.05)
    expected = logits(sft)
    sft.save_pretrained(tmp_path / "sft")
    trunks = [build_trunk(model) for model in (tmp_path / "sft", str(tmp_path / "sft"), sft)]
    for trunk in trunks:
        assert same(logits(trunk), expected)
        assert trunk.has_reference_adapter and all(c.lora_dropout == 0 for c in trunk.peft_config.values())
        output = trunk(pack=a_pack(), roles=("policy", "reference"))
        assert same(output.logprobs.detach(), output.ref_logprobs)
        move(trunk)
    assert same(step_gradients(trunks[0], a_pack()), step_gradients(trunks[2], a_pack()))


def test_a_base_of_another_trunk_is_rejected_and_that_trunk_unchanged():
    base = tiny_model("llama")
    first = build_trunk(base, lora())
    move(first)
    before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    with pytest.raises(ValueError, match="the model has adapters already"):
        build_trunk(base, lora())
    after = first.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_a_wrong_setting_leaves_the_adapter_of_a_model_that_is_handed_over():
    model = an_sft_model(tiny_model("llama"))
    expected = logits(model)
    with pytest.raises(ValueError, match="top-99"):
        build_trunk(model, adapter_layers="top-99")
    assert same(logits(model), expected) and same(logits(build_trunk(model)), expected)


def test_the_value_goes_on_from_a_folder_that_has_it(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    first = build_trunk(tmp_path / "base", lora())
    move(first)
    first.save_pretrained(tmp_path / "ppo")
    second = build_trunk(tmp_path / "ppo")
    with torch.no_grad():
        before, after = (m.eval()(pack=a_pack(), roles=("policy", "value", "reference")) for m in (first, second))
    assert same(before.values, after.values) and same(before.logprobs, after.logprobs)
    assert same(after.ref_logprobs, after.logprobs)  # a new run is compared with what it starts from
    assert before.values.abs().sum() > 0


def test_the_head_of_a_value_adapter_of_an_earlier_version_is_named_and_can_be_deleted(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    build_trunk(tmp_path / "base", lora()).save_pretrained(tmp_path / "ppo")
    file = tmp_path / "ppo" / VALUE_HEAD_FILE
    save_file({"weight": torch.ones(1, 32), "bias": torch.zeros(1)}, file)
    for load in (build_trunk, load_value_model):
        with pytest.raises(ValueError, match=f"{file} is the head of a value adapter, .*; delete it"):
            load(tmp_path / "ppo")
    file.unlink()
    assert not build_trunk(tmp_path / "ppo")(pack=a_pack()).values.any()


def test_a_merged_or_doubly_active_adapter_is_refused():
    sft = an_sft_model()
    sft.merge_adapter()
    with pytest.raises(ValueError, match="merged into the base model"):
        build_trunk(sft)
    sft = an_sft_model()
    sft.add_adapter("other", lora())
    sft.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"adapters \['default', 'other'\] are active together"):
        build_trunk(sft)


def test_settings_that_exclude_each_other_are_refused(tmp_path):
    sft = an_sft_model()
    with pytest.raises(ValueError, match="carries an adapter already.*leave peft_config out"):
        build_trunk(sft, lora())
    sft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} is an adapter and peft_config asks for a new one"):
        build_trunk(str(tmp_path), lora())
    for settings in ({"model_init_kwargs": {"dtype": "bfloat16"}}, {"quantization_config": object()}):
        with pytest.raises(ValueError, match="given by name or path; this one is loaded already"):
            build_trunk(tiny_model("llama"), lora(), **settings)
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PromptTuningConfig.*only LORA is supported"):
        build_trunk(get_peft_model(tiny_model("llama"), prompts))
    with pytest.raises(ValueError, match="no layer that adapter_layers chooses"):
        build_trunk(an_sft_model(target_modules=["q_proj"], layers_to_transform=[0, 1]), adapter_layers="top-2")
    with pytest.raises(ValueError, match="init_lora_weights='pissa'"):  # its base is no longer the base model
        build_trunk(get_peft_model(tiny_model("llama"), lora(init_lora_weights="pissa")))


def test_a_trunk_passes_through_when_the_settings_agree():
    trunk = a_trunk(adapter_layers="top-2")
    assert build_trunk(trunk, adapter_layers="top-2") is trunk
    assert build_trunk(trunk) is trunk
    with pytest.raises(ValueError, match="leave peft_config out"):
        build_trunk(trunk, lora())
    with pytest.raises(ValueError, match="trains from layer 2 on"):
        build_trunk(trunk, adapter_layers="top-1")


@pytest.mark.parametrize(
    ("continued", "config"), [(False, {}), (True, {"use_dora": True}), (False, {"use_rslora": True})]
)
def test_what_is_saved_comes_back_bit_for_bit(tmp_path, continued, config):
    def build(seed):
        model = an_sft_model(**config) if continued else tiny_model("llama")
        trunk = build_trunk(model, None if continued else lora(**config), adapter_layers="top-2")
        move(trunk, seed=seed)
        return trunk

    trunk, other = build(1), build(2)
    trunk.save_pretrained(tmp_path)
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == ({"reference"} if continued else set())
    assert (tmp_path / VALUE_HEAD_FILE).is_file() and (tmp_path / ADAPTER_FILE).is_file()
    assert not any("value_head" in key or "embed" in key for key in load_file(tmp_path / ADAPTER_FILE))
    roles, flags = ("policy", "value", "reference"), [p.requires_grad for p in other.parameters()]
    assert not same(branches(other), branches(trunk))
    other.load_branches(tmp_path)
    assert same(branches(other), branches(trunk))
    assert [p.requires_grad for p in other.parameters()] == flags
    assert same(other(pack=a_pack(), roles=roles), trunk(pack=a_pack(), roles=roles))
    assert same(step_gradients(other, a_pack())[1], step_gradients(trunk, a_pack())[1])


@pytest.mark.parametrize("family", FEW)
def test_peft_alone_loads_the_policy(family, tmp_path):
    trunk = a_trunk(family, adapter_layers="top-2")
    trunk.save_pretrained(tmp_path)
    plain = PeftModel.from_pretrained(tiny_model(family), tmp_path)
    assert same(logits(plain), logits(trunk)) and list(plain.peft_config) == ["default"]
    assert len(load_file(tmp_path / ADAPTER_FILE)) == len(adapter_parameters(trunk, "default"))


def test_a_continued_adapter_is_saved_whole_also_below_the_cut(tmp_path):
    trunk = build_trunk(an_sft_model(), adapter_layers="top-1").train()
    optimizer = torch.optim.Adam([p for p in trunk.parameters() if p.requires_grad], lr=0.1)
    loss_of(trunk(pack=a_pack())).backward()
    optimizer.step()
    trunk.save_pretrained(tmp_path)
    assert len(load_file(tmp_path / ADAPTER_FILE)) == 56
    plain = PeftModel.from_pretrained(tiny_model("llama"), tmp_path)
    assert same(logits(plain), logits(trunk))


def saved(folder, **settings):
    trunk = build_trunk(an_sft_model(), **settings)
    move(trunk)
    trunk.save_pretrained(folder)
    return trunk


@pytest.mark.parametrize("damage", ["gone", "missing", "shape"])
@pytest.mark.parametrize("file", [ADAPTER_FILE, f"reference/{ADAPTER_FILE}", VALUE_HEAD_FILE])
def test_a_file_that_is_gone_or_does_not_fit_is_named_and_nothing_is_loaded(tmp_path, file, damage):
    trunk = saved(tmp_path)
    tensors = load_file(tmp_path / file)
    first = sorted(tensors)[0]
    if damage == "gone":
        (tmp_path / file).unlink()
    else:
        tensors = {**tensors, first: torch.zeros(7, 3)} if damage == "shape" else {"something.else": tensors[first]}
        save_file(tensors, tmp_path / file)
    move(trunk, seed=9)
    before = branches(trunk)
    with pytest.raises(ValueError, match=str(tmp_path / file)):
        trunk.load_branches(tmp_path)
    assert same(branches(trunk), before)


def test_branches_that_this_trunk_has_not_are_refused(tmp_path):
    saved(tmp_path)
    fresh = TrunkModel(tiny_model("llama"), lora())
    with pytest.raises(ValueError, match="holds an adapter 'reference' and this trunk has none"):
        fresh.load_branches(tmp_path)
    narrow = a_trunk(base=tiny_model("llama", hidden_size=16))
    a_trunk().save_pretrained(tmp_path / "wide")
    with pytest.raises(ValueError, match=f"{tmp_path / 'wide' / ADAPTER_FILE} does not fit adapter 'default'"):
        narrow.load_branches(tmp_path / "wide")


@pytest.mark.parametrize("model_type", ["kimi_linear", "minimax", "phimoe"])
def test_architectures_that_cannot_be_a_trunk_are_rejected_by_name(tmp_path, model_type):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    message = f"the architecture {model_type} is not supported: .*; take a model of another"
    with pytest.raises(ValueError, match=message):
        build_trunk(str(tmp_path), lora())


TEXTS = ["the lamp in the kitchen", "the chair in the garden"] * 20
TEMPLATE = "{% for m in messages %}{{ '<|user|>' + m['content'] + eos_token }}{% endfor %}"
SHAPE = BaseShape(vocab_size=300, hidden_size=16, num_layers=3, num_heads=2, max_positions=40)


def made(folder, **settings):
    settings = {"shape": SHAPE, "chat_template": TEMPLATE, "special_tokens": ["<|user|>"], **settings}
    return make_base(TEXTS, folder, **settings)


def test_what_was_made_loads_and_fits_together(tmp_path):
    folder = made(tmp_path / "base")
    model, tokenizer = load_base(str(folder)), load_tokenizer(str(folder))
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (16, 3, 40)
    assert config.vocab_size == len(tokenizer) <= 300 and config.tie_word_embeddings
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert stop_token_ids(tokenizer, model.generation_config) == (1,)
    assert {path.suffix for path in folder.glob("model*")} == {".safetensors"}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the lamp"}])["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|user|>") and ids[-1] == 1
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), len(tokenizer))


def test_a_scale_of_the_start_scales_every_weight(tmp_path):
    """The draws of a seed are the same, times the spread; norms start at 1."""
    one, half = (load_base(str(made(tmp_path / str(s), shape=replace(SHAPE, init_scale=s)))) for s in (1.0, 0.5))
    for before, after in zip(one.parameters(), half.parameters(), strict=True):
        torch.testing.assert_close(after, before * (0.5 if before.dim() == 2 else 1.0))


@pytest.mark.parametrize("text", ["the lamp", " two  spaces\n", "Größe 漢字 🙂", "never-seen: [42]"])
def test_every_text_decodes_to_itself(text):
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_vocabulary_without_room_for_a_merge_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size 258 is too small: 256 bytes and 3 special tokens"):
        made(tmp_path, shape=BaseShape(vocab_size=258))
