"""`onetrunk serve`: the command line of vLLM, printed or run, and what is rejected."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from onetrunk import cli
from onetrunk.stages.run_context import Terminated, signals_as_exception
from onetrunk.stages.tools import serve
from onetrunk.utils.options import VLLM_RANKS
from tests.ppo.support import base_model, sft_model
from tests.servers.stub import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base model")
    base_model().save_pretrained(folder)
    return folder


def printed(capsys, *words):
    """Return (environment, arguments) of the printed command."""
    assert cli.main(["serve", *map(str, words), "--print"]) == 0
    line = shlex.split(capsys.readouterr().out)
    start = next(i for i, word in enumerate(line) if "=" not in word)
    return dict(word.split("=", 1) for word in line[:start]), line[start:]


GPU = ("--device", "cuda", "--dtype", "bfloat16")


def test_the_printed_command_is_the_one_that_vllm_needs(model, capsys):
    environment, line = printed(capsys, model, "--port", 8123, *GPU, "--max_model_len", 512)
    assert environment == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
    assert line[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    expected = f"""--model '{model}' --host 127.0.0.1 --port 8123 --dtype bfloat16 --enable-lora --max-lora-rank 16
        --max-loras 2 --max-cpu-loras 4 --logprobs-mode processed_logprobs --generation-config vllm --max-model-len 512
        --tensor-parallel-size 1 --gpu-memory-utilization 0.9"""
    assert line[3:] == shlex.split(expected)


def test_on_a_gpu_a_base_in_float32_is_rejected(model, capsys):
    assert cli.main(["serve", str(model), "--device", "cuda", "--print"]) == 1
    assert "in 16 bits only, and the base is float32; give --dtype bfloat16" in capsys.readouterr().err


def test_on_a_cpu_it_neither_compiles_nor_names_gpus(model, capsys):
    environment, line = printed(capsys, model, "--device", "cpu")
    assert environment["TORCH_COMPILE_DISABLE"] == "1" and environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert line[-2:] == ["--enforce-eager", "--no-enable-chunked-prefill"]
    assert not any("gpu" in word or "tensor" in word for word in line)
    # Without a GPU that is what auto means.
    if not torch.cuda.is_available():
        assert printed(capsys, model) == (environment, line)


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (17, 32)])
def test_a_rank_is_rounded_up_to_one_that_vllm_knows(model, capsys, rank, served):
    _, line = printed(capsys, model, "--max_lora_rank", rank)
    assert line[line.index("--max-lora-rank") + 1] == str(served) and served in VLLM_RANKS


def test_a_base_and_that_of_an_adapter_are_served_by_their_absolute_path(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(model.parent)
    adapter = sft_model()
    adapter.peft_config["default"].base_model_name_or_path = model.name
    adapter.save_pretrained(tmp_path)
    for given in (model.name, tmp_path):
        _, line = printed(capsys, "--model", given)
        assert line[line.index("--model") + 1] == str(model.resolve())


def test_the_revision_of_an_adapter_is_not_that_of_its_base(model, tmp_path, capsys):
    adapter = sft_model()
    adapter.peft_config["default"].base_model_name_or_path = str(model)
    adapter.save_pretrained(tmp_path)
    _, line = printed(capsys, tmp_path, "--revision", "v2")
    assert "--revision" not in line
    _, line = printed(capsys, model, "--revision", "v2")
    assert line[line.index("--revision") + 1] == "v2"


def test_a_key_is_passed_in_the_environment_and_never_printed(model, capsys, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "abc123def456ghi789")
    assert cli.main(["serve", str(model), "--api_key_env", "SERVER_KEY", "--print"]) == 0
    out = capsys.readouterr().out
    assert 'VLLM_API_KEY="$SERVER_KEY"' in out and "abc123" not in out


@pytest.mark.parametrize("name", ["A$(touch pwned)", 'A"; touch pwned; "', "A`id`", "", "sk-abc123"])
def test_a_printed_line_runs_nothing_that_the_name_of_a_variable_holds(model, capsys, name):
    assert cli.main(["serve", str(model), "--api_key_env", name, "--print"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "api_key_env is not the name of an environment variable" in captured.err


def test_without_vllm_the_extra_is_named(model, capsys):
    assert cli.main(["serve", str(model)]) == 1
    error = capsys.readouterr().err
    assert "vllm/bin/pip install vllm" in error and "--python vllm/bin/python" in error
    assert cli.main(["serve", str(model), "--python", "/no/such/python"]) == 1
    assert "no such program can be run" in capsys.readouterr().err


def test_the_server_is_started_with_that_command_and_its_failure_is_told(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "abc123def456ghi789")
    # A program that writes its arguments and environment down, and fails.
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"with open({str(tmp_path / 'started.json')!r}, 'w') as record:\n"
        "    json.dump([sys.argv[1:], dict(os.environ)], record)\n"
        "sys.exit(3)\n"
    )
    python.chmod(0o755)
    words = [model, "--device", "cpu", "--python", python, "--port", 8200]
    _, line = printed(capsys, *words)
    assert cli.main(["serve", *map(str, words), "--api_key_env", "SERVER_KEY"]) == 1
    assert "vLLM ended with code 3; its last lines above say why" in capsys.readouterr().err
    arguments, environment = json.loads((tmp_path / "started.json").read_text())
    assert arguments == line[1:]
    assert environment["VLLM_API_KEY"] == "abc123def456ghi789" and "PYTHONPATH" not in environment
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# A server that ignores SIGTERM, with an engine that does so too; both write their numbers down.
DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
time.sleep(3600)
"""


@pytest.mark.parametrize(("number", "ending"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_signals_that_come_while_a_server_ends_leave_no_part_of_it(tmp_path, monkeypatch, number, ending):
    monkeypatch.setattr(serve, "STOP_S", 1.0)
    # Ignored where the tests run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def send():
        wait_until(lambda: len(os.listdir(tmp_path)) == 2)
        for _ in range(5 if number == signal.SIGTERM else 2):
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    thread = threading.Thread(target=send)
    with signals_as_exception():
        thread.start()
        with pytest.raises(ending):
            serve.run_server([sys.executable, "-c", DEAF, str(tmp_path)], dict(os.environ))
        thread.join()
    signal.signal(signal.SIGINT, before)
    wait_until(lambda: not any(is_alive(pid) for pid in os.listdir(tmp_path)))
