"""`onetrunk export`: what is written computes what base and adapter do, and what cannot be exported says why."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import tarfile
from pathlib import Path

import httpx2
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from onetrunk import cli
from onetrunk.checkpoints.folders import write_manifest
from onetrunk.rollouts.colocate import CPU_ENVIRONMENT
from onetrunk.stages.tools.export import modelfile
from onetrunk.stages.tools.serve import MODULE
from tests.environments import lend_packages, made_once, pip_install, run_step
from tests.models.reward_adapters import saved_base
from tests.ppo.support import sft_model
from tests.processes import environment, served
from tests.rollouts.vllm_environment import vllm_python
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

LLAMA_CPP = "llama-cpp-python==0.3.36"


@pytest.fixture
def there(empty_folder):
    """Return a working folder with a base, and an adapter on it that names it by a relative path."""
    saved_base("base", num_hidden_layers=2)
    torch.manual_seed(0)  # Of the adapter: how far it moves the logits decides what rounding to bfloat16 may.
    model = sft_model()
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained("adapter")
    return empty_folder


def export(*words):
    return cli.main(["export", *map(str, words)])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(2, 14)[None]).logits.float()


@pytest.mark.parametrize(("dtype", "tolerance"), [("auto", 1e-5), ("bfloat16", 0.05)])
def test_the_merged_model_computes_what_base_and_adapter_compute(there, capsys, dtype, tolerance):
    assert export("adapter", "--output_dir", "merged", "--dtype", dtype) == 0
    written = "float32" if dtype == "auto" else dtype
    assert f"export: saved the model in merged ({written})" in capsys.readouterr().out
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
    assert export("adapter", "--output_dir", "merged") == 0
    monkeypatch.chdir("merged")
    text = Path("README.md").read_text()
    scope = {}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    assert scope["tokenizer"].eos_token == "<eos>" and not isinstance(scope["model"], PeftModel)
    assert str(there) not in text and "The base model `base`" in text


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


@pytest.mark.parametrize("folder", ["base", "adapter", "run", "link"])
def test_nothing_that_is_read_and_no_result_of_a_training_is_replaced(there, capsys, folder):
    shutil.copytree("adapter", "run")
    for name in ("base", "adapter", "run"):
        write_manifest(name)  # As a training does, whose results are sources of an export too.
    Path("link").symlink_to("base")
    before = contents(folder)
    assert export("adapter", "--output_dir", folder, "--overwrite_output_dir", "true") == 1
    assert "name another output_dir" in capsys.readouterr().err
    assert contents(folder) == before


def test_an_export_that_is_the_base_of_an_adapter_is_not_replaced_by_their_sum(there, capsys):
    assert export("adapter", "--output_dir", "merged") == 0
    config = json.loads(Path("adapter/adapter_config.json").read_text()) | {"base_model_name_or_path": "merged"}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    before = contents("merged")
    assert "_run.lock" not in before
    assert export("adapter", "--output_dir", "merged", "--overwrite_output_dir", "true") == 1
    assert "output_dir is merged, which is read from" in capsys.readouterr().err and contents("merged") == before


def test_a_second_export_needs_leave_to_replace_all_of_the_first_and_a_file_of_the_user_stays(there, capsys):
    assert export("adapter", "--to", "ollama", "--output_dir", "out") == 0
    again = ["adapter", "--output_dir", "out", "--dtype", "bfloat16"]
    assert export(*again) == 1
    assert "out is not empty" in capsys.readouterr().err
    assert export(*again, "--overwrite_output_dir", "true") == 0
    assert AutoModelForCausalLM.from_pretrained("out").dtype == torch.bfloat16
    assert not Path("out/Modelfile").exists()
    Path("out/notes.gguf").write_text("mine")
    assert export(*again, "--overwrite_output_dir", "true") == 1
    assert "out is not empty (notes.gguf); name another" in capsys.readouterr().err
    assert Path("out/notes.gguf").read_text() == "mine"


# What fails at the limit: the weights (safetensors' own error), and a file that Python writes.
@pytest.mark.parametrize("limit", [2000, 100])
def test_a_full_disk_is_one_message_and_leaves_no_part(there, capsys, limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        code = export("adapter", "--output_dir", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 1 and not list(Path("out").iterdir())
    assert "cannot be written (File too large" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["base", "--output_dir", "out"], 1, "base is a model already, and not an adapter"),
        (["nowhere/at/all", "--output_dir", "out"], 2, "nowhere/at/all does not exist"),
        (["reward", "--output_dir", "out"], 1, "is an adapter of task type SEQ_CLS"),
        (["adapter", "--output_dir", "out", "--push_to_hub", "true"], 1, "out cannot be pushed to: "),
        (["--output_dir", "out"], 2, "no model is named; write onetrunk export FOLDER"),
        (["adapter", "--output_dir", "out", "--dtype", "int8"], 2, "int8"),
        (["adapter"], 2, "name the folder that gets the result of --to merged"),
        (["adapter", "--to", "vllm", "--output_dir", "out"], 2, "vllm only prints a command"),
        (["adapter", "--to", "gguf", "--output_dir", "out"], 1, "git clone https://github.com/ggml-org/llama.cpp"),
        (["adapter", "--to", "gguf", "--output_dir", "out", "--converter", "no.py"], 1, "is not at no.py"),
    ],
)
def test_what_cannot_be_exported_says_why_and_writes_nothing(there, capsys, words, code, message):
    if words[0] == "reward":
        model = AutoModelForSequenceClassification.from_pretrained("base", num_labels=1)
        config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], base_model_name_or_path="base")
        get_peft_model(model, config).save_pretrained("reward")
    assert export(*words) == code
    assert message in capsys.readouterr().err
    assert not list(Path("out").glob("*.safetensors")) and not list(Path("out").glob("*.json"))


def test_the_command_for_vllm_names_base_adapter_rank_and_template(there, capsys):
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained("adapter")
    assert export("adapter", "--to", "vllm") == 0
    # The rank of sft_model is 4, and 8 is the smallest that vLLM reserves memory for.
    expected = f"""vllm serve {there}/base --dtype bfloat16 --generation-config vllm --enable-lora
        --lora-modules adapter={there}/adapter --max-lora-rank 8 --chat-template {there}/adapter/chat_template.jinja"""
    assert shlex.split(capsys.readouterr().out) == shlex.split(expected)
    assert export("base", "--to", "vllm", "--dtype", "bfloat16") == 0
    assert capsys.readouterr().out == f"vllm serve {there}/base --dtype bfloat16 --generation-config vllm\n"


def test_a_converter_that_fails_is_quoted_and_leaves_nothing(there, capsys):
    words = ["adapter", "--to", "gguf", "--output_dir", "out", "--converter", "broken.py"]
    for when, is_made in (("True", False), ("'--outfile' in sys.argv", True)):
        Path("broken.py").write_text(f"import sys\nif {when}: raise SystemExit('gguf is missing')\n")
        assert export(*words) == 1
        assert "llama.cpp's converter failed: gguf is missing (" in capsys.readouterr().err
        # One that cannot start is found before the folder is made and a model is merged.
        assert Path("out").exists() == is_made and not list(Path("out").glob("*"))


def test_a_modelfile_has_weights_template_stops_and_the_sampling_of_training(there):
    assert export("adapter", "--to", "ollama", "--output_dir", "out") == 0
    lines = Path("out/Modelfile").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "FROM .",
        'TEMPLATE """{{ .Prompt }}"""',
        "PARAMETER temperature 1",
        "PARAMETER top_k 0",
        "PARAMETER top_p 1",
        "PARAMETER repeat_penalty 1",
        'PARAMETER stop "<eos>"',
    ]
    assert AutoModelForCausalLM.from_pretrained("out").dtype == torch.float32
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained("adapter")
    assert export("adapter", "--to", "ollama", "--output_dir", "chat") == 0
    modelfile_of_chat = Path("chat/Modelfile").read_text()
    assert 'TEMPLATE "' not in modelfile_of_chat and "`ollama show --template NAME`" in modelfile_of_chat


def test_stop_words_are_quoted_as_ollama_reads_them_and_an_odd_folder_adds_no_line(there):
    tokenizer = tiny_tokenizer()
    words = ['<"q">', "<\\n>", "a\nb", "<é>"]
    tokenizer.add_tokens(words)
    stops = tokenizer.convert_tokens_to_ids(words)
    lines = modelfile(".", tokenizer, stops).split("repeat_penalty 1\n")[1]
    quoted = ['"""<"q">"""', '"<\\n>"', '"""a\nb"""', '"<é>"']
    assert lines == "".join(f"PARAMETER stop {word}\n" for word in quoted)
    writes = "open(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('gguf')"
    Path("converter.py").write_text(f"import sys\nif '--help' not in sys.argv: {writes}")
    folder = Path("one\nPARAMETER num_ctx 1")
    assert export("adapter", "--to", "gguf", "--output_dir", folder, "--converter", "converter.py") == 0
    assert (folder / "one_PARAMETER_num_ctx_1.gguf").read_text() == "gguf"
    assert "FROM ./one_PARAMETER_num_ctx_1.gguf\n" in (folder / "Modelfile").read_text()


def converter_python() -> Path:
    """Return the interpreter of an environment with llama.cpp's converter next to it; makes it if there is none."""

    def fill(python: Path) -> None:
        lend_packages(python)
        pip = pip_install(python)
        run_step("gguf", [*pip, "--no-deps", "--ignore-installed", "gguf", "sentencepiece", "scikit-build-core"])
        # Its source distribution has llama.cpp whole.
        words = "download -q --no-deps --no-build-isolation --no-binary :all: -d".split()
        run_step("llama.cpp", [python, "-m", "pip", *words, python.parent, LLAMA_CPP])
        (archive,) = python.parent.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as files:
            wanted = [f for f in files if re.search(r"/llama\.cpp/(convert_hf_to_gguf|conversion/|gguf-py/)", f.name)]
            files.extractall(python.parent, wanted, filter="data")

    python = made_once("gguf", LLAMA_CPP, fill)
    lend_packages(python)
    return python


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes of a kind that llama.cpp knows."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    ids = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def saved_adapter(tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Save a base, whose heads vLLM takes on a CPU too, and an adapter on it; return the logits of both."""
    # 4 heads of 32, and 4 layers.
    base = tiny_model("llama", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128)
    without = logits(base)
    base.save_pretrained("base")
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(base, config)
    adapted.peft_config["default"].base_model_name_or_path = "base"
    adapted.save_pretrained("adapter")
    for folder in ("base", "adapter"):
        tokenizer.save_pretrained(folder)
    return without, logits(adapted)


# Prints the logits that transformers computes from the GGUF file.
READER = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("out", gguf_file="out.gguf", dtype=torch.float32).eval()
with torch.no_grad():
    print(json.dumps(model(input_ids=torch.arange(2, 14)[None]).logits.tolist()))
"""


@pytest.mark.slow
def test_the_gguf_of_llama_cpp_s_converter_computes_what_base_and_adapter_compute(empty_folder, capsys):
    tokenizer = byte_tokenizer()
    without, expected = saved_adapter(tokenizer)
    python = converter_python()
    (converter,) = python.parent.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py")
    words = [python, "-m", "onetrunk", "export", "adapter", "--to", "gguf", "--output_dir", "out"]
    env = environment()
    run_step("export", [*words, "--converter", converter], env=env)
    found = torch.tensor(json.loads(run_step("read", [python, "-c", READER], env=env)))
    # float32 throughout; sums in another order.
    assert (found - expected).abs().max() < 1e-4 * (expected - without).abs().max()
    assert "FROM ./out.gguf" in Path("out/Modelfile").read_text() and not list(Path("out").glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_vllm_takes_the_command_and_computes_what_base_and_adapter_compute(empty_folder, capsys):
    _, expected = saved_adapter(tiny_tokenizer(chat_template=CHAT_TEMPLATE))
    expected, ids = expected.log_softmax(-1)[0], list(range(2, 14))
    assert export("adapter", "--to", "vllm", "--dtype", "float32") == 0
    words = shlex.split(capsys.readouterr().out)
    # The build for CPUs has another name, by which its own program `vllm serve` does not find itself.
    assert words[:2] == ["vllm", "serve"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | CPU_ENVIRONMENT
    words = [vllm_python(), "-m", MODULE, "--model", *words[2:], "--enforce-eager"]
    with served(words, empty_folder / "vllm.log", env=env) as url:
        body = {"model": "adapter", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        reply = httpx2.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    found = [next(iter(entry.values()))["logprob"] for entry in reply["choices"][0]["prompt_logprobs"][1:]]
    wanted = [expected[i, token].item() for i, token in enumerate(ids[1:])]
    assert found == pytest.approx(wanted, abs=1e-3)
