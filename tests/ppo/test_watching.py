"""Who is slow, worked out by hand; the phases and the trace of a run in one process."""

import gzip
import json
import logging
import time
from collections import Counter

import pytest
import torch

from onetrunk.checkpoints.heartbeats import read_beat
from onetrunk.ppo.watching import Straggler, find_slow, rank_events, rank_metrics
from tests.ppo.support import even_share, logged, make_config, make_trainer, trained, trained_weights

HOSTS = ["node-a", "node-a", "node-b"]


def test_per_rank_metrics_worked_out_by_hand():
    # Two ranks: generate, score, update in seconds, GiB, busy share.
    metrics = rank_metrics([[2.0, 0.0, 4.0, 1.0, 0.5], [6.0, 0.0, 4.0, 3.0, 0.75]])
    assert metrics == {
        "rank/generate_s_min": 2.0, "rank/generate_s_mean": 4.0, "rank/generate_s_max": 6.0,
        "rank/update_s_min": 4.0, "rank/update_s_mean": 4.0, "rank/update_s_max": 4.0,
        "rank/memory_gib_min": 1.0, "rank/memory_gib_mean": 2.0, "rank/memory_gib_max": 3.0,
        "rank/busy_min": 0.5, "rank/busy_mean": 0.625, "rank/busy_max": 0.75,
    }  # fmt: skip


def test_the_slow_rank_worked_out_by_hand():
    # Generate: 9 s against a median of 4 s; score: 3 s against 1 s, which costs less. 15 s in all.
    slow = find_slow([[4.0, 1.0, 3.0], [4.0, 3.0, 3.0], [9.0, 1.0, 3.0]], factor=1.5)
    assert (slow.rank, slow.phase, slow.seconds, slow.others) == (2, "generate", 9.0, 4.0)
    assert find_slow([[4.0, 1.0, 3.0], [5.9, 1.0, 3.0]], factor=1.5) is None
    assert find_slow([[4.0, 1.0, 3.0], [6.1, 1.0, 3.0]], factor=1.5).rank == 1
    # Three times slower, for 2% of the rollout.
    assert find_slow([[9.0, 0.1, 1.0], [9.0, 0.3, 1.0]], factor=1.5) is None
    assert find_slow([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], factor=1.5) is None


def test_a_straggler_is_named_once_after_as_many_rollouts_in_a_row_as_set():
    straggler = Straggler(factor=1.5, patience=3)
    slow, even = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [4.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]] * 3
    # Another rank, and the same rank in another phase, do not count with it.
    other, phase = [slow[2], slow[1], slow[0]], [slow[0], slow[1], [1.0, 4.0, 1.0]]
    rollouts = [slow, slow, even, slow, slow, other, slow, slow, phase, slow, slow, slow, slow, slow, even]
    said = [straggler.judge(rollout, HOSTS) for rollout in rollouts]
    assert [i for i, message in enumerate(said) if message] == [11]
    assert said[11].startswith("straggler: in 3 rollouts in a row, rank 2 on node-b needed 4 s to generate, the other")
    # After a rollout that was not slow it is named again.
    assert [bool(straggler.judge(slow, HOSTS)) for _ in range(3)] == [False, False, True]


def test_without_a_factor_no_rank_is_a_straggler():
    straggler = Straggler(factor=None, patience=1)
    assert straggler.judge([[1.0, 1.0, 1.0], [99.0, 1.0, 1.0]], HOSTS) is None


def test_the_events_of_a_rank_keep_apart_from_those_of_another():
    events = [
        {"ph": "M", "name": "process_name", "pid": 4321, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 4321, "tid": 7, "args": {"name": "thread 7"}},
        {"ph": "X", "cat": "user_annotation", "name": "score", "pid": 4321, "tid": 7, "ts": 10.0, "dur": 5.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 3, "ts": 11.0, "dur": 2.0},
        {"ph": "s", "id": 9, "name": "ac2g", "pid": 4321, "tid": 7, "ts": 10.5},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler",
            "pid": "Spans",
            "tid": "PyTorch",
            "ts": 9.0,
            "dur": 9.0,
        },
    ]
    merged = list(rank_events(events, rank=2, host="node-b", shift_us=1000.0))
    assert [(e["pid"], e.get("ts")) for e in merged if e["ph"] != "M"] == [
        (200, 1010.0), (201, 1011.0), (200, 1010.5), (202, 1009.0),
    ]  # fmt: skip
    assert next(e["id"] for e in merged if e["ph"] == "s") == "2-9"
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert names == {200: "rank 2 (node-b)", 201: "rank 2 (node-b): GPU 0", 202: "rank 2 (node-b): Spans"}
    assert next(e for e in merged if e["name"] == "thread_name")["pid"] == 200


@pytest.mark.slow
def test_a_trace_holds_the_rollouts_after_the_first_and_changes_nothing(tmp_path):
    settings = {"num_rollouts": 4, "num_ppo_epochs": 2}
    traced = trained(tmp_path / "traced", trace_rollouts=2, **settings)
    with gzip.open(tmp_path / "traced" / "trace" / "all-ranks.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [e for e in events if e.get("cat") == "user_annotation" and e["pid"] == 0]
    counts = Counter(e["name"] for e in spans)
    assert (counts["generate"], counts["score"], counts["update"]) == (2, 2, 4)
    # The model's operations lie within the spans, also those of scoring, which otherwise has a thread of its own.
    score = next(e for e in spans if e["name"] == "score")
    inside = [e for e in events if e.get("cat") == "cpu_op" and 0 <= e["ts"] - score["ts"] <= score["dur"]]
    assert any("mm" in e["name"] for e in inside)
    plain = trained(tmp_path / "plain", **settings)
    assert not (tmp_path / "plain" / "trace").exists()
    for name, tensor in trained_weights(plain.model).items():
        assert torch.equal(tensor, trained_weights(traced.model)[name])


def test_a_run_of_one_rollout_says_that_there_is_nothing_to_trace(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, num_rollouts=1, trace_rollouts=1)
    assert "the run ended before its second rollout: nothing was traced" in caplog.text
    assert not (tmp_path / "trace").exists()


def test_one_process_has_no_rank_metrics(tmp_path):
    trainer = trained(tmp_path)
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("rank/")]


def test_the_heartbeat_names_the_phase_the_rollout_and_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr("onetrunk.checkpoints.heartbeats.CHANGE_S", 0.0)
    seen = []

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.append(read_beat(tmp_path, 0))
        return even_share(prompts, completions, completion_ids)

    trainer = make_trainer(tmp_path, reward=reward, num_rollouts=2, num_ppo_epochs=2)
    trainer.train()
    assert [(beat.phase, beat.rollout, beat.step) for beat in seen] == [("score", 0, 0), ("score", 1, 2)]
    assert read_beat(tmp_path, 0) is None


@pytest.mark.slow
def test_times_of_the_log_do_not_count_the_writing_of_a_trace(tmp_path, monkeypatch):
    monkeypatch.setattr("onetrunk.ppo.watching.merge_traces", lambda *args: time.sleep(5))
    trainer = trained(tmp_path, num_rollouts=3, trace_rollouts=1)
    assert logged(trainer, "time/generate_s")[2] < 5


@pytest.mark.parametrize(
    ("setting", "value"), [("straggler_factor", 1.0), ("straggler_factor", "2"), ("trace_rollouts", -1)]
)
def test_a_setting_out_of_range_is_rejected(setting, value, tmp_path):
    with pytest.raises(ValueError, match=f"{setting} is .*must be"):
        make_config(tmp_path, **{setting: value})
