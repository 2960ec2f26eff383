"""`onetrunk serve MODEL`: start a vLLM server that PPO can sample from, or print the command that would.

The flags matter: `VLLMBackend` needs adapters that load while the server runs, logprobs after temperature, and the
model's own probabilities without the defaults of its generation_config.json.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from onetrunk.models.sources import adapter_base, load_config
from onetrunk.stages.parsing import parse
from onetrunk.stages.plain_arguments import DTYPES, RANKS, ServeArguments, named_model
from onetrunk.stages.running import run_stage, say
from onetrunk.utils.http import read_secret

MODULE = "vllm.entrypoints.openai.api_server"
# Without the first, adapters cannot be loaded while the server runs; the second turns telemetry off.
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1"}
# On a CPU: torch.compile of the sampler alone takes minutes on a busy machine, longer than vLLM waits for it.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}


def server_words(args: ServeArguments, base: str, dtype: str, on_cpu: bool) -> list[str]:
    """Return the arguments of vLLM's server, after the module.

    Args:
        args: of the command.
        base: name or folder of the base model.
        dtype: of its weights.
        on_cpu: leave out what is for GPUs.
    """
    rank = next(rank for rank in RANKS if rank >= args.max_lora_rank)
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
        RuntimeError: the server ended with an error.
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
    say(f"{shlex.join(words)}\nready when it says 'Application startup complete'; Ctrl-C stops it")
    code = _run(words, {**os.environ, **environment})
    if code:
        raise RuntimeError(f"vLLM ended with code {code}; its last lines above say why")


def _run(words: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command until its end; a signal to this process ends it too."""
    # A PYTHONPATH of ours would put our packages before those of its environment.
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(words, env=environment)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _require_vllm(python: str | None) -> None:
    if python is None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "vLLM is not installed here: pip install 'onetrunk[vllm]', or give the interpreter of an environment"
                " that has it (--python /path/to/bin/python); --print shows the command for another machine"
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


def parse_serve(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return the arguments; the first word may be the model."""
    return parse(
        named_model(argv),
        (ServeArguments,),
        "serve",
        "Start a vLLM server that PPO can sample from: onetrunk serve MODEL --port 8000.",
    )


main = partial(run_stage, "serve", parse_serve, serve)
