"""One of two processes gets a signal: both stop at the same step, and the resumed run is the same run."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems
from tests.processes import ON_CPUS, python

SCRIPT = str(Path(__file__).with_name("two_process_stop.py"))
pytestmark = pytest.mark.multi_process


def launch(folder: Path, how: str) -> None:
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    python(*launcher, SCRIPT, folder, how, **ON_CPUS)


def digests(folder: Path) -> list:
    return [json.loads((folder / f"digest-{rank}.json").read_text()) for rank in (0, 1)]


@cache
def whole() -> list:
    folder = Path(mkdtemp())
    launch(folder, "whole")
    return digests(folder)


def goes_on_to_the_same_end(folder: Path) -> None:
    assert not (folder / "digest-0.json").exists()
    assert checkpoint_problems(checkpoint_folders(folder / "run")[-1]) == []
    launch(folder, "whole")
    assert digests(folder) == whole()


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_at_the_same_step(tmp_path):
    launch(tmp_path / "run", "token")
    stopped = [json.loads((tmp_path / "run" / f"stopped-{rank}.json").read_text()) for rank in (0, 1)]
    assert stopped[0] == stopped[1] and stopped[0][0] == 0
    assert stopped[0][1] == 4
    assert checkpoint_folders(tmp_path / "run" / "run")[-1].name == "checkpoint-4"
    goes_on_to_the_same_end(tmp_path / "run")
