"""Reading a file runs no code of its author: YAML gives plain values, no pickle is loaded, and remote code runs only
if it is enabled and pinned. The rules are checked in the source, and their effect on real files."""

import ast
import json

import pytest
import yaml
from peft import LoraConfig

from onetrunk import cli
from onetrunk.judges.constitution import load_constitution
from onetrunk.judges.local import load_causal_judge, load_reward_judge
from onetrunk.models.base_model import load_base, load_tokenizer
from onetrunk.models.build import build_trunk
from onetrunk.models.loading import load_config, pinned_source
from onetrunk.models.reward_model import (
    load_adapter_scorer,
    load_reward_tokenizer,
    load_scorer,
    load_with_new_head,
    read_score_adapter,
)
from onetrunk.stages.options.reading import UsageError
from onetrunk.stages.pipeline import load_pipeline
from onetrunk.stages.sft import parse_sft
from tests.models.reward_adapters import saved_base
from tests.stages.recipes import ROOT
from tests.test_floors import FILES
from tests.tiny import tiny_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCES = [*FILES, *sorted((ROOT / "scripts").rglob("*.py")), *sorted((ROOT / "recipes").rglob("*.py"))]
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def safe_loaders(tree):
    """Return the names of the loaders that a source may use: PyYAML's safe one, and its own subclasses of that."""
    names = {"yaml.SafeLoader", "yaml.CSafeLoader"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in names for base in node.bases):
            names.add(node.name)
    return names


def unsafe_calls(source):
    """Return the lines of a source text that read or write more than plain data."""
    tree = ast.parse(source)
    loaders, found = safe_loaders(tree), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        room, _, verb = name.rpartition(".")
        positional = [ast.unparse(a) for a in node.args]
        if name in ("yaml.load", "yaml.load_all", "yaml.compose"):
            used = keywords.get("Loader", positional[1] if len(positional) > 1 else None)
            is_bad = used not in loaders
        elif room == "yaml":
            is_bad = verb in ("full_load", "full_load_all", "unsafe_load", "unsafe_load_all")
        elif name == "torch.load":
            is_bad = keywords.get("weights_only") != "True"
        elif name in ("np.load", "numpy.load"):
            is_bad = keywords.get("allow_pickle", "False") != "False"
        else:
            is_bad = name in ("torch.save", "eval", "exec") or (room in PICKLING and verb not in ("", "PickleError"))
            is_bad |= verb == "extractall"
        if is_bad:
            found.append(f"line {node.lineno}: {name}")
    return found


def unsaid_trust(source):
    """Return the lines on which a model, config or tokenizer loads and nothing says whether remote code may run."""
    return [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith("Auto")
        and ast.unparse(node.func).endswith(".from_pretrained")
        and not any(k.arg == "trust_remote_code" or ast.unparse(k.value) == "source" for k in node.keywords)
    ]


def test_no_source_of_ours_unpickles_evaluates_or_loads_more_than_plain_yaml():
    found = {str(path): unsafe_calls(path.read_text()) for path in SOURCES}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_every_load_says_whether_remote_code_may_run():
    found = {str(path): unsaid_trust(path.read_text()) for path in FILES}
    assert {path: calls for path, calls in found.items() if calls} == {}
    assert unsaid_trust("AutoConfig.from_pretrained(name)")
    assert not unsaid_trust("AutoConfig.from_pretrained(name, trust_remote_code=False)")


@pytest.mark.parametrize("line", ["yaml.load(text)", "torch.load(path)", "pickle.loads(data)", "eval(text)"])
def test_the_rule_finds_what_is_unsafe(line):
    assert len(unsafe_calls(line)) == 1


# --- on files -------------------------------------------------------------------------------------------------------


def test_yaml_that_makes_objects_is_rejected_wherever_it_is_read(empty_folder):
    hostile = f"output_dir: !!python/object/apply:os.mkdir ['{empty_folder}/ran']\n"
    (empty_folder / "x.yaml").write_text(hostile)
    with pytest.raises(UsageError, match="could not determine a constructor"):
        parse_sft(["--config", "x.yaml"])
    with pytest.raises(UsageError, match="could not determine a constructor"):
        load_pipeline("x.yaml")
    with pytest.raises(ValueError, match="could not determine a constructor"):
        load_constitution("x.yaml")
    assert not (empty_folder / "ran").exists()
    # The file is really hostile: another loader runs it.
    yaml.load(hostile, yaml.UnsafeLoader)
    assert (empty_folder / "ran").exists()


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """A model whose config names code of its own, which leaves a file where it runs."""
    folder = tmp_path_factory.mktemp("remote")
    saved_base(folder, num_hidden_layers=1)
    (folder / "code.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class C(LlamaConfig):\n    model_type = 'unheard_of'\n"
        "class M(LlamaForCausalLM):\n    config_class = C\n"
        "class T(PreTrainedTokenizerFast):\n    pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "unheard_of"
    names = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoModelForSequenceClassification": "code.M"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    path = folder / "tokenizer_config.json"
    about = json.loads(path.read_text()) | {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": [None, "code.T"]}}
    path.write_text(json.dumps(about))
    return folder


LOADERS = [load_base, load_tokenizer, load_config, load_with_new_head, load_reward_tokenizer, load_scorer]


@pytest.mark.parametrize("load", LOADERS)
def test_code_of_a_repository_does_not_run_and_nobody_is_asked(remote, monkeypatch, load):
    def asked(*words):
        raise AssertionError("transformers asks whether to run the code")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises((ValueError, RuntimeError, KeyError), match="custom code|trust_remote_code|cannot be loaded"):
        load(str(remote))
    assert not (remote / "ran").exists()


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:39], COMMIT + "0", COMMIT.upper()])
@pytest.mark.parametrize("load", [load_base, load_tokenizer])
def test_code_of_a_repository_needs_a_full_commit(remote, load, revision):
    with pytest.raises(ValueError, match="40-digit commit"):
        load(str(remote), revision=revision, trust_remote_code=True)
    assert not (remote / "ran").exists()


def test_a_pinned_commit_pins_the_code_too():
    assert pinned_source(COMMIT, True) == {"revision": COMMIT, "code_revision": COMMIT, "trust_remote_code": True}
    assert pinned_source(None, None) == {"revision": "main", "trust_remote_code": False}


def stage(remote, verb, *options):
    row = {"prompt": "the cat", "completion": " runs"} if verb == "sft" else {"prompt": "the cat"}
    rows = remote.parent / f"{verb}.jsonl"
    rows.write_text(json.dumps(row))
    words = ["--model_name_or_path", remote, "--dataset_name", rows, "--output_dir", remote.parent / f"out-{verb}"]
    return cli.main([verb, *map(str, [*words, "--use_cpu", "true", *options])])


TRUST = ["--trust_remote_code", "true"]
NESTED = ["--model_init_kwargs", '{"trust_remote_code": true}']


@pytest.mark.parametrize(("verb", "options"), [("sft", TRUST), ("ppo", NESTED)])
def test_a_stage_rejects_remote_code_without_a_pinned_commit(remote, capsys, verb, options):
    more = ["--reward_funcs", f"{remote}/short.py:short"] if verb == "ppo" else []
    (remote / "short.py").write_text("def short(completions, **columns):\n    return [0.0 for _ in completions]\n")
    assert stage(remote, verb, *options, *more) == 1
    assert "40-digit commit" in capsys.readouterr().err
    assert not (remote / "ran").exists()


# --- adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pickled(tmp_path_factory):
    """An adapter whose weights are a pickle that leaves a file where it is loaded."""
    folder = tmp_path_factory.mktemp("pickled")
    saved_base(folder / "base", num_hidden_layers=1)
    config = LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(folder / "base"))
    for task in ("CAUSAL_LM", "SEQ_CLS"):
        config.task_type = task
        config.save_pretrained(folder / task)
        tiny_tokenizer().save_pretrained(folder / task)
        call = f"cos\nsystem\n(S'touch {folder}/ran'\ntR."
        (folder / task / "adapter_model.bin").write_bytes(call.encode())
    return folder


ADAPTER_LOADERS = {
    "trainer": lambda name: build_trunk(name, None),
    "judge": lambda name: load_causal_judge(name),
    "reward judge": lambda name: load_reward_judge(name, device=None),
    "reward adapter": read_score_adapter,
    "reward model": load_adapter_scorer,
}


@pytest.mark.parametrize("loader", ADAPTER_LOADERS)
def test_an_adapter_with_pickled_weights_is_rejected_before_they_are_read(pickled, loader):
    name = str(pickled / ("CAUSAL_LM" if loader in ("trainer", "judge") else "SEQ_CLS"))
    with pytest.raises(
        ValueError, match=r"no adapter_model\.safetensors: its weights are pickled \(adapter_model\.bin"
    ):
        ADAPTER_LOADERS[loader](name)
    assert not (pickled / "ran").exists()
