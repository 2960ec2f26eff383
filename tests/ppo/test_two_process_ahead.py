"""Two processes sample ahead, each its own rows, and train as one process does; one resumes what two have saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.ppo.support import assert_same, trained_weights, without_wall_clock
from tests.ppo.two_process_ahead import STOP, make

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("two_process_ahead.py"))
# Float32 sums in another order, through 16 steps of SGD.
ROUNDING = {"atol": 2e-5, "rtol": 0.0}


@pytest.mark.multi_process
@pytest.mark.slow
def test_two_processes_ahead_equal_one_and_one_resumes_their_checkpoint(tmp_path):
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    (count, history), (_, other) = (json.loads((tmp_path / f"facts-{rank}.json").read_text()) for rank in (0, 1))
    assert count == 2
    weights = [load_file(tmp_path / f"weights-{rank}.safetensors") for rank in (0, 1)]
    assert_same(weights[0], weights[1])

    alone = make(tmp_path / "alone")
    alone.train()
    assert_same(weights[0], trained_weights(alone.model), **ROUNDING)
    own = without_wall_clock(alone.state.log_history)
    for name in ("sampling/staleness", "sampling/staleness_max", "score/mean"):
        logs = [[entry[name] for entry in log if name in entry] for log in (own, history, other)]
        assert logs[1] == logs[2] == pytest.approx(logs[0], abs=1e-6)
    assert [entry["sampling/staleness"] for entry in own if "sampling/staleness" in entry] == [0, 1, 2, 2]

    resumed = make(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{STOP}"))
    assert_same(trained_weights(resumed.model), trained_weights(alone.model), **ROUNDING)
