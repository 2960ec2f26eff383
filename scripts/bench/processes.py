"""Starts the processes that are timed, and makes the environment of the one that isn't ours.

Knows commands and JSON lines; imports neither torch nor a trainer.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

CONSOLE = Console(highlight=False)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS = HERE / "onetrunk_ppo.py"


@dataclass(frozen=True)
class Baseline:
    """Another implementation, in an environment of its own; its requirements are the script's name with .txt.

    Args:
        name: in tables.
        kind: in names of files and folders.
        module: whose import shows that an environment has it.
    """

    name: str
    kind: str
    module: str

    @property
    def script(self) -> Path:
        return HERE / f"{self.kind}_baseline.py"

    @property
    def requirements(self) -> Path:
        return self.script.with_suffix(".txt")


TRL = Baseline("TRL 1.12", "trl", "trl.experimental.ppo")
AGILERL = Baseline("AgileRL 2.58", "agilerl", "agilerl.algorithms.ppo_llm")
BASELINES = {baseline.kind: baseline for baseline in (TRL, AGILERL)}


def say(text: str) -> None:
    """Print one line of progress."""
    CONSOLE.print(text, markup=False, soft_wrap=True)


def cached_baseline(baseline: Baseline = TRL) -> Path:
    """Return where the interpreter of the baseline's environment is made; the name holds its requirements' hash."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = hashlib.sha256(baseline.requirements.read_bytes()).hexdigest()[:8]
    return cache / "onetrunk" / f"bench-{baseline.kind}-{version}" / "bin" / "python"


def find_baseline(
    given: Path | None, makes: bool, say: Callable[[str], None], baseline: Baseline = TRL
) -> Path | None:
    """Return the interpreter that has the baseline: the one given, the one made before, or a new one; else None.

    Raises:
        RuntimeError: it lacks the baseline, or cannot be made.
    """
    cached = cached_baseline(baseline)
    if given is None and not cached.exists() and makes:
        make_baseline(say, baseline)
    python = given or (cached if cached.exists() else None)
    if python is None:
        return None
    check = [str(python), "-c", f"import {baseline.module}"]
    try:
        done = subprocess.run(check, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{python} does not run ({error}); give an interpreter that does") from error
    if done.returncode:
        raise RuntimeError(
            f"{python} has no {baseline.name} with PPO ({last_line(done.stderr)}); install"
            f" {baseline.requirements.relative_to(ROOT)} there, or let --make_baseline make an environment"
        )
    return python


def make_baseline(say: Callable[[str], None], baseline: Baseline = TRL) -> None:
    """Make the baseline's environment in the cache folder.

    Raises:
        RuntimeError: an installation failed.
    """
    python = cached_baseline(baseline)
    folder = python.parents[1]
    lines = [line for line in baseline.requirements.read_text().splitlines() if line and not line.startswith("#")]
    torch = next(line for line in lines if line.startswith("torch"))
    # It gets its name last, so that an incomplete environment is created again.
    partial = folder.with_name(folder.name + ".partial")
    pip = [str(partial / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    steps = {
        "virtual environment": [sys.executable, "-m", "venv", "--clear", str(partial)],
        torch: [*pip, torch],
        f"{baseline.name} and its requirements": [*pip, *lines],
    }
    for number, (name, command) in enumerate(steps.items(), 1):
        say(f"baseline {number}/{len(steps)}: {name}")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = last_line(done.stderr)
            raise RuntimeError(f"the baseline's environment could not be made: {name} failed ({last})")
    partial.rename(folder)


def last_line(text: str) -> str:
    """Return the last line of what a process printed."""
    return (text.strip().splitlines() or ["no message"])[-1]


def run_process(python: Path, script: Path, options: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Return the JSON line that a process prints last.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    paths = {"PYTHONPATH": str(ROOT / "src")} if script == OURS else {}
    command = [str(python), str(script), *options]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**inherited, **quiet, **paths}, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{shown(script, options)} took more than {timeout_s:.0f} s; raise --timeout_s") from error
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise RuntimeError(f"{shown(script, options)} failed with code {done.returncode}:\n{last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def shown(script: Path, options: Sequence[str]) -> str:
    """Return the command as a reader can type it at the repository's root."""
    return " ".join(["python", str(script.relative_to(ROOT)), *options])


def commit() -> str:
    """Return the short id of the commit that was timed, with a + where files differ from it; "" outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip()


def machine() -> dict[str, Any]:
    """Return the machine of the measurements."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        "system": platform.system(),
    }
