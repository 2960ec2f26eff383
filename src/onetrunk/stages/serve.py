"""`onetrunk serve MODEL`: run a vLLM server that PPO, prefs and eval can sample from, or print its command.

The flags matter: `VLLMBackend` needs adapters that load while the server runs, logprobs after temperature, and the
model's own probabilities without the defaults of its generation_config.json. A server that was ready and died is
started again: those who sample from it wait, and load their adapters again (`rollouts/pool.py`). With `command` it
runs for as long as that command.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onetrunk.models.loading import adapter_base, load_config
from onetrunk.rollouts.adapters import served_rank
from onetrunk.rollouts.colocate import CPU_ENVIRONMENT
from onetrunk.stages.parsing import parse
from onetrunk.stages.plain_arguments import DTYPES, ServeArguments
from onetrunk.stages.running import run_stage, say
from onetrunk.utils.http import read_secret

MODULE = "vllm.entrypoints.openai.api_server"
# Without the first, adapters cannot be loaded while the server runs; the second turns telemetry off.
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
# Of the server and its children, to find those that are left.
MARK = "ONETRUNK_SERVE"
# Between two questions after its health; so many answers in a row mean that its engine is dead.
PROBE_S, DEAD_PROBES = 2.0, 3
# After so long without a failure, restarts are counted from 0; how long it may take to end.
STABLE_S, STOP_S = 600.0, 30.0


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
        ValueError: no vLLM in this environment, or no interpreter at `python`.
        RuntimeError: the server ended before it was ready, or died too often.
    """
    base = adapter_base(args.model, args.revision) or args.model
    on_cpu = args.device == "cpu" or (args.device == "auto" and not _has_gpu())
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
    work = None if args.command is None else work_of(args.command)
    ends = "Ctrl-C stops it" if work is None else f"then runs `{args.command}`, whose end stops it"
    say(f"{shlex.join(words)}\nready when it says 'Application startup complete'; {ends}")
    # A PYTHONPATH of ours would put our packages before those of its environment.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    url = health_url(args.host, args.port)
    keep_running(words, {**inherited, **environment}, url, args.max_restarts, work)


@dataclass(frozen=True)
class End:
    """How one run of the server ended: why, as the rest of a sentence, and after how many seconds of being ready."""

    reason: str
    ready_s: float | None


class Work:
    """A command that runs while the server is ready, from its first time on."""

    def __init__(self, words: Sequence[str]):
        self.words = list(words)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command; do nothing if it was started before."""
        if self.process is None:
            self.process = subprocess.Popen(self.words)

    @property
    def code(self) -> int | None:
        """Its exit code; None before its end."""
        return None if self.process is None else self.process.poll()

    def stop(self) -> None:
        """End the command if it runs."""
        if self.process is not None:
            _stop(self.process)


def work_of(command: str) -> Work:
    """Return the work that a command is; ValueError if its first word is no program."""
    words = shlex.split(command)
    if shutil.which(words[0]) is None:
        raise ValueError(f"command is {command!r}, and no program {words[0]} can be run; write it as in a shell")
    return Work(words)


def keep_running(
    words: Sequence[str], environment: dict[str, str], url: str, max_restarts: int, work: Work | None = None
) -> None:
    """Run the server until a signal to this process; start it again when it dies after it was ready.

    Args:
        words, environment: of the server.
        url: that answers 200 while it is well.
        max_restarts: without `STABLE_S` seconds of being ready between them.
        work: runs from the first time that the server is ready; its end ends the server.

    Raises:
        RuntimeError: it ended before it was ready, or died too often; or the work failed.
    """
    try:
        _run_again(words, environment, url, max_restarts, work)
    finally:
        if work is not None:
            work.stop()
    if work is not None and work.code:
        raise RuntimeError(f"`{shlex.join(work.words)}` ended with code {work.code}; the server was stopped")


def _run_again(
    words: Sequence[str], environment: dict[str, str], url: str, max_restarts: int, work: Work | None
) -> None:
    num_restarts = 0
    while True:
        end = run_once(words, environment, url, work)
        if work is not None and work.code is not None:
            return
        if end.ready_s is None:
            raise RuntimeError(f"vLLM {end.reason} before it was ready; its last lines above say why")
        num_restarts = 0 if end.ready_s >= STABLE_S else num_restarts
        if num_restarts >= max_restarts:
            raise RuntimeError(f"vLLM {end.reason} after {num_restarts} restarts; its last lines above say why")
        num_restarts += 1
        say(f"vLLM {end.reason}; starting it again, {num_restarts} of at most {max_restarts} times")


def run_once(words: Sequence[str], environment: dict[str, str], url: str, work: Work | None = None) -> End:
    """Run the server until it ends; stop it when it says that its engine is dead, or when the work has ended.

    A signal ends it too.
    """
    # Its children inherit the mark: an engine that outlives its server would keep the GPU's memory.
    mark = f"{MARK}={secrets.token_hex(8)}"
    process = subprocess.Popen(words, env=environment | dict([mark.split("=")]))
    ready_at, num_dead = None, 0
    try:
        while True:
            try:
                reason = f"ended with code {process.wait(PROBE_S)}"
                break
            except subprocess.TimeoutExpired:
                status = health(url)
            if status == 200 and ready_at is None:
                ready_at = time.monotonic()
                if work is not None:
                    work.start()
            if work is not None and work.code is not None:
                reason = "was stopped"
                break
            # A server that is only busy does not answer in time, which is no status.
            num_dead = num_dead + 1 if status == 503 and ready_at is not None else 0
            if num_dead >= DEAD_PROBES:
                reason = "reports that its engine is dead"
                break
    finally:
        _stop(process)
        _kill_marked(mark)
    return End(reason, None if ready_at is None else time.monotonic() - ready_at)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kill_marked(mark: str) -> None:
    """Kill the processes whose environment has the mark, and wait until they are gone."""
    deadline = time.monotonic() + STOP_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _marked(mark: str) -> list[int]:
    """Return the processes whose environment has the mark, where the system shows environments (Linux)."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def health(url: str) -> int | None:
    """Return the status that a URL answers with; None without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=PROBE_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def health_url(host: str, port: int) -> str:
    """Return the address of the health check, as seen from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/health"


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


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _checkpoint_dtype(base: str, revision: str | None) -> str:
    """Return the dtype of a checkpoint, as vLLM names it. Its own "auto" would round float32 to 16 bits."""
    dtype = str(load_config(base, revision).dtype or "auto").removeprefix("torch.")
    return dtype if dtype in DTYPES else "auto"


parse_serve = partial(parse, verb="serve", dataclass_types=(ServeArguments,))
main = partial(run_stage, "serve", parse_serve, serve)
