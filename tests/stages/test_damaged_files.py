"""Files from elsewhere that are damaged or hostile end a run with exit code 1 and one message that names the file.

Each case damages one file of a whole model, reward model or adapter and gives it to a stage. No case may leave a stack
trace, fill the memory or go on without an end: the generous limits are `limited` and pytest's timeout.
"""

import json
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification

from onetrunk import cli
from tests.damage import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    DEEP_ARRAY,
    DEEP_OBJECT,
    INDEX,
    TEMPLATE,
    WEIGHTS,
    both,
    changed,
    header,
    removed,
    tensors_changed,
    truncated,
    written,
)
from tests.stages.small_runs import make_material, words_of, write_rows
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

GIB = 2**30


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """The rows of every stage, a base, a reward model, a policy's adapter and a reward adapter."""
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder / "base")
    scorer = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
    scorer.save_pretrained(folder / "scorer")
    tiny_tokenizer().save_pretrained(folder / "scorer")
    for name, model, task in (
        ("adapter", tiny_model("llama", num_hidden_layers=2), TaskType.CAUSAL_LM),
        ("reward-adapter", scorer, TaskType.SEQ_CLS),
    ):
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type=task)
        peft = get_peft_model(model, lora)
        peft.peft_config["default"].base_model_name_or_path = "base"
        peft.save_pretrained(folder / name)
    turn = {"role": "user", "content": "the cat"}
    write_rows(
        folder / "turns.jsonl", [{"prompt": [turn], "completion": [{"role": "assistant", "content": "runs"}]}] * 8
    )
    return folder


@pytest.fixture(autouse=True)
def in_folder(material, monkeypatch, tmp_path):
    monkeypatch.chdir(material)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def limited():
    """No case takes more than another GiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < GIB


def damaged(tmp_path, source, damage):
    folder = tmp_path / "damaged"
    shutil.copytree(source, folder)
    damage(folder)
    return folder


def words(verb, *options):
    words = words_of(verb, *options)
    # An adapter has its own rank, and another judge no rubric.
    left_out = {"--rubric"} if "--judge" in options else {"--lora_r"} if verb == "ppo" else set()
    return [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & left_out]


def refused(capsys, verb, *options, names):
    """Run a stage; return its error message, which is one line and names a file."""
    code = cli.main(words(verb, *map(str, options)))
    err = capsys.readouterr().err
    assert code == 1, err
    assert "Traceback" not in err
    messages = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1 and str(names) in messages[0], err
    assert len(messages[0]) < 1500
    return messages[0]


# --- a base model ---


def poisoned(value):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value

    return change


def misshapen(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)


def index_of(files):
    return both(removed(WEIGHTS), written(INDEX, json.dumps({"weight_map": files})))


# What is damaged: how, and what the message says. The file is named in each, by its path.
WEIGHT_FAULTS = {
    "half downloaded": (truncated(WEIGHTS), WEIGHTS, "only partly downloaded"),
    "cut off within its header": (truncated(WEIGHTS, 0.001), WEIGHTS, "only partly downloaded"),
    "empty": (written(WEIGHTS, b""), WEIGHTS, "it has 0 bytes"),
    "a page of HTML": (written(WEIGHTS, b"<!DOCTYPE html><html>404</html>"), WEIGHTS, "no whole safetensors file"),
    "a pointer of git": (
        written(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\nsize 1\n"),
        WEIGHTS,
        "no whole",
    ),
    "a header that is too large": (header(WEIGHTS, b"{}", 2**62), WEIGHTS, "header too large"),
    "a header that is a list": (header(WEIGHTS, b"[1, 2, 3]"), WEIGHTS, "no whole safetensors file"),
    "no tensors": (header(WEIGHTS, b"{}"), "damaged", "lacks 21 weights"),
    "NaN": (tensors_changed(WEIGHTS, poisoned(float("nan"))), "model.layers.1.mlp.up_proj.weight", "1 of 2048 values"),
    "infinity": (tensors_changed(WEIGHTS, poisoned(float("-inf"))), "model.layers.1.mlp.up_proj.weight", "infinite"),
    "a tensor of another shape": (tensors_changed(WEIGHTS, misshapen), CONFIG, "[3, 4] in the file and [64, 32]"),
    "a missing tensor": (
        tensors_changed(WEIGHTS, lambda tensors: tensors.pop("model.norm.weight")),
        "model.norm.weight",
        "lacks 1 weights",
    ),
    "no file": (removed(WEIGHTS), "damaged", "no file named model.safetensors"),
    "an index that is no JSON": (both(removed(WEIGHTS), written(INDEX, "{")), INDEX, "is not JSON"),
    "an index that is a list": (both(removed(WEIGHTS), written(INDEX, "[]")), INDEX, "array, expected an object"),
    "an index of nothing": (index_of({}), INDEX, "has no weight_map"),
    "an index of numbers": (index_of({"a": 3}), INDEX, "has no weight_map"),
    "a missing shard": (index_of({"a": "model-00001-of-00002.safetensors"}), INDEX, "the download is not complete"),
    "a shard elsewhere": (index_of({"a": "../base/model.safetensors"}), INDEX, "without '..'"),
}
CONFIG_FAULTS = {
    "empty": (written(CONFIG, ""), "is not JSON"),
    "half downloaded": (truncated(CONFIG), "is not JSON"),
    "a list": (written(CONFIG, "[]"), "holds a JSON array"),
    "null": (written(CONFIG, "null"), "holds a JSON null"),
    "nested arrays": (written(CONFIG, DEEP_ARRAY), "nested too deeply"),
    "nested objects": (written(CONFIG, DEEP_OBJECT), "nested too deeply"),
    "no UTF-8": (written(CONFIG, b"\xff\xfe{"), "is not JSON"),
    "a huge number": (written(CONFIG, '{"num_hidden_layers": ' + "9" * 5000 + "}"), "is not JSON"),
    "no model_type": (changed(CONFIG, model_type=None), ""),
    "an unknown model_type": (changed(CONFIG, model_type="unheard_of"), "unheard_of"),
    "model_type a list": (changed(CONFIG, model_type=["llama"]), ""),
    "text_config a number": (changed(CONFIG, text_config=3), "text_config is 3"),
    "layers a text": (changed(CONFIG, num_hidden_layers="two"), "num_hidden_layers"),
    "layers null": (changed(CONFIG, num_hidden_layers=None), "num_hidden_layers"),
    "no layers": (changed(CONFIG, num_hidden_layers=0), "num_hidden_layers 0, expected a number above 0"),
    "negative layers": (changed(CONFIG, num_hidden_layers=-1), "expected a number above 0"),
    "a billion layers": (changed(CONFIG, num_hidden_layers=10**9), "at most 10000"),
    "a billion layers by another name": (changed(CONFIG, model_type="gpt2", n_layer=10**9), "at most 10000"),
    "a billion nested layers": (changed(CONFIG, text_config={"num_hidden_layers": 10**9}), "at most 10000"),
    "infinitely many layers": (changed(CONFIG, num_hidden_layers=float("inf")), "at most 10000"),
    "more layers than tensors": (changed(CONFIG, num_hidden_layers=9999), "9999 layers, and the weights"),
    "a billion labels": (changed(CONFIG, num_labels=10**9), "at most 1000000"),
    "a width a list": (changed(CONFIG, hidden_size=[32]), "hidden_size"),
    "no width": (changed(CONFIG, hidden_size=0), "hidden_size 0"),
    "another width": (changed(CONFIG, hidden_size=48), "of another shape|have another shape"),
    "a huge width": (changed(CONFIG, hidden_size=2**20), "describes a model of"),
    "a huge vocabulary": (changed(CONFIG, vocab_size=10**12), "describes a model of"),
    "a negative vocabulary": (changed(CONFIG, vocab_size=-4), "expected a number above 0"),
    "no heads": (changed(CONFIG, num_attention_heads=0), ""),
    "heads that do not divide": (changed(CONFIG, num_attention_heads=5), "heads"),
    "an unknown activation": (changed(CONFIG, hidden_act="nope"), "nope"),
    "an unknown dtype": (changed(CONFIG, dtype="float99"), "float99"),
    "quantization a number": (changed(CONFIG, quantization_config=3), ""),
    "a padding token beyond the vocabulary": (changed(CONFIG, pad_token_id=10**6), ""),
    "a padding token as text": (changed(CONFIG, pad_token_id="x"), "pad_token_id"),
    "labels a list": (changed(CONFIG, id2label=[1]), ""),
    "auto_map a number": (changed(CONFIG, auto_map=3), ""),
}
GENERATION = "generation_config.json"
GENERATION_FAULTS = {
    "half downloaded": (truncated(GENERATION), "is not JSON"),
    "a list": (written(GENERATION, "[]"), "holds a JSON array"),
    "an end token as text": (changed(GENERATION, eos_token_id="x"), "eos_token_id 'x'"),
}
TOKENIZER, ABOUT, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
BAD_REGEX = {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
TOKENIZER_FAULTS = {
    "half downloaded": (truncated(TOKENIZER), TOKENIZER, "is not JSON"),
    "empty": (written(TOKENIZER, ""), TOKENIZER, "is not JSON"),
    "a list": (written(TOKENIZER, "[]"), TOKENIZER, "holds a JSON array"),
    "an empty object": (written(TOKENIZER, "{}"), TOKENIZER, "cannot be used"),
    "nested arrays": (written(TOKENIZER, DEEP_ARRAY), TOKENIZER, "nested too deeply"),
    "an unknown model": (changed(TOKENIZER, model={"type": "nope"}), TOKENIZER, "cannot be used"),
    "another version": (changed(TOKENIZER, version=3), TOKENIZER, "expected a string"),
    "a regular expression that is none": (changed(TOKENIZER, pre_tokenizer=BAD_REGEX), TOKENIZER, "parenthesis"),
    "no file": (removed(TOKENIZER), "damaged", "holds no tokenizer"),
    "settings half downloaded": (truncated(ABOUT), ABOUT, "is not JSON"),
    "settings a list": (written(ABOUT, "[]"), ABOUT, "holds a JSON array"),
    "settings nested": (written(ABOUT, DEEP_OBJECT), ABOUT, "nested too deeply"),
    "a class that is a number": (changed(ABOUT, tokenizer_class=3), ABOUT, "cannot be used"),
    "an end token that is a number": (changed(ABOUT, eos_token=3), ABOUT, "eos_token"),
    "an end token that is a list": (changed(ABOUT, eos_token=["<eos>"]), ABOUT, "eos_token"),
    "a limit that is a text": (changed(ABOUT, model_max_length="x"), ABOUT, "cannot be used"),
    "added tokens that are numbers": (changed(ABOUT, added_tokens_decoder={"x": 3}), ABOUT, "added_tokens_decoder"),
    "special tokens that are no JSON": (
        written("special_tokens_map.json", "{"),
        "special_tokens_map.json",
        "not JSON",
    ),
    "special tokens that are a list": (written("special_tokens_map.json", "[]"), "special_tokens_map.json", "array"),
    "added tokens that are no JSON": (written("added_tokens.json", "{"), "added_tokens.json", "is not JSON"),
    "a template that is no UTF-8": (written(TEMPLATE, b"\xff\xfe"), TEMPLATE, "is not UTF-8"),
}


def cases(faults, *marks):
    return [pytest.param(*fault, id=name, marks=marks) for name, fault in faults.items()]


@pytest.mark.parametrize(("damage", "file", "reason"), cases(WEIGHT_FAULTS))
def test_damaged_weights_of_a_base_are_named(tmp_path, capsys, damage, file, reason):
    folder = damaged(tmp_path, "base", damage)
    names = folder / file if (folder / file).is_file() else folder if file == "damaged" else file
    message = refused(capsys, "sft", "--model_name_or_path", folder, names=names)
    assert reason in message and str(folder) in message


@pytest.mark.parametrize(("damage", "reason"), cases(CONFIG_FAULTS))
def test_a_damaged_config_of_a_base_is_named(tmp_path, capsys, damage, reason):
    folder = damaged(tmp_path, "base", damage)
    message = refused(capsys, "sft", "--model_name_or_path", folder, names=folder / CONFIG)
    assert re.search(reason, message)


@pytest.mark.parametrize(("damage", "reason"), cases(GENERATION_FAULTS))
def test_a_damaged_generation_config_is_named(tmp_path, capsys, damage, reason):
    folder = damaged(tmp_path, "base", damage)
    message = refused(capsys, "ppo", "--model_name_or_path", folder, names=folder / GENERATION)
    assert reason in message


@pytest.mark.parametrize(("damage", "file", "reason"), cases(TOKENIZER_FAULTS))
def test_a_damaged_tokenizer_is_named(tmp_path, capsys, damage, file, reason):
    folder = damaged(tmp_path, "base", damage)
    names = folder if file == "damaged" else folder / file
    assert reason in refused(capsys, "sft", "--model_name_or_path", folder, names=names)


# --- chat templates ---

# Each template runs in a process of its own once, which takes a second: the others are slow tests.
TEMPLATE_FAULTS = {
    "a mistake of syntax": ("{% for %}", "TemplateSyntaxError"),
    "a recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
}
MORE_TEMPLATE_FAULTS = {
    "a huge range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "a huge text": ("{{ 'a' * 10**12 }}", "MemoryError"),
    "deep brackets": ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "Error"),
}
ENDLESS = {
    "loops in loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "a huge power": "{{ 9**(9**9) }}",
    "a text that doubles": "{% set t = namespace(x='a') %}{% for i in range(99) %}{% set t.x = t.x * 2 %}{% endfor %}",
}
FAILING = {
    "raises": ("{{ raise_exception('not so') }}", "not so"),
    "a division by zero": ("{{ 1 / 0 }}", "division by zero"),
}
MORE_FAILING = {
    "an undefined name": ("{{ nope.x.y }}", "'nope' is undefined"),
    "a wrong type": ("{{ 1 + 'a' }}", "unsupported operand"),
    "what the sandbox forbids": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "another file": ("{% include 'x' %}", "loader"),
}
ON_TURNS = ["--dataset_name", "turns.jsonl"]


def model_with(tmp_path, template):
    return damaged(tmp_path, "base", written(TEMPLATE, template))


@pytest.mark.parametrize(
    ("template", "reason"), cases(TEMPLATE_FAULTS) + cases(MORE_TEMPLATE_FAULTS, pytest.mark.slow)
)
def test_a_chat_template_that_cannot_run_is_named(tmp_path, capsys, template, reason):
    folder = model_with(tmp_path, template)
    message = refused(capsys, "sft", "--model_name_or_path", folder, *ON_TURNS, names=folder / TEMPLATE)
    assert reason in message


@pytest.mark.slow
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_chat_template_that_does_not_end_is_named(tmp_path, capsys, template):
    folder = model_with(tmp_path, template)
    message = refused(capsys, "sft", "--model_name_or_path", folder, *ON_TURNS, names=folder / TEMPLATE)
    assert "takes more than 2 s or 2 GiB" in message or "MemoryError" in message


@pytest.mark.parametrize("verb", ["sft", "ppo"])
@pytest.mark.parametrize(("template", "reason"), cases(FAILING) + cases(MORE_FAILING, pytest.mark.slow))
def test_a_chat_template_that_fails_on_the_rows_is_named(tmp_path, capsys, verb, template, reason):
    folder = model_with(tmp_path, template)
    if verb == "ppo":
        code = cli.main(words("ppo", "--model_name_or_path", str(folder), *ON_TURNS))
        err = capsys.readouterr().err
        assert code == 1 and "Traceback" not in err and "chat template" in err and reason in err
    else:
        assert reason in refused(capsys, verb, "--model_name_or_path", folder, *ON_TURNS, names=folder)


# --- every entrance ---

BROKEN = {
    "weights": (truncated(WEIGHTS), WEIGHTS),
    "config": (written(CONFIG, DEEP_ARRAY), CONFIG),
    "tokenizer": (truncated(TOKENIZER), TOKENIZER),
}
ENTRANCES = {
    "sft": ("base", "sft --model_name_or_path {}"),
    "reward": ("base", "reward --model_name_or_path {}"),
    "distill, a student": ("base", "distill --model_name_or_path {}"),
    "distill, a teacher": ("scorer", "distill --teacher {}"),
    "ppo": ("base", "ppo --model_name_or_path {}"),
    "ppo, a reward model": ("scorer", "ppo --reward_funcs {}"),
    "ppo, the start of the value head": ("scorer", "ppo --value_head_init {}"),
    "eval": ("base", "eval --model_name_or_path {}"),
    "eval, a reward model": ("scorer", "eval --reward_funcs {}"),
    "eval, an opponent": ("base", "eval --opponent {}"),
    "prefs": ("base", "prefs --model_name_or_path {}"),
    "prefs, a judge": ("base", "prefs --judge {}"),
    "prefs, a reward model as judge": ("scorer", "prefs --judge reward:{}"),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("damage", "file"), cases(BROKEN))
@pytest.mark.parametrize(("source", "command"), cases(ENTRANCES))
def test_a_damaged_model_is_named_wherever_it_is_given(tmp_path, capsys, source, command, damage, file):
    if "value_head_init" in command and file == TOKENIZER:
        pytest.skip("its tokenizer is not read")
    folder = damaged(tmp_path, source, damage)
    verb, *options = command.format(folder).split()
    refused(capsys, verb, *options, names=folder / file)


# --- adapters ---


def nan_in_adapter(tensors):
    next(iter(tensors.values()))[0, 0] = float("nan")


SLOW_PATTERN = "(" + "[a-z_.0-9]*" * 12 + ")*!"
ADAPTER_FAULTS = {
    "half downloaded": (truncated(ADAPTER), ADAPTER, "only partly downloaded"),
    "empty": (written(ADAPTER, b""), ADAPTER, "it has 0 bytes"),
    "a huge header": (header(ADAPTER, b"{}", 2**62), ADAPTER, "header too large"),
    "NaN": (tensors_changed(ADAPTER, nan_in_adapter), ADAPTER, "NaN or infinity in 1 tensors"),
    "no weights": (removed(ADAPTER), "damaged", "adapter_model.safetensors"),
    "a config that is empty": (written(ADAPTER_CONFIG, ""), ADAPTER_CONFIG, "is not JSON"),
    "a config half downloaded": (truncated(ADAPTER_CONFIG), ADAPTER_CONFIG, "is not JSON"),
    "a config that is a list": (written(ADAPTER_CONFIG, "[]"), ADAPTER_CONFIG, "holds a JSON array"),
    "a nested config": (written(ADAPTER_CONFIG, DEEP_OBJECT), ADAPTER_CONFIG, "nested too deeply"),
    "an unknown kind": (changed(ADAPTER_CONFIG, peft_type="NOPE"), ADAPTER_CONFIG, "peft_type 'NOPE'"),
    "no kind": (changed(ADAPTER_CONFIG, peft_type=None), ADAPTER_CONFIG, "peft_type None"),
    "a kind that is a list": (changed(ADAPTER_CONFIG, peft_type=["LORA"]), ADAPTER_CONFIG, "peft_type ['LORA']"),
    "a base that is a number": (changed(ADAPTER_CONFIG, base_model_name_or_path=3), ADAPTER_CONFIG, "name or path"),
    "a rank of a billion": (changed(ADAPTER_CONFIG, r=10**9), ADAPTER_CONFIG, "r 1000000000, and the weights"),
    "a rank that is a text": (changed(ADAPTER_CONFIG, r="x"), ADAPTER_CONFIG, "r 'x'"),
    "no rank": (changed(ADAPTER_CONFIG, r=0), ADAPTER_CONFIG, "r 0"),
    "a rank of a billion for a module": (
        changed(ADAPTER_CONFIG, rank_pattern={"q_proj": 10**9}),
        ADAPTER_CONFIG,
        "q_proj 1000000000",
    ),
    "ranks that are a list": (changed(ADAPTER_CONFIG, rank_pattern=[1]), ADAPTER_CONFIG, "rank_pattern [1]"),
    "a scale that is a text": (changed(ADAPTER_CONFIG, lora_alpha="x"), ADAPTER_CONFIG, "cannot be used"),
    "an infinite scale": (changed(ADAPTER_CONFIG, lora_alpha=float("inf")), ADAPTER_CONFIG, "lora_alpha"),
    "a billion copies of layers": (
        changed(ADAPTER_CONFIG, layer_replication=[[0, 10**9]]),
        ADAPTER_CONFIG,
        "makes 1000000000 layers",
    ),
    "a million lists of copies": (
        written(ADAPTER_CONFIG, b'{"layer_replication": [[0, 1]' + b", [0, 1]" * 1_250_000 + b"]}"),
        ADAPTER_CONFIG,
        "it has 10000031 bytes, at most 10000000",
    ),
    "copies of layers that are numbers": (changed(ADAPTER_CONFIG, layer_replication=[3]), ADAPTER_CONFIG, "cannot be"),
    "a target that is a number": (changed(ADAPTER_CONFIG, target_modules=3), ADAPTER_CONFIG, "cannot be used"),
    "targets that are not there": (changed(ADAPTER_CONFIG, target_modules=["nope"]), ADAPTER_CONFIG, "nope"),
    "a pattern that is none": (changed(ADAPTER_CONFIG, target_modules="((("), ADAPTER_CONFIG, "no regular expression"),
}


@pytest.mark.parametrize(("damage", "file", "reason"), cases(ADAPTER_FAULTS))
def test_a_damaged_adapter_is_named(tmp_path, capsys, damage, file, reason):
    folder = damaged(tmp_path, "adapter", damage)
    names = folder if file == "damaged" else folder / file
    assert reason in refused(capsys, "eval", "--model_name_or_path", folder, names=names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [
        pytest.param({"target_modules": SLOW_PATTERN}, id="target_modules"),
        pytest.param({"alpha_pattern": {SLOW_PATTERN: 4}}, id="alpha_pattern", marks=pytest.mark.slow),
        pytest.param({"exclude_modules": SLOW_PATTERN}, id="exclude_modules", marks=pytest.mark.slow),
        pytest.param(
            {"layers_to_transform": [0], "layers_pattern": [SLOW_PATTERN]}, id="layers_pattern", marks=pytest.mark.slow
        ),
    ],
)
def test_a_pattern_of_modules_that_matches_for_ever_is_named(tmp_path, capsys, field):
    folder = damaged(tmp_path, "adapter", changed(ADAPTER_CONFIG, **field))
    message = refused(capsys, "eval", "--model_name_or_path", folder, names=folder / ADAPTER_CONFIG)
    assert "take more than 2 s to match" in message


@pytest.mark.parametrize("option", ["--model_name_or_path", "--judge"])
def test_an_adapter_of_a_kind_without_weights_of_layers_is_named(tmp_path, capsys, option):
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    peft = get_peft_model(tiny_model("llama", num_hidden_layers=2), config)
    peft.peft_config["default"].base_model_name_or_path = "base"
    peft.save_pretrained(tmp_path / "prompt")
    tiny_tokenizer().save_pretrained(tmp_path / "prompt")
    refused(capsys, "prefs", option, tmp_path / "prompt", names="prompt" if option == "--judge" else "")
    changed(ADAPTER_CONFIG, num_virtual_tokens=10**9)(tmp_path / "prompt")
    message = refused(capsys, "prefs", option, tmp_path / "prompt", names=tmp_path / "prompt" / ADAPTER_CONFIG)
    assert "num_virtual_tokens 1000000000, and the weights" in message


def test_an_adapter_on_an_adapter_is_named(tmp_path, capsys):
    folder = damaged(tmp_path, "adapter", changed(ADAPTER_CONFIG, base_model_name_or_path=str(tmp_path / "damaged")))
    assert "is an adapter itself" in refused(capsys, "eval", "--model_name_or_path", folder, names=folder)


BROKEN_ADAPTER = {
    "weights": (truncated(ADAPTER), ADAPTER),
    "a nested config": (written(ADAPTER_CONFIG, DEEP_ARRAY), ADAPTER_CONFIG),
    "a rank of a billion": (changed(ADAPTER_CONFIG, r=10**9), ADAPTER_CONFIG),
    "a target that is a number": (changed(ADAPTER_CONFIG, target_modules=3), ADAPTER_CONFIG),
}
ADAPTER_ENTRANCES = {
    "ppo": ("adapter", "ppo --model_name_or_path {}"),
    "prefs": ("adapter", "prefs --model_name_or_path {}"),
    "prefs, a judge": ("adapter-with-tokenizer", "prefs --judge {}"),
    "eval, an opponent": ("adapter", "eval --opponent {}"),
    "ppo, a branch of the trunk": ("reward-adapter", "ppo --reward_funcs {}"),
    "eval, a branch of the trunk": ("reward-adapter", "eval --reward_funcs {}"),
    "prefs, a reward adapter as judge": ("reward-adapter", "prefs --judge reward:{}"),
    "distill, a teacher": ("reward-adapter", "distill --teacher {}"),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("damage", "file"), cases(BROKEN_ADAPTER))
@pytest.mark.parametrize(("source", "command"), cases(ADAPTER_ENTRANCES))
def test_a_damaged_adapter_is_named_wherever_it_is_given(tmp_path, capsys, source, command, damage, file):
    folder = damaged(tmp_path, source.removesuffix("-with-tokenizer"), damage)
    if source.endswith("-with-tokenizer"):
        tiny_tokenizer().save_pretrained(folder)
    verb, *options = command.format(folder).split()
    message = refused(capsys, verb, *options, names=file)
    assert str(folder) in message


@pytest.mark.parametrize("source", ["adapter", "reward-adapter"])
def test_a_damaged_base_of_an_adapter_is_named_with_the_adapter(tmp_path, capsys, source):
    base = damaged(tmp_path, "base", truncated(WEIGHTS))
    shutil.copytree(source, tmp_path / "adapter")
    changed(ADAPTER_CONFIG, base_model_name_or_path=str(base))(tmp_path / "adapter")
    option = ["--model_name_or_path"] if source == "adapter" else ["--judge", f"reward:{tmp_path}/adapter"]
    if source == "adapter":
        refused(capsys, "eval", *option, tmp_path / "adapter", names=base / WEIGHTS)
    else:
        refused(capsys, "prefs", *option, names=base / WEIGHTS)


# --- a pipeline ---


@pytest.mark.slow
def test_a_pipeline_ends_with_the_message_of_its_stage(tmp_path, capfd, material):
    folder = damaged(tmp_path, "base", truncated(WEIGHTS))
    (tmp_path / "sft.yaml").write_text(
        f"model_name_or_path: {folder}\ndataset_name: sft.jsonl\noutput_dir: {tmp_path}/out\nuse_cpu: true\n"
    )
    (tmp_path / "all.yaml").write_text(
        f"output_dir: {tmp_path}/state\nstages:\n  sft: {{config: {tmp_path}/sft.yaml}}\n"
    )
    assert cli.main(["run", str(tmp_path / "all.yaml")]) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err and str(Path(folder) / WEIGHTS) in err
