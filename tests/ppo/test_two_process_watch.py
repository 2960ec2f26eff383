"""Two processes, one of them slow: the metrics of both ranks, and a trace of each."""

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.ppo.two_process_watch import SLOW_S

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("two_process_watch.py"))
pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(900)]


@cache
def launched() -> Path:
    """Run the script on two processes; return its folder."""
    folder = Path(mkdtemp())
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, SCRIPT, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def history(rank: int) -> list[dict]:
    return json.loads((launched() / f"history-{rank}.json").read_text())


def events(rank: int) -> list[dict]:
    (path,) = (launched() / "run" / "trace").glob(f"rank-{rank}.*.json.gz")
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_every_rank_logs_the_least_mean_and_largest_value_of_all_ranks():
    own = [[{k: v for k, v in entry.items() if k.startswith("rank/")} for entry in history(r)] for r in (0, 1)]
    assert own[0] == own[1]
    assert all(entry.pop("rank/slowest") == 1 for entry in own[0] if "rank/score_s_max" in entry)
    first = own[0][0]
    assert {name.rpartition("_")[0] for name in first} == {
        "rank/generate_s", "rank/score_s", "rank/update_s", "rank/memory_gib", "rank/busy",
    }  # fmt: skip
    for name in {name.rpartition("_")[0] for name in first}:
        least, mean, most = (first[f"{name}_{kind}"] for kind in ("min", "mean", "max"))
        # The mean of two; values travel as float32.
        assert 0 <= least <= most and mean == pytest.approx((least + most) / 2, rel=1e-6)
    assert first["rank/score_s_max"] >= SLOW_S > first["rank/score_s_max"] - first["rank/score_s_min"] - SLOW_S
    assert 0 < first["rank/busy_min"] < first["rank/busy_max"] <= 1
    # The second step of a rollout only updates.
    assert "rank/score_s_max" not in own[0][1] and own[0][1]["rank/update_s_max"] > 0


def test_the_trace_of_a_rank_holds_its_spans():
    spans = {rank: [e for e in events(rank) if e.get("cat") == "user_annotation"] for rank in (0, 1)}
    for own in spans.values():
        counts = Counter(e["name"] for e in own)
        # Two rollouts of two steps.
        assert (counts["generate"], counts["score"], counts["update"]) == (2, 2, 4)
    assert all(e["dur"] >= 0.99e6 * SLOW_S for e in spans[1] if e["name"] == "score")


def test_no_heartbeat_is_left_by_a_run_that_ended_well():
    assert not list((launched() / "run").glob("*heartbeat*"))
