"""Heartbeat files, and what they say of a process that is lost; the processes are real ones."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from onetrunk.parallel.heartbeat import (
    Beat,
    Heartbeat,
    LostRanks,
    describe_lost,
    heartbeat_file,
    is_connection_error,
    read_beat,
)

HERE = socket.gethostname()
BROKEN = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def put(folder: Path, rank: int, **values) -> Beat:
    """Write the heartbeat of another rank."""
    beat = Beat(**{"rank": rank, "host": HERE, "pid": os.getpid(), "time": time.time(), "phase": "gather", **values})
    heartbeat_file(folder, rank).write_text(json.dumps(asdict(beat)))
    return beat


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def connected(monkeypatch):
    """As in a process group, without whose errors RuntimeErrors are those of something else."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)


def test_a_heartbeat_says_where_the_process_is_and_ends_with_the_run(tmp_path):
    heartbeat = Heartbeat(tmp_path, 3)
    with heartbeat.running(world_size=4):
        heartbeat.step, heartbeat.rollout = 12, 6
        heartbeat.enter("score", is_due=True)
        beat = read_beat(tmp_path, 3)
        assert (beat.rank, beat.host, beat.pid) == (3, HERE, os.getpid())
        assert (beat.phase, beat.step, beat.rollout) == ("score", 12, 6)
        assert beat.place == "in phase score of rollout 6 at step 12"
        with heartbeat.during("save"):
            assert read_beat(tmp_path, 3).phase == "save"
        assert read_beat(tmp_path, 3).phase == "score"
        assert [path.name for path in tmp_path.iterdir()] == ["_heartbeat-3.json"]
    assert not list(tmp_path.iterdir())


def test_between_two_writes_progress_is_not_written(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    heartbeat = Heartbeat(tmp_path, 0)
    times = []
    with heartbeat.running(world_size=1):
        # A token every quarter of a second; then a change of phase within a second of a write, and one after it.
        for quarter in range(1, 10):
            now[0] = 100.0 + quarter / 4
            heartbeat.beat()
            times.append(read_beat(tmp_path, 0).time)
        assert sorted(set(times)) == [100.0, 101.0, 102.0]
        now[0] = 102.5
        heartbeat.enter("score")
        assert read_beat(tmp_path, 0).phase == "start"
        now[0] = 103.5
        heartbeat.enter("gather")
        assert (read_beat(tmp_path, 0).phase, read_beat(tmp_path, 0).time) == ("gather", 103.5)


def test_a_stage_and_its_trainer_share_a_heartbeat_which_the_outer_one_ends(tmp_path):
    stage, trainer = Heartbeat.of(tmp_path, 0), Heartbeat.of(tmp_path, 0)
    assert stage is trainer
    with stage.running(1):
        with trainer.running(1):
            pass
        assert read_beat(tmp_path, 0) is not None
    assert read_beat(tmp_path, 0) is None


def test_the_first_rank_deletes_what_ranks_left_that_do_not_run_now(tmp_path):
    for rank in (1, 2, 10):
        put(tmp_path, rank)
    (tmp_path / "_heartbeat-of-mine.json").touch()
    with Heartbeat(tmp_path, 0).running(world_size=2):
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["_heartbeat-0.json", "_heartbeat-1.json", "_heartbeat-of-mine.json"]


def test_a_heartbeat_that_cannot_be_written_warns_once_and_ends_no_run(tmp_path, caplog):
    heartbeat = Heartbeat(tmp_path, 0)
    (tmp_path / "_heartbeat-0.json").mkdir()
    with heartbeat.running(1):
        heartbeat.enter("score", is_due=True)
        heartbeat.enter("gather", is_due=True)
    assert caplog.text.count("the run continues without heartbeats") == 1


def test_the_fate_of_a_process_is_known_on_this_machine_only(tmp_path):
    assert put(tmp_path, 1).fate is None
    assert put(tmp_path, 1, pid=ended_pid()).fate == "was killed or crashed"
    assert put(tmp_path, 1, pid=ended_pid(), host="elsewhere").fate is None


def test_a_process_that_lost_the_connection_itself_is_not_the_lost_one(tmp_path):
    """Rank 2 is dead; rank 1 was connected to it too, and has ended already."""
    put(tmp_path, 1, pid=ended_pid(), phase="failed", error="")
    put(tmp_path, 2, pid=ended_pid(), phase="update", step=7, rollout=3)
    lost = describe_lost(tmp_path, rank=0, world_size=3)
    assert lost.startswith("rank 2 (") and "rank 1" not in lost
    assert "was killed or crashed in phase update of rollout 3 at step 7; its last sign was 0 s ago" in lost


def test_a_process_that_failed_with_an_error_is_named_with_it(tmp_path):
    put(tmp_path, 1, pid=ended_pid(), phase="failed", error="ValueError: no such file")
    lost = describe_lost(tmp_path, rank=0, world_size=2)
    assert lost.endswith("failed: ValueError: no such file")


@pytest.mark.parametrize(
    ("others", "named"),
    [
        # Rank 1 waits as this process does; rank 2 has been scoring for minutes.
        (
            [{"age": 400, "phase": "gather"}, {"age": 300, "phase": "score"}],
            "rank 2 .*silent in phase score.* 300 s",
        ),
        (
            [{"age": 30, "phase": "update"}, {"age": 31, "phase": "update"}],
            "rank 2 .*silent in phase update.* 31 s",
        ),
        ([{"age": 0, "phase": "failed", "error": ""}], ".*look at the network"),
        ([None], "rank 1 .without a heartbeat"),
    ],
)
def test_without_a_certain_sign_the_most_likely_process_is_named(tmp_path, others, named):
    for rank, beat in enumerate(others, start=1):
        if beat is not None:
            put(tmp_path, rank, host=f"host-{rank}", time=time.time() - beat.pop("age"), **beat)
    lost = describe_lost(tmp_path, rank=0, world_size=len(others) + 1, grace_s=0.0)
    assert re.match(named, lost), lost


def test_an_error_of_the_connection_becomes_a_message_that_names_the_rank(tmp_path, connected):
    heartbeat = Heartbeat(tmp_path, 0)
    pid = ended_pid()
    with pytest.raises(LostRanks) as caught, heartbeat.running(world_size=2):
        put(tmp_path, 1, pid=pid)
        heartbeat.enter("update")
        raise RuntimeError(BROKEN)
    message = str(caught.value)
    assert message.startswith(f"rank 0 lost the connection to another process in phase update: rank 1 (process {pid}")
    assert "--resume auto" in message and "gloo" not in message
    assert (read_beat(tmp_path, 0).phase, read_beat(tmp_path, 0).error) == ("failed", "")


def test_another_error_stays_and_is_left_for_the_other_ranks(tmp_path, connected):
    with pytest.raises(ValueError, match="no such prompt"), Heartbeat(tmp_path, 1).running(world_size=2):
        raise ValueError("no such prompt")
    assert read_beat(tmp_path, 1).error == "ValueError: no such prompt"


def test_what_is_an_error_of_the_connection(connected):
    cause = RuntimeError("the reward failed")
    cause.__cause__ = RuntimeError("Timed out waiting 8000ms for recv operation to complete")
    assert is_connection_error(RuntimeError(BROKEN)) and is_connection_error(cause)
    assert is_connection_error(torch.distributed.DistStoreError("wait timeout"))
    assert not is_connection_error(RuntimeError("CUDA out of memory"))
    assert not is_connection_error(ValueError(BROKEN))
