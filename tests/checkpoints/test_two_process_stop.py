"""One of two processes gets a signal: both stop at the same step, and the resumed run is the same run."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("two_process_stop.py"))
pytestmark = pytest.mark.multi_process


def launched(folder: Path, how: str) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, SCRIPT, str(folder), how]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)


def digests(folder: Path) -> list:
    return [json.loads((folder / f"digest-{rank}.json").read_text()) for rank in (0, 1)]


@cache
def whole() -> list:
    folder = Path(mkdtemp())
    done = launched(folder, "whole")
    assert done.returncode == 0, done.stderr[-3000:]
    return digests(folder)


def goes_on_to_the_same_end(folder: Path) -> None:
    assert not (folder / "digest-0.json").exists()
    assert checkpoint_problems(checkpoint_folders(folder / "run")[-1]) == []
    again = launched(folder, "whole")
    assert again.returncode == 0, again.stderr[-3000:]
    assert digests(folder) == whole()


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_the_same_step(tmp_path):
    done = launched(tmp_path / "run", "token")
    assert done.returncode == 0, done.stderr[-3000:]
    stopped = [json.loads((tmp_path / "run" / f"stopped-{rank}.json").read_text()) for rank in (0, 1)]
    assert stopped[0] == stopped[1] and stopped[0][0] == 0
    assert stopped[0][1] == 4
    assert checkpoint_folders(tmp_path / "run" / "run")[-1].name == "checkpoint-4"
    goes_on_to_the_same_end(tmp_path / "run")
