"""Files from elsewhere that are damaged end a run with exit code 1 and one message that names the file.

Each case damages one file of a whole model, reward model or adapter and gives it to a stage.
"""

import json
import shutil

import pytest
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from onetrunk import cli
from tests.stages.small_runs import make_material, words_of, write_rows
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
pytestmark = pytest.mark.usefixtures("in_folder")


def truncated(name):
    def damage(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return damage


def changed(name, **fields):
    def damage(folder):
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(content | fields))

    return damage


def tensors_changed(name, change):
    def damage(folder):
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})

    return damage


def removed(name):
    return lambda folder: (folder / name).unlink()


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
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "runs"}]
    write_rows(folder / "turns.jsonl", [{"messages": turns}] * 8)
    return folder


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
    assert code == 1 and "Traceback" not in err, err
    (message,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert str(names) in message and len(message) < 1500, err
    return message


def poisoned(tensors):
    list(tensors.values())[-1][0] = float("nan")


# What is damaged, which file the message names ("": only the folder), and what it says.
BASE_FAULTS = {
    "half of the weights": (truncated(WEIGHTS), WEIGHTS, "cannot be used"),
    "no weights": (removed(WEIGHTS), "", "no file named model.safetensors"),
    "NaN": (tensors_changed(WEIGHTS, poisoned), "", "NaN or infinite"),
    "no tensor of a layer": (tensors_changed(WEIGHTS, lambda t: t.pop("model.norm.weight")), "", "lacks 1 weights"),
    "half of the config": (truncated(CONFIG), CONFIG, "cannot be used"),
    "an unknown architecture": (changed(CONFIG, model_type="unheard_of"), "", "unheard_of"),
    "the config of a wider model": (changed(CONFIG, hidden_size=48), CONFIG, "have another shape"),
    "half of the tokenizer": (truncated("tokenizer.json"), "tokenizer.json", "cannot be used"),
}
ADAPTER_FAULTS = {
    "NaN": (tensors_changed(ADAPTER, poisoned), "", "NaN or infinity in 1 tensors"),
    "no weights": (removed(ADAPTER), "", "adapter_model.safetensors"),
    "an unknown kind": (changed(ADAPTER_CONFIG, peft_type="NOPE"), "", "NOPE"),
    "no base": (changed(ADAPTER_CONFIG, base_model_name_or_path=3), "", "does not say what its base model is"),
    "another rank": (changed(ADAPTER_CONFIG, r=8), "", "does not fit"),
}


@pytest.mark.parametrize(("damage", "file", "reason"), BASE_FAULTS.values(), ids=BASE_FAULTS)
def test_a_damaged_file_of_a_base_is_named(tmp_path, capsys, damage, file, reason):
    folder = damaged(tmp_path, "base", damage)
    assert reason in refused(capsys, "sft", "--model_name_or_path", folder, names=folder / file)


@pytest.mark.parametrize(("damage", "file", "reason"), ADAPTER_FAULTS.values(), ids=ADAPTER_FAULTS)
def test_a_damaged_file_of_an_adapter_is_named(tmp_path, capsys, damage, file, reason):
    folder = damaged(tmp_path, "adapter", damage)
    assert reason in refused(capsys, "eval", "--model_name_or_path", folder, names=folder / file)


def test_a_chat_template_that_fails_is_named(tmp_path, capsys):
    folder = damaged(tmp_path, "base", lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"))
    refused(capsys, "sft", "--model_name_or_path", folder, "--dataset_name", "turns.jsonl", names="chat template")


ENTRANCES = {
    "distill, a teacher": ("scorer", "distill --teacher {}"),
    "ppo, a reward model": ("scorer", "ppo --reward_funcs {}"),
    "eval, an opponent": ("base", "eval --opponent {}"),
    "prefs": ("base", "prefs --model_name_or_path {}"),
    "ppo, a branch of the trunk": ("reward-adapter", "ppo --reward_funcs {}"),
}


@pytest.mark.parametrize(("source", "command"), ENTRANCES.values(), ids=ENTRANCES)
def test_a_damaged_file_is_named_wherever_it_is_given(tmp_path, capsys, source, command):
    file = ADAPTER if "adapter" in source else WEIGHTS
    folder = damaged(tmp_path, source, truncated(file))
    verb, *options = command.format(folder).split()
    assert str(folder) in refused(capsys, verb, *options, names=file)


def test_a_damaged_base_of_an_adapter_is_named_with_the_adapter(tmp_path, capsys):
    base = damaged(tmp_path, "base", truncated(WEIGHTS))
    shutil.copytree("adapter", tmp_path / "adapter")
    changed(ADAPTER_CONFIG, base_model_name_or_path=str(base))(tmp_path / "adapter")
    refused(capsys, "eval", "--model_name_or_path", tmp_path / "adapter", names=base / WEIGHTS)
