"""`onetrunk serve MODEL`: run a vLLM server that PPO, prefs and eval can sample from, or print its command.

The flags matter: `VLLMBackend` needs adapters that load while the server runs, logprobs after temperature, and the
model's own probabilities without the defaults of its generation_config.json. With `command` it runs for as long as
that command. A server that dies is not started again: who samples from it must prove its base again, by a resume.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2
import torch

from onetrunk.models.loading import adapter_base, load_config
from onetrunk.rollouts.colocate import CPU_ENVIRONMENT
from onetrunk.rollouts.publishing import served_rank
from onetrunk.servers.client import is_nearby, read_secret
from onetrunk.stages.arguments import DTYPES, parse
from onetrunk.stages.options.parser import say
from onetrunk.stages.run_context import run_stage
from onetrunk.utils.options import VLLM_RANKS, option

MODULE = "vllm.entrypoints.openai.api_server"
# Without the first, adapters cannot be loaded while the server runs; the second turns telemetry off.
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
# Between two questions whether it is ready; how long it may take to end.
PROBE_S, STOP_S = 2.0, 30.0
DEVICES = ("auto", "cuda", "cpu")


@dataclass
class ServeArguments:
    """The options of `onetrunk serve`; names as in `vllm serve` and `trl vllm-serve`."""

    model: str | None = option(
        None, "Name or folder of the base model that PPO trains on; for an adapter, its base is served."
    )
    host: str = option(
        "127.0.0.1", "Address to listen on. Whoever reaches it can load adapters, so do not open it to others."
    )
    port: int = option(8000, "Port to listen on, 1 to 65535.")
    revision: str | None = option(None, "Branch, tag or commit of the model on the Hub.")
    dtype: str = option("auto", "auto (the checkpoint's own), float32, bfloat16 or float16; as the trainer's base.")
    max_lora_rank: int = option(16, "Largest rank of an adapter, 1 to 512; rounded up to a rank that vLLM knows.")
    max_loras: int = option(2, "Adapters that sample at the same time, at least 1; others wait on the CPU or on disk.")
    max_model_len: int | None = option(
        None, "Most tokens of a prompt with its completion, at least 2; the model's own positions if left out."
    )
    tensor_parallel_size: int = option(1, "GPUs that share the model, at least 1.")
    gpu_memory_utilization: float = option(
        0.9, "Share of a GPU's memory that the server takes, above 0, at most 1; lower it beside a trainer."
    )
    device: str = option("auto", "cuda, cpu, or auto: cuda if there is a GPU.")
    api_key_env: str | None = option(
        None,
        "Environment variable with the key that calls must bring; for ppo, eval and prefs it is vllm_api_key_env.",
    )
    python: str | None = option(
        None, "Interpreter of the environment that has vLLM; it may need another transformers than onetrunk has."
    )
    command: str | None = option(
        None,
        "Command to run when the server is ready, such as 'onetrunk prefs --config prefs.yaml'; the server is stopped"
        " when the command ends.",
    )
    print: bool = option(False, "Print the command of the server instead of starting it.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("no model is named; write onetrunk serve MODEL --port 8000")
        if self.command is not None and self.print:
            raise ValueError("command and print are both set; print starts no server, so leave one of them out")
        ranges = {"port": (1, 65535), "max_lora_rank": (1, VLLM_RANKS[-1]), "max_loras": (1, None)}
        ranges |= {"tensor_parallel_size": (1, None), "max_model_len": (2, None)}
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not (least <= value and (most is None or value <= most)):
                bound = f"from {least} to {most}" if most else f"to {least} or more"
                raise ValueError(f"{name} is {value}; set it {bound}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; set it above 0, at most 1")
        for name, known in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {', '.join(known)}")


def server_words(args: ServeArguments, base: str, dtype: str, on_cpu: bool) -> list[str]:
    """Return the arguments of vLLM's server, after the module.

    Args:
        args: of the command.
        base: name or folder of the base model.
        dtype: of its weights.
        on_cpu: leave out what is for GPUs.
    """
    rank = served_rank(args.max_lora_rank)
    words = ["--model", base, "--host", args.host, "--port", str(args.port), "--dtype", dtype]
    words += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(args.max_loras)]
    # Two versions of the policy and the reference stay in memory.
    words += ["--max-cpu-loras", str(max(4, args.max_loras))]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if args.revision is not None:
        words += ["--revision", args.revision]
    if args.max_model_len is not None:
        words += ["--max-model-len", str(args.max_model_len)]
    if on_cpu:
        return [*words, "--enforce-eager"]
    words += ["--tensor-parallel-size", str(args.tensor_parallel_size)]
    return [*words, "--gpu-memory-utilization", str(args.gpu_memory_utilization)]


def serve(args: ServeArguments) -> None:
    """Start the server and wait for its end, or print the command.

    Raises:
        ValueError: no vLLM in this environment, no interpreter at `python`, or a port that is in use.
        RuntimeError: the server ended, or the command failed.
    """
    base = adapter_base(args.model, args.revision) or args.model
    on_cpu = args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available())
    revision = args.revision if base == args.model else None
    dtype = _checkpoint_dtype(base, revision) if args.dtype == "auto" else args.dtype
    python = args.python or sys.executable
    words = [python, "-m", MODULE, *server_words(args, base, dtype, on_cpu)]
    environment = ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu else {})
    if args.print:
        key = [] if args.api_key_env is None else [f'VLLM_API_KEY="${args.api_key_env}"']
        print(" ".join([*(f"{name}={value}" for name, value in environment.items()), *key, shlex.join(words)]))
        return
    _require_vllm(args.python)
    if args.api_key_env is not None:
        environment |= {"VLLM_API_KEY": read_secret(args.api_key_env)}
    command = None if args.command is None else command_words(args.command)
    url = own_url(args.host, args.port)
    ends = "Ctrl-C stops it" if command is None else f"then runs `{args.command}`, whose end stops it"
    say(f"{shlex.join(words)}\nit takes a minute or more to be ready; {ends}")
    # A PYTHONPATH of ours would put our packages before those of its environment.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(words, {**inherited, **environment}, url, command)


def run(words: Sequence[str], environment: dict[str, str], url: str, command: Sequence[str] | None = None) -> None:
    """Run the server until its end or a signal to this process, or for as long as the command; stop it then.

    Args:
        words, environment: of the server.
        url: at which this machine reaches it.
        command: starts when the server is ready.

    Raises:
        RuntimeError: the server ended, or the command failed.
    """
    with stopped_at_end(words, env=environment) as server:
        while not is_ready(url):
            _require_running(server)
            time.sleep(PROBE_S)
        say(f"ready: use_vllm with vllm_server_base_url {url}")
        if command is None:
            server.wait()
            _require_running(server)
            return
        with stopped_at_end(command) as work:
            while work.poll() is None:
                _require_running(server)
                time.sleep(PROBE_S)
    if work.returncode:
        raise RuntimeError(f"`{shlex.join(command)}` ended with code {work.returncode}; the server was stopped")


def _require_running(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is not None:
        raise RuntimeError(f"vLLM ended with code {server.returncode}; its last lines above say why")


@contextlib.contextmanager
def stopped_at_end(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a process group of its own, and end it with the block; a signal meanwhile kills it at once."""
    process = subprocess.Popen(words, process_group=0, **options)
    try:
        yield process
    finally:
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            # With all that it has left: an engine that outlives its server would keep the GPU's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_ready(url: str) -> bool:
    """Return whether a server answers that it is ready."""
    try:
        return httpx2.get(f"{url}/health", timeout=PROBE_S, trust_env=not is_nearby(url)).is_success
    except httpx2.HTTPError:
        return False


def own_url(host: str, port: int) -> str:
    """Return the address at which this machine will reach a server that listens there; ValueError if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"no server can listen at {host} port {port} ({error.strerror}); give another --port or --host, or stop"
            " what listens there"
        ) from None
    known = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])
    return f"http://{f'[{known}]' if ':' in known else known}:{port}"


def command_words(command: str) -> list[str]:
    """Return the words of a command; ValueError if they are none, or the first is no program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"command is {command!r}, whose quotes do not match; close them") from error
    if not words or shutil.which(words[0]) is None:
        raise ValueError(
            f"command is {command!r}, and no program {words[0] if words else ''} can be run; write it as in a shell"
        )
    return words


def _require_vllm(python: str | None) -> None:
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "vLLM is not installed here. It asks for another transformers than onetrunk, so install it in an"
                " environment of its own (python -m venv vllm; vllm/bin/pip install vllm) and give its interpreter"
                " (--python vllm/bin/python); --print shows the command for another machine"
            )
    elif shutil.which(python) is None:
        raise ValueError(f"python is {python!r}, and no such program can be run; give the path of an interpreter")


def _checkpoint_dtype(base: str, revision: str | None) -> str:
    """Return the dtype of a checkpoint, as vLLM names it. Its own "auto" would round float32 to 16 bits."""
    dtype = str(load_config(base, revision).dtype or "auto").removeprefix("torch.")
    return dtype if dtype in DTYPES else "auto"


parse_serve = partial(parse, verb="serve", dataclass_types=(ServeArguments,))
main = partial(run_stage, "serve", parse_serve, serve)
