"""The metrics of ranks, worked out by hand; the phases and the trace of a run in one process."""

import gzip
import json
from collections import Counter

import pytest

from onetrunk.ppo.monitoring.profiling import rank_metrics
from onetrunk.utils.beats import read_beat
from tests.ppo.support import assert_same, even_share, trained, trained_weights


def test_per_rank_metrics_worked_out_by_hand():
    # Two ranks: generate, score, update in seconds, GiB, busy share.
    metrics = rank_metrics([[2.0, 0.0, 4.0, 1.0, 0.5], [6.0, 0.0, 4.0, 3.0, 0.75]])
    assert metrics == {
        "rank/generate_s_min": 2.0, "rank/generate_s_mean": 4.0, "rank/generate_s_max": 6.0,
        "rank/update_s_min": 4.0, "rank/update_s_mean": 4.0, "rank/update_s_max": 4.0,
        "rank/memory_gib_min": 1.0, "rank/memory_gib_mean": 2.0, "rank/memory_gib_max": 3.0,
        "rank/busy_min": 0.5, "rank/busy_mean": 0.625, "rank/busy_max": 0.75,
        "rank/slowest": 1.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_trace_holds_the_rollouts_after_the_first_and_changes_nothing(tmp_path):
    settings = {"num_rollouts": 4, "num_ppo_epochs": 2}
    traced = trained(tmp_path / "traced", trace_rollouts=2, **settings)
    (path,) = (tmp_path / "traced" / "trace").glob("rank-0.*.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [e for e in events if e.get("cat") == "user_annotation"]
    counts = Counter(e["name"] for e in spans)
    assert (counts["generate"], counts["score"], counts["update"]) == (2, 2, 4)
    # The model's operations lie within the spans, also those of scoring, which otherwise has a thread of its own.
    score = next(e for e in spans if e["name"] == "score")
    inside = [e for e in events if e.get("cat") == "cpu_op" and 0 <= e["ts"] - score["ts"] <= score["dur"]]
    assert any("mm" in e["name"] for e in inside)
    plain = trained(tmp_path / "plain", **settings)
    assert not (tmp_path / "plain" / "trace").exists()
    assert_same(trained_weights(traced.model), trained_weights(plain.model))


def test_the_heartbeat_names_the_phase_the_rollout_and_the_step(tmp_path, monkeypatch):
    monkeypatch.setattr("onetrunk.parallel.heartbeat.INTERVAL_S", 0.0)
    seen = []

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.append(read_beat(tmp_path, 0))
        return even_share(prompts, completions, completion_ids)

    trained(tmp_path, reward=reward, num_rollouts=2, num_ppo_epochs=2)
    assert [(beat.phase, beat.rollout, beat.step) for beat in seen] == [("score", 0, 0), ("score", 1, 2)]
    assert read_beat(tmp_path, 0) is None
