"""One of two processes gets a signal: both stop at the same step, and the resumed run is the same run."""

import json
from pathlib import Path

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems
from tests.processes import ON_CPUS, python


def launched(folder: Path, how: str, name: str) -> list:
    """Run the script on two processes; return what both wrote into the files of a name."""
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    python(*launcher, Path(__file__).with_name("two_process_stop.py"), folder, how, **ON_CPUS)
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.multi_process
def test_a_signal_to_one_process_stops_both_at_the_same_step_and_they_go_on_to_the_same_end(tmp_path):
    # Exit code and step.
    assert launched(tmp_path / "run", "token", "stopped") == [[0, 4], [0, 4]]
    last = checkpoint_folders(tmp_path / "run" / "run")[-1]
    assert last.name == "checkpoint-4" and checkpoint_problems(last) == []
    assert not (tmp_path / "run" / "digest-0.json").exists()
    assert launched(tmp_path / "run", "whole", "digest") == launched(tmp_path / "whole", "whole", "digest")
