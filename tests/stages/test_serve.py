"""`onetrunk serve`: the command line of vLLM, printed or run, and what is rejected."""

import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from onetrunk import cli
from onetrunk.stages.tools import serve
from onetrunk.utils.options import VLLM_RANKS
from tests.ppo.support import base_model, sft_model
from tests.rollouts.stub_vllm import wait_until


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


def test_the_printed_command_is_the_one_that_vllm_needs(model, capsys):
    environment, line = printed(capsys, model, "--port", 8123, "--device", "cuda", "--max_model_len", 512)
    assert environment == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
    assert line[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    expected = f"""--model '{model}' --host 127.0.0.1 --port 8123 --dtype float32 --enable-lora --max-lora-rank 16
        --max-loras 2 --max-cpu-loras 4 --logprobs-mode processed_logprobs --generation-config vllm --max-model-len 512
        --tensor-parallel-size 1 --gpu-memory-utilization 0.9"""
    assert line[3:] == shlex.split(expected)


def test_on_a_cpu_it_neither_compiles_nor_names_gpus(model, capsys):
    environment, line = printed(capsys, model, "--device", "cpu")
    assert environment["TORCH_COMPILE_DISABLE"] == "1" and environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert line[-1] == "--enforce-eager" and not any("gpu" in word or "tensor" in word for word in line)
    # Without a GPU that is what auto means.
    if not torch.cuda.is_available():
        assert printed(capsys, model) == (environment, line)


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (17, 32)])
def test_a_rank_is_rounded_up_to_one_that_vllm_knows(model, capsys, rank, served):
    _, line = printed(capsys, model, "--max_lora_rank", rank)
    assert line[line.index("--max-lora-rank") + 1] == str(served) and served in VLLM_RANKS


def test_for_an_adapter_its_base_is_served(model, tmp_path, capsys):
    adapter = sft_model()
    adapter.peft_config["default"].base_model_name_or_path = str(model)
    adapter.save_pretrained(tmp_path)
    _, line = printed(capsys, "--model", tmp_path)
    assert line[line.index("--model") + 1] == str(model)


def test_a_key_is_passed_in_the_environment_and_never_printed(model, capsys, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "abc123def456ghi789")
    assert cli.main(["serve", str(model), "--api_key_env", "SERVER_KEY", "--print"]) == 0
    out = capsys.readouterr().out
    assert 'VLLM_API_KEY="$SERVER_KEY"' in out and "abc123" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model is named; write onetrunk serve MODEL --port 8000"),
        (["m", "--model", "n"], "the model is named twice"),
        (["m", "--port", "0"], "port is 0; set it from 1 to 65535"),
        (["m", "--max_lora_rank", "513"], "max_lora_rank is 513; set it from 1 to 512"),
        (["m", "--max_loras", "0"], "max_loras is 0; set it to 1 or more"),
        (["m", "--gpu_memory_utilization", "1.5"], "gpu_memory_utilization is 1.5; set it above 0"),
        (["m", "--dtype", "int8"], "dtype is 'int8'; expected auto"),
        (["m", "--device", "tpu"], "device is 'tpu'; expected auto"),
    ],
)
def test_wrong_usage_is_rejected_with_exit_code_2(words, message, capsys):
    assert cli.main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_vllm_the_extra_is_named(model, capsys):
    assert cli.main(["serve", str(model)]) == 1
    error = capsys.readouterr().err
    assert "vllm/bin/pip install vllm" in error and "--python vllm/bin/python" in error
    assert cli.main(["serve", str(model), "--python", "/no/such/python"]) == 1
    assert "no such program can be run" in capsys.readouterr().err


def fake_python(tmp_path, then):
    """Return a program that writes its arguments and environment down, then runs a line of Python."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\nimport json, os, pathlib, sys, time\n"
        f"record = pathlib.Path({str(tmp_path / 'started.json')!r})\n"
        "record.with_suffix('.part').write_text(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        f"os.rename(record.with_suffix('.part'), record)\n{then}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_server_is_started_with_that_command_and_its_failure_is_told(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "abc123def456ghi789")
    python = fake_python(tmp_path, "sys.exit(3)")
    words = [model, "--device", "cpu", "--python", python, "--port", 8200]
    _, line = printed(capsys, *words)
    assert cli.main(["serve", *map(str, words), "--api_key_env", "SERVER_KEY"]) == 1
    assert "vLLM ended with code 3; its last lines above say why" in capsys.readouterr().err
    arguments, environment = json.loads((tmp_path / "started.json").read_text())
    assert arguments == line[1:]
    assert environment["VLLM_API_KEY"] == "abc123def456ghi789" and "PYTHONPATH" not in environment
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


@pytest.mark.slow
def test_a_signal_ends_the_server_too(model, tmp_path):
    python = fake_python(tmp_path, "print(os.getpid(), flush=True); time.sleep(3600)")
    words = [sys.executable, "-m", "onetrunk.cli", "serve", str(model), "--device", "cpu", "--python", str(python)]
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=1500)
    assert process.returncode == 143 and "terminated (SIGTERM)" in error
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{server}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Answers the health check, and has a child that ignores SIGTERM, as an engine may.
SERVER = """
import http.server, signal, threading
child = os.fork()
if child == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if child == 0:
    time.sleep(3600)
    os._exit(0)
with open({pids!r}, "w") as file: file.write(f"{{os.getpid()}} {{child}}")
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
        if {dies}: threading.Thread(target=lambda: os._exit(4)).start()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def fake_server(model, tmp_path, monkeypatch):
    """Return (words of `serve` for a server that is a few lines of Python, its port, the file with its pids)."""
    monkeypatch.setattr(serve, "PROBE_S", 0.1)
    monkeypatch.chdir(tmp_path)

    def make(dies=False):
        port, pids = free_port(), tmp_path / "pids"
        python = fake_python(tmp_path, SERVER.format(pids=str(pids), dies=dies))
        return ["serve", str(model), "--device", "cpu", "--python", str(python), "--port", str(port)], port, pids

    return make


def test_a_server_that_was_ready_and_died_ends_the_command_with_all_that_it_left(fake_server, capsys):
    words, _, pids = fake_server(dies=True)
    assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert "ready: use_vllm" in error and "vLLM ended with code 4; its last lines above say why" in error
    # An engine that outlives its server would keep the GPU's memory.
    wait_until(lambda: not any(map(is_alive, pids.read_text().split())))


def test_a_port_that_is_in_use_is_told_before_vllm_starts(fake_server, tmp_path, capsys):
    words, port, _ = fake_server()
    with socket.create_server(("127.0.0.1", port)):
        assert cli.main(words) == 1
    error = capsys.readouterr().err
    assert f"no server can listen at 127.0.0.1 port {port} (Address already in use); give another --port" in error
    assert not (tmp_path / "started.json").exists()


WORK = """
import pathlib, sys, time
pathlib.Path("work.txt").write_text(open("pids").read())
{then}
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_command_runs_while_the_server_is_ready_and_its_end_stops_the_server(fake_server, capsys, monkeypatch, code):
    # A proxy that nobody listens at: the server of this machine is asked without it.
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    words, _, pids = fake_server()
    Path("work.py").write_text(WORK.format(then=f"sys.exit({code})"))
    command = f"{sys.executable} work.py"
    assert cli.main([*words, "--command", command]) == bool(code)
    assert Path("work.txt").read_text() == pids.read_text()
    wait_until(lambda: not any(map(is_alive, pids.read_text().split())))
    error = capsys.readouterr().err
    assert f"then runs `{command}`, whose end stops it" in error
    assert ("work.py` ended with code 3; the server was stopped" in error) is bool(code)


def test_the_command_of_a_server_that_dies_is_ended_too(fake_server, capsys):
    words, _, _ = fake_server()
    kills = "import os\nopen('pid', 'w').write(str(os.getpid()))\nos.kill(int(open('pids').read().split()[0]), 9)"
    Path("work.py").write_text(WORK.format(then=f"{kills}\ntime.sleep(3600)"))
    assert cli.main([*words, "--command", f"{sys.executable} work.py"]) == 1
    assert "vLLM ended with code -9; its last lines above say why" in capsys.readouterr().err
    assert not is_alive(int(Path("pid").read_text()))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--command", "no-such-program x"], 1, "no program no-such-program can be run"),
        (["--command", "onetrunk 'x"], 1, "whose quotes do not match"),
        (["--command", " "], 1, "no program  can be run"),
        (["--command", "python x.py", "--print", "true"], 2, "leave one of them out"),
    ],
)
def test_a_command_that_cannot_run_is_a_mistake(model, tmp_path, capsys, words, code, message):
    python = fake_python(tmp_path, "sys.exit(3)")
    assert cli.main(["serve", str(model), "--device", "cpu", "--python", str(python), *words]) == code
    assert message in capsys.readouterr().err and not (tmp_path / "started.json").exists()
