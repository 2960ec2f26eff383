"""One of two processes runs out of memory in the update: a sentence and an end, no wait for gradients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("two_process_memory.py"))


@pytest.mark.multi_process
@pytest.mark.slow
def test_one_of_two_processes_without_memory_ends_both_with_a_sentence(tmp_path):
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, SCRIPT, str(tmp_path)]
    # Far below the half hour that a process waits for another one's gradients.
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    sentence = "process 1 ran out of memory in the update of 2 rows x "
    assert sentence in done.stderr and "Set per_device_train_batch_size to 1," in done.stderr, done.stderr[-3000:]
