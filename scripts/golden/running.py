"""Runs a case with the source of one tree, as a user would, and keeps what the base wrote."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from golden.cases import Case

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy")
QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
QUIET |= {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
# Of one command, on a busy machine.
LIMIT_S = 1200


class CaseFailed(Exception):
    """A command ended otherwise than expected; the message has its error, or the end of its log."""


def digest(*parts: Any) -> str:
    """Return a short name for what the parts and this machine decide."""
    with open("/proc/cpuinfo") as file:
        processor = next((line for line in file if line.startswith("model name")), "")
    machine = [platform.python_version(), processor, *map(version, PACKAGES)]
    return hashlib.sha256(repr([*parts, machine]).encode()).hexdigest()[:12]


def inputs_in(cache: Path) -> Path:
    """Return the folder of the inputs, made the first time."""
    folder = cache / f"inputs-{digest(*((HERE / name).read_text() for name in ('inputs.py', 'rewards.py')))}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        part.mkdir(parents=True)
        with (part / "log").open("w") as log:
            subprocess.run([sys.executable, str(HERE / "inputs.py"), str(part)], check=True, stderr=log)
        part.rename(folder)
    return folder


def place_of(cache: Path, commit: str, name: str, case: Case, inputs: Path) -> Path:
    """Return the folder in which the results of a case at a commit are kept."""
    helpers = [(HERE / file).read_text() for file in ("running.py", "fakes.py")]
    return cache / commit[:12] / f"{name}-{digest(case, inputs.name, helpers)}"


def run_case(case: Case, tree: Path, folder: Path, inputs: Path) -> float:
    """Run a case in a new folder with the source of a tree; return the seconds.

    Raises:
        CaseFailed: a command did not end as expected.
    """
    shutil.rmtree(folder, ignore_errors=True)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "inputs").symlink_to(inputs)
    env = {**os.environ, **QUIET, "PYTHONPATH": f"{tree / 'src'}:{tree}", "HF_DATASETS_CACHE": str(part / "datasets")}
    env |= {"GOLDEN_DIES_AT": str(case.dies_at)} | ({"ACCELERATE_USE_CPU": "true"} if case.layout else {})
    start = time.monotonic()
    with served(case, part) as settings:
        words = command(case, tree)
        if settings:
            given = {name: value for name, value in settings.items() if value is not None}
            (part / "case.yaml").write_text(yaml.safe_dump(given))
            words += ["--config", "case.yaml"]
        codes = case.codes or (0,) * len(case.runs)
        for number, (run, code) in enumerate(zip(case.runs, codes, strict=True)):
            run_command([*words, *shlex.split(run)], part, env, number, code)
    seconds = time.monotonic() - start
    (part / "seconds.json").write_text(json.dumps(seconds))
    part.rename(folder)
    return seconds


def command(case: Case, tree: Path) -> list[str]:
    """Return the words of a command, without its options."""
    if case.layout:
        config = str(tree / f"accelerate_configs/{case.layout}.yaml")
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
        return [*launch, "--num_processes", "2", "--main_process_port", "0", str(tree / f"scripts/{case.verb}.py")]
    if case.sampler == "colocated":
        return [sys.executable, str(HERE / "fakes.py"), case.verb]
    return [sys.executable, "-m", "onetrunk", case.verb]


def run_command(words: list[str], folder: Path, env: dict[str, str], number: int, code: int) -> None:
    """Run a command and its child processes; keep stdout and stderr.

    Raises:
        CaseFailed: it takes too long, or ends with another exit code.
    """
    log = folder / f"stderr-{number}"
    with log.open("w") as stderr, (folder / f"stdout-{number}").open("w") as stdout:
        process = subprocess.Popen(words, cwd=folder, env=env, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            found: Any = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            found = f"none after {LIMIT_S} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if found != code:
        lines = log.read_text().splitlines()
        said = [line for line in lines if line.startswith("error: ")][:1] or lines[-15:]
        raise CaseFailed("\n".join([f"exit code {found} (expected {code}) of run {number} in {folder}", *said]))


@contextmanager
def served(case: Case, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the settings of a case, with the address of a server that runs meanwhile if it has one."""
    if case.sampler != "server":
        yield case.settings
        return
    # That of this tree for both commits.
    words = [sys.executable, str(HERE / "fakes.py"), "serve", "inputs/base"]
    env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
    with (folder / "server").open("w") as log:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        server = subprocess.Popen(words, cwd=folder, env=env, text=True, **pipes)
    try:
        address = server.stdout.readline().strip()
        if not address:
            raise CaseFailed(f"the fake vLLM server did not start:\n{(folder / 'server').read_text()[-2000:]}")
        yield case.settings | {"vllm_server_base_url": address}
    finally:
        server.communicate()


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out into a folder for as long as it is needed."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)
