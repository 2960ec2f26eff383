"""One writer per file: who holds the lock is said, and a writer that is gone does not hold it."""

import errno
import json
import os
import subprocess
import sys

import pytest

from onetrunk.utils.locks import WriterLock


def test_a_second_writer_is_refused_by_pid_and_host_and_let_in_after_a_release(tmp_path):
    lock = WriterLock(tmp_path / "f")
    with pytest.raises(RuntimeError, match=rf"process {os.getpid()} on \S+; wait"):
        WriterLock(tmp_path / "f")
    lock.release()
    WriterLock(tmp_path / "f").release()


def test_a_writer_on_another_machine_is_believed_to_live_but_one_before_the_last_boot_is_not(tmp_path):
    lock = tmp_path / "f.lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "boot": "another"}))
    with pytest.raises(RuntimeError, match=rf"process 1 on elsewhere.*delete {lock}"):
        WriterLock(tmp_path / "f")
    lock.write_text(json.dumps({"pid": 1, "host": os.uname().nodename, "boot": "another"}))
    WriterLock(tmp_path / "f").release()
    lock.write_text('{"pid": 1, "ho')
    WriterLock(tmp_path / "f").release()


@pytest.mark.parametrize("exists", [True, False])
def test_a_lock_is_not_written_through_a_link(tmp_path, exists):
    other = tmp_path / "other"
    if exists:
        other.write_text("mine")
    (tmp_path / "f.lock").symlink_to(other)
    with pytest.raises(RuntimeError, match="f.lock is a link.*delete it"):
        WriterLock(tmp_path / "f")
    assert (other.read_text() == "mine") if exists else not other.exists()


def test_where_the_file_system_has_no_locks_the_pid_decides(tmp_path, monkeypatch):
    def no_locks(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("onetrunk.utils.locks.fcntl.flock", no_locks)
    lock = WriterLock(tmp_path / "f")
    holder = json.loads(lock.file.read_text())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lock.file.write_text(json.dumps({**holder, "pid": os.getppid()}))
    with pytest.raises(RuntimeError, match=f"process {os.getppid()}"):
        WriterLock(tmp_path / "f")
    lock.file.write_text(json.dumps({**holder, "pid": ended.pid}))
    WriterLock(tmp_path / "f").release()
