"""Two processes judge alike: an alarm ends both at the same step, with one whole checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("two_process_alarm.py"))


@pytest.mark.multi_process
@pytest.mark.slow
def test_an_alarm_ends_two_processes_at_the_same_step_with_a_checkpoint(tmp_path):
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    (count, first), (_, second) = (json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in (0, 1))
    assert count == 2 and first == second
    # Two rollouts of two steps each, of the eight that were planned.
    assert first["step"] == 4 and first["said"].startswith("alarm entropy at step 4: ")
    (folder,) = checkpoint_folders(tmp_path / "run")
    assert folder.name == "checkpoint-4" and checkpoint_problems(folder) == []
    assert done.stderr.count("Training stops") == 1
