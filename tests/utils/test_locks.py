"""One writer per file: a second one is rejected, and a writer that is gone does not hold the lock."""

import os
import signal
import subprocess
import sys

import pytest

from onetrunk.utils.files import WriterLock, held_folder

HOLD = "import sys; from onetrunk.utils.files import WriterLock; lock = WriterLock(sys.argv[1]); print(); input()"


def test_a_second_writer_is_rejected_and_let_in_after_a_release(tmp_path):
    lock = WriterLock(tmp_path / "f")
    with pytest.raises(RuntimeError, match="f is being written by another process .*wait for it, or stop it"):
        WriterLock(tmp_path / "f")
    lock.release()
    lock.release()
    WriterLock(tmp_path / "f").release()


def test_a_writer_that_is_killed_does_not_hold_the_lock(tmp_path):
    words = [sys.executable, "-c", HOLD, str(tmp_path / "f")]
    writer = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    writer.stdout.readline()
    with pytest.raises(RuntimeError, match="another process"):
        WriterLock(tmp_path / "f")
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    WriterLock(tmp_path / "f").release()


def test_a_process_enters_its_own_folder_twice_and_a_link_is_not_written_through(tmp_path):
    with held_folder(tmp_path), held_folder(tmp_path), pytest.raises(RuntimeError):
        WriterLock(tmp_path / "_run")
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "f.lock").symlink_to(other)
    with pytest.raises((OSError, RuntimeError)):
        WriterLock(tmp_path / "f")
    assert other.read_text() == "mine"
