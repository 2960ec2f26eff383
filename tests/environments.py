"""Virtual environments that slow tests make once, in the cache folder: other versions than those of the tests.

    python -m tests.environments

makes the one with the lowest versions (1 minute, 0.7 GB) and prints its interpreter.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.processes import ROOT

# Their builds belong to a machine, so the interpreter of the tests lends them.
LENT = re.compile(r"(torch|triton|nvidia-|cuda-)")


def made_once(name: str, contents: str, fill: Callable[[Path], None]) -> Path:
    """Return the interpreter of an environment, which `fill` makes if there is none of this name and `contents`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onetrunk"
    folder = cache / f"{name}-{hashlib.sha256(contents.encode()).hexdigest()[:8]}"
    # It gets its name last, so that an incomplete environment is made again.
    partial = folder.with_name(f"{folder.name}.partial")
    cache.mkdir(parents=True, exist_ok=True)
    # Two runs of the tests must not make it at the same time.
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "bin" / "python").exists():
            run_step("virtual environment", [sys.executable, "-m", "venv", "--clear", str(partial)])
            fill(partial / "bin" / "python")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    return folder / "bin" / "python"


def run_step(name: str, command: Sequence[str | Path], **kwargs: str) -> str:
    """Run one step of an installation; return what it printed. Raises RuntimeError if it fails."""
    print(f"environment: {name}", file=sys.stderr, flush=True)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **kwargs)
    if done.returncode:
        raise RuntimeError(f"the environment could not be made: {name} failed\n{done.stderr[-2000:]}")
    return done.stdout


def lend_packages(python: Path) -> None:
    """Let an environment use the packages of the environment of these tests; those in it itself come first."""
    site = run_step("folder", [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    (Path(site.strip()) / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))


def pip_install(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]


def resolved(python: Path, requirements: Sequence[str], *options: str) -> list[str]:
    """Return what uv's resolver chooses, as `name==version`; pip chooses the same in ten times the time."""
    command = [python, "-m", "uv", "pip", "compile", "-q", "--no-header", "--no-annotate", *options, "-"]
    return run_step("resolving", command, input="\n".join(requirements)).split()


def requirements(*extras: str) -> list[str]:
    """Return what onetrunk needs, with some of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]


def lowest_python() -> Path:
    """Return the interpreter of an environment with the lowest version of every dependency of onetrunk but torch."""
    needed = requirements()

    def fill(python: Path) -> None:
        run_step("uv", [*pip_install(python), "uv"])
        chosen = resolved(python, needed, "--resolution", "lowest-direct")
        run_step("packages", [*pip_install(python), "--no-deps", *(c for c in chosen if not LENT.match(c))])

    python = made_once("lowest", "\n".join(needed), fill)
    lend_packages(python)
    return python


if __name__ == "__main__":
    print(lowest_python())
