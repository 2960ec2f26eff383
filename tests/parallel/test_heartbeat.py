"""Heartbeat files, and the message about a lost process that they make possible."""

import json
import os
import socket
import time
from dataclasses import asdict

import pytest
import torch

from onetrunk.parallel.heartbeat import Heartbeat, LostRanks, is_connection_error
from onetrunk.utils.beats import Beat, heartbeat_file, read_beat
from onetrunk.utils.files import delete_temporaries

HERE = socket.gethostname()
BROKEN = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


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
        heartbeat_file(tmp_path, rank).touch()
    (tmp_path / "_heartbeat-of-mine.json").touch()
    with Heartbeat(tmp_path, 0).running(world_size=2):
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["_heartbeat-0.json", "_heartbeat-1.json", "_heartbeat-of-mine.json"]


def test_a_heartbeat_that_cannot_be_written_warns_once_and_is_tried_again(tmp_path, caplog):
    heartbeat = Heartbeat(tmp_path, 0)
    (tmp_path / "_heartbeat-0.json").mkdir()
    with heartbeat.running(1):
        heartbeat.enter("score", is_due=True)
        heartbeat.enter("gather", is_due=True)
        (tmp_path / "_heartbeat-0.json").rmdir()
        heartbeat.enter("update", is_due=True)
        assert read_beat(tmp_path, 0).phase == "update"
    assert caplog.text.count("the run continues and tries again") == 1


def test_the_first_process_cleans_up_while_another_writes_its_heartbeat(tmp_path, monkeypatch, caplog):
    replace = os.replace

    def clean_up_first(source, target):
        delete_temporaries(tmp_path)
        replace(source, target)

    monkeypatch.setattr(os, "replace", clean_up_first)
    with Heartbeat(tmp_path, 1).running(world_size=2):
        assert read_beat(tmp_path, 1).phase == "start"
    assert not list(tmp_path.iterdir()) and not caplog.text


def test_an_error_of_the_connection_lists_the_last_signs_of_the_other_ranks(tmp_path, connected):
    heartbeat = Heartbeat(tmp_path, 0)
    with pytest.raises(LostRanks) as caught, heartbeat.running(world_size=3):
        beat = Beat(1, "node-b", 47, time.time() - 30, "update", step=7, rollout=3)
        heartbeat_file(tmp_path, 1).write_text(json.dumps(asdict(beat)))
        heartbeat.enter("update")
        raise RuntimeError(BROKEN)
    message = str(caught.value)
    assert message.startswith("rank 0 lost the connection to another process in phase update: rank 1 (process 47 on")
    assert "last sign 30 s ago in phase update of rollout 3 at step 7; rank 2 has ended" in message
    assert "--resume auto" in message and "gloo" not in message
    assert read_beat(tmp_path, 0) is None


def test_another_error_stays_as_it_is(tmp_path, connected):
    with pytest.raises(ValueError, match="no such prompt"), Heartbeat(tmp_path, 1).running(world_size=2):
        raise ValueError("no such prompt")


def test_what_is_an_error_of_the_connection(connected):
    cause = RuntimeError("the reward failed")
    cause.__cause__ = RuntimeError("Timed out waiting 8000ms for recv operation to complete")
    assert is_connection_error(RuntimeError(BROKEN)) and is_connection_error(cause)
    assert is_connection_error(torch.distributed.DistStoreError("wait timeout"))
    assert not is_connection_error(RuntimeError("CUDA out of memory"))
    assert not is_connection_error(ValueError(BROKEN))
