"""Processes that tests start: Python on this repository, and servers on a free port."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
# Further variables of a launch on CPUs.
ON_CPUS = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports this repository, with further variables."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), **variables}


def python(
    *words: Any, code: int | None = 0, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end; `code` is the exit code that it must have, None: any."""
    return finished([sys.executable, *words], code, cwd=cwd, env=environment(**variables))


def finished(command: list[Any], code: int | None = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed; `code` as in `python`."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert code in (None, done.returncode), done.stdout[-1000:] + done.stderr[-4000:]
    return done


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_for_server(url: str, process: subprocess.Popen, log: Path) -> None:
    """Wait until a server answers; AssertionError with the end of its log if its process ends before."""
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.2)


def kill_all(process: subprocess.Popen) -> None:
    """Kill a process with all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
    process.kill()
    process.wait()


@contextlib.contextmanager
def served(words: list[Any], log: Path, **options: Any) -> Iterator[str]:
    """Run the command of a server on a free port until it answers; yield its address, and end it."""
    port = free_port()
    with log.open("w") as file:
        command = [*map(str, words), "--port", str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=file, **options)
    try:
        wait_for_server(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        kill_all(process)
