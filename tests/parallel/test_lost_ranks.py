"""One of two processes is killed: the other names it, ends with exit code 1, and the run can be resumed."""

import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from onetrunk.parallel.heartbeat import read_beat
from tests.checkpoints.test_elastic_restart import OPTIONS, prepared

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(1800)]


def started(folder: Path) -> list[subprocess.Popen]:
    """Start the command on two processes, without a launcher that would end the second one with the first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(folder)])
    command = [sys.executable, str(ROOT / "scripts/ppo.py"), *OPTIONS.split()]
    running = []
    for rank in "01":
        with open(folder / f"log-{rank}.txt", "w") as log:
            own = {**env, "RANK": rank, "LOCAL_RANK": rank}
            running.append(subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=log))
    return running


def finished(folder: Path) -> None:
    codes = [process.wait() for process in started(folder)]
    assert codes == [0, 0], (folder / "log-0.txt").read_text()[-3000:] + (folder / "log-1.txt").read_text()[-3000:]


@cache
def uninterrupted() -> Path:
    folder = prepared(Path(mkdtemp()))
    finished(folder)
    return folder


def test_the_other_process_lists_the_lost_one_and_the_run_resumes(tmp_path):
    folder = prepared(tmp_path)
    (folder / "kill").touch()
    first, second = started(folder)
    try:
        assert first.wait() == 1
    finally:
        first.kill()
        second.kill()
    assert second.wait() == -signal.SIGKILL
    log = (folder / "log-0.txt").read_text()
    (message,) = [line for line in log.splitlines() if "lost the connection to another process" in line]
    assert f"rank 1 (process {second.pid} on {socket.gethostname()}), last sign " in message
    assert "--resume auto" in message
    assert "Traceback" not in log and "gloo" not in message
    assert read_beat(folder / "out", 1).pid == second.pid
    assert read_beat(folder / "out", 0) is None
    finished(folder)
    for name in ("adapter_model.safetensors", "value_head.safetensors"):
        assert (folder / "out" / name).read_bytes() == (uninterrupted() / "out" / name).read_bytes()
    assert not list((folder / "out").glob("*heartbeat*"))
