"""Two processes, one of them slow: the metrics of both ranks, the warning, and one trace of both."""

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
def launched() -> tuple[Path, str]:
    """Run the script on two processes; return its folder and what it printed."""
    folder = Path(mkdtemp())
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, SCRIPT, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stderr


def history(rank: int) -> list[dict]:
    return json.loads((launched()[0] / f"history-{rank}.json").read_text())


def events(name: str) -> list[dict]:
    with gzip.open(launched()[0] / "run" / "trace" / name, "rt") as file:
        return json.load(file)["traceEvents"]


def test_every_rank_logs_the_least_mean_and_largest_value_of_all_ranks():
    own = [[{k: v for k, v in entry.items() if k.startswith("rank/")} for entry in history(r)] for r in (0, 1)]
    assert own[0] == own[1]
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


def test_the_slow_rank_is_named_once_with_its_phase():
    warnings = [line for line in launched()[1].splitlines() if "straggler: " in line]
    assert len(warnings) == 1
    assert "in 2 rollouts in a row, rank 1 on " in warnings[0] and " s to score, the other ranks " in warnings[0]


def test_the_merged_trace_holds_the_spans_of_both_ranks_on_one_clock():
    spans = [e for e in events("all-ranks.json.gz") if e.get("cat") == "user_annotation" and e["ph"] == "X"]
    of_rank = {rank: [e for e in spans if e["pid"] == 100 * rank] for rank in (0, 1)}
    for own in of_rank.values():
        counts = Counter(e["name"] for e in own)
        # Two rollouts of two steps.
        assert (counts["generate"], counts["score"], counts["update"]) == (2, 2, 4) and counts["gather"] >= 8
    waits = [e for e in of_rank[1] if e["name"] == "score"]
    assert all(e["dur"] >= 0.99e6 * SLOW_S for e in waits)
    for fast, slow in zip([e for e in of_rank[0] if e["name"] == "score"], waits, strict=True):
        # They begin together: rank 0 waits in the phase after it. Half the delay covers a busy machine.
        assert abs(fast["ts"] - slow["ts"]) < 0.5e6 * SLOW_S
    names = {e["pid"]: e["args"]["name"] for e in events("all-ranks.json.gz") if e.get("name") == "process_name"}
    assert names[0].startswith("rank 0 (") and names[100].startswith("rank 1 (")


def test_the_merged_trace_holds_every_event_of_every_rank():
    parts = [[e for e in events(f"rank-{rank}.json.gz") if e["ph"] != "M"] for rank in (0, 1)]
    merged = [e for e in events("all-ranks.json.gz") if e["ph"] != "M"]
    assert len(merged) == sum(map(len, parts)) and all(len(part) > 100 for part in parts)


def test_no_heartbeat_is_left_by_a_run_that_ended_well():
    assert not list((launched()[0] / "run").glob("*heartbeat*"))
