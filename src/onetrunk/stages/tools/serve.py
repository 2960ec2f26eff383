"""`onetrunk serve MODEL`: run a vLLM server that PPO, prefs and eval can sample from, or print its command.

The flags matter: `VLLMBackend` needs adapters that load while the server runs, logprobs after temperature, and the
model's own probabilities without the defaults of its generation_config.json. A server that dies is not started again:
whoever samples from it must check its base again, by a resume.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from onetrunk.models.loading import adapter_base, base_revision, load_config
from onetrunk.rollouts.colocate import CPU_ENVIRONMENT, CPU_SETTINGS
from onetrunk.rollouts.publishing import served_rank
from onetrunk.servers.client import checked_variable, read_secret
from onetrunk.stages.arguments import DTYPES, parse
from onetrunk.stages.options.reading import say
from onetrunk.utils.options import VLLM_RANKS, option

MODULE = "vllm.entrypoints.openai.api_server"
# Without the first, adapters cannot be loaded while the server runs; the second turns telemetry off.
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
CPU_WORDS = [f"--{'' if value else 'no-'}{name.replace('_', '-')}" for name, value in CPU_SETTINGS.items()]
# How long the server may take to end.
STOP_S = 30.0


@dataclass
class ServeArguments:
    """The options of `onetrunk serve`; names as in `vllm serve` and `trl vllm-serve`."""

    model: str | None = option(
        None, "Name or folder of the base model that PPO trains on; for an adapter, its base is served."
    )
    host: str = option(
        "127.0.0.1", "Address to listen on. Whoever reaches it can load adapters, so do not open it to others."
    )
    port: int = option(8000, "Port to listen on.")
    revision: str | None = option(None, "Branch, tag or commit of the model, or of the adapter, on the Hub.")
    dtype: str = option("auto", "Precision of the base, as in the trainer; auto: the checkpoint's own.", DTYPES)
    max_lora_rank: int = option(16, "Largest rank of an adapter, 1 to 512; rounded up to a rank that vLLM knows.")
    max_loras: int = option(2, "Adapters that sample at the same time, at least 1; others wait on the CPU or on disk.")
    max_model_len: int | None = option(
        None, "Most tokens of a prompt with its completion, at least 2; the model's own positions if left out."
    )
    tensor_parallel_size: int = option(1, "GPUs that share the model, at least 1.")
    gpu_memory_utilization: float = option(
        0.9, "Share of a GPU's memory that the server takes, above 0, at most 1; lower it on a GPU that also trains."
    )
    device: str = option("auto", "Where it runs; auto: cuda if there is a GPU.", ("auto", "cuda", "cpu"))
    api_key_env: str | None = option(
        None,
        "Environment variable with the key that calls must bring; for ppo, eval and prefs it is vllm_api_key_env.",
    )
    python: str | None = option(None, "Interpreter of the environment that has vLLM, if it is not this one.")
    print: bool = option(False, "Print the command of the server instead of starting it.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("no model is named; write onetrunk serve MODEL --port 8000")
        if not 1 <= self.max_lora_rank <= VLLM_RANKS[-1]:
            raise ValueError(f"max_lora_rank is {self.max_lora_rank}; set it from 1 to {VLLM_RANKS[-1]}")


def server_words(args: ServeArguments, base: str, revision: str | None, dtype: str, on_cpu: bool) -> list[str]:
    """Return the arguments of vLLM's server, after the module."""
    rank = served_rank(args.max_lora_rank)
    words = ["--model", base, "--host", args.host, "--port", str(args.port), "--dtype", dtype]
    words += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(args.max_loras)]
    # Two versions of the policy and the reference stay in memory.
    words += ["--max-cpu-loras", str(max(4, args.max_loras))]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if revision is not None:
        words += ["--revision", revision]
    if args.max_model_len is not None:
        words += ["--max-model-len", str(args.max_model_len)]
    if on_cpu:
        return [*words, *CPU_WORDS]
    words += ["--tensor-parallel-size", str(args.tensor_parallel_size)]
    return [*words, "--gpu-memory-utilization", str(args.gpu_memory_utilization)]


def run(args: ServeArguments) -> None:
    """Start the server and wait for its end, or print the command."""
    base = adapter_base(args.model, args.revision) or args.model
    on_cpu = args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available())
    revision = args.revision if base == args.model else base_revision(args.model, args.revision)
    dtype = checkpoint_dtype(base, revision) if args.dtype == "auto" else args.dtype
    if dtype == "float32" and not on_cpu:
        raise ValueError(
            "vLLM computes adapters on a GPU in 16 bits only, and the base is float32; give --dtype bfloat16, here and"
            " to the stages that sample from the server"
        )
    words = [args.python or sys.executable, "-m", MODULE]
    words += server_words(args, whole_path(base), revision, dtype, on_cpu)
    environment = ENVIRONMENT | (CPU_ENVIRONMENT if on_cpu else {})
    if args.print:
        key = [] if args.api_key_env is None else [f'VLLM_API_KEY="${checked_variable(args.api_key_env)}"']
        print(" ".join([*(f"{name}={value}" for name, value in environment.items()), *key, shlex.join(words)]))
        return
    _require_vllm(args.python)
    if args.api_key_env is not None:
        environment |= {"VLLM_API_KEY": read_secret(args.api_key_env)}
    say(f"{shlex.join(words)}\nit takes a minute or more to be ready; Ctrl-C stops it")
    # A PYTHONPATH of ours would put our packages before those of its environment.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run_server(words, {**inherited, **environment})


def run_server(words: Sequence[str], environment: dict[str, str]) -> None:
    """Run the server in a process group of its own until it ends (RuntimeError), or until a signal to this process."""
    process = subprocess.Popen(words, process_group=0, env=environment)
    try:
        code = process.wait()
        raise RuntimeError(f"vLLM ended with code {code}; its last lines above say why")
    finally:
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:  # Also after a second Ctrl-C: an engine that outlives its server would keep the GPU's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _require_vllm(python: str | None) -> None:
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "vLLM is not installed here; pip install 'onetrunk[vllm]', or install it in another environment"
                " (python -m venv vllm; vllm/bin/pip install vllm) and give its interpreter"
                " (--python vllm/bin/python); --print shows the command for another machine"
            )
    elif shutil.which(python) is None:
        raise ValueError(f"python is {python!r}, and no such program can be run; give the path of an interpreter")


def whole_path(name: str) -> str:
    """Return the absolute path of a folder, because a printed command may run elsewhere; a Hub's name unchanged."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def checkpoint_dtype(base: str, revision: str | None) -> str:
    """Return the dtype of a checkpoint, as vLLM names it. Its own "auto" would round float32 to 16 bits."""
    dtype = str(load_config(base, revision).dtype or "auto").removeprefix("torch.")
    return dtype if dtype in DTYPES else "auto"


parse_serve = partial(parse, verb="serve", dataclass_types=(ServeArguments,))
