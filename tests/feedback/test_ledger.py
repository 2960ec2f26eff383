"""The ledger keeps what it was given: under a cut at any byte, a kill, a full disk, and two writers."""

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.feedback.ledger import Ledger
from onetrunk.utils.locks import WriterLock

SOURCE = Path(__file__).parents[2] / "src"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
entries = st.lists(json_values, min_size=1, max_size=6)


def key(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


def filled(path, values):
    with Ledger(path) as ledger:
        for i, value in enumerate(values):
            ledger.put(key(i), value)
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(values=entries, data=st.data())
def test_a_file_cut_at_any_byte_keeps_every_whole_line_and_takes_the_rest_again(tmp_path_factory, values, data):
    path = tmp_path_factory.mktemp("cut") / "ledger.jsonl"
    whole = filled(path, values)
    at = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:at])
    # A line is whole with or without its end.
    ends = [match.start() for match in re.finditer(b"\n", whole)]
    survivors = sum(end <= at for end in ends)
    with Ledger(path) as ledger:
        assert [ledger.get(key(i)) for i in range(survivors)] == values[:survivors]
        assert len(ledger) == survivors and all(key(i) not in ledger for i in range(survivors, len(values)))
        for i, value in enumerate(values):
            ledger.put(key(i), value)
    assert path.read_bytes() == whole


@settings(max_examples=60, deadline=None)
@given(values=st.lists(json_values, min_size=2, max_size=4), data=st.data())
def test_a_changed_bit_before_the_last_line_is_refused_by_its_line(tmp_path_factory, values, data):
    path = tmp_path_factory.mktemp("flip") / "ledger.jsonl"
    whole = bytearray(filled(path, values))
    lines = bytes(whole).split(b"\n")
    at = data.draw(st.integers(0, len(whole) - len(lines[-2]) - 2))
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    number = bytes(whole[:at]).count(b"\n") + 1
    with pytest.raises(RuntimeError, match=rf"line {number} is damaged.*delete that line"):
        Ledger(path)
    assert path.read_bytes() == whole


def test_a_text_with_half_a_surrogate_pair_and_line_ends_comes_back_as_it_went(tmp_path):
    value = {"text": "a\nb\r\u2028\ud800 \x00", "number": 0.1}
    filled(tmp_path / "l.jsonl", [value])
    with Ledger(tmp_path / "l.jsonl") as ledger:
        assert ledger.get(key(0)) == value


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = filled(path, ["a", []])
    path.write_bytes(whole[:-1])
    with Ledger(path) as ledger:
        assert len(ledger) == 2
    assert path.read_bytes() == whole


def test_zeros_that_a_power_cut_leaves_at_the_end_are_cut_off(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = filled(path, ["a", "b"])
    path.write_bytes(whole + bytes(100))
    with Ledger(path) as ledger:
        assert len(ledger) == 2
    assert path.read_bytes() == whole


def test_of_two_values_the_first_stands(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.put(key(0), "first") == "first"
        assert ledger.put(key(0), "second") == "first"
        assert ledger.get(key(0)) == "first" and ledger.get(key(1), "none") == "none"
        assert list(ledger.keys()) == [key(0)]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("short", 1, "64 hexadecimal"), (key(0), float("nan"), "not JSON"), (key(0), {1, 2}, "not JSON")],
)
def test_what_is_no_key_or_no_json_is_refused_and_leaves_no_trace(tmp_path, name, value, message):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        with pytest.raises(ValueError, match=message):
            ledger.put(name, value)
        assert len(ledger) == 0
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""


def test_a_closed_ledger_says_so(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.put(key(0), 1)
    ledger.close()
    ledger.close()
    for use in (lambda: ledger.put(key(1), 1), lambda: ledger.get(key(0))):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_threads_share_a_ledger(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:

        def work(offset):
            for i in range(200):
                ledger.put(key((i + offset) % 250), (i + offset) % 250)

        threads = [threading.Thread(target=work, args=(50 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {ledger.get(name) for name in ledger.keys()} == set(range(250))
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert len(ledger) == 250


def test_a_second_writer_is_refused_by_pid_and_host_and_let_in_after_a_release(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(RuntimeError, match=rf"process {os.getpid()} on \S+; wait"):
        Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    Ledger(tmp_path / "ledger.jsonl").close()


WRITER = """
import hashlib, os, sys
from onetrunk.feedback.ledger import Ledger
ledger = Ledger(sys.argv[1])
for i in range(10**6):
    ledger.put(hashlib.sha256(str(i).encode()).hexdigest(), "x" * (i % 700))
    os.write(1, f"{i}\\n".encode())
"""


def test_kill_9_loses_at_most_the_line_being_written_and_its_lock_is_taken_over(tmp_path):
    path = tmp_path / "ledger.jsonl"
    most = 0  # A busy machine may let an earlier writer get further than a later one.
    for killed_after in (1, 200, 1500):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, env={"PYTHONPATH": str(SOURCE)}
        )
        for _ in range(killed_after):
            last = int(writer.stdout.readline())
        with pytest.raises(RuntimeError, match=f"process {writer.pid} "):
            Ledger(path)
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        last = int(rest[-1]) if rest else last
        with Ledger(path) as ledger:
            assert ledger.get(key(last)) == "x" * (last % 700)
            most = max(most, last)
            assert len(ledger) <= most + 2


def test_a_writer_on_another_machine_is_believed_to_live_but_one_before_the_last_boot_is_not(tmp_path):
    path = tmp_path / "ledger.jsonl"
    lock = tmp_path / "ledger.jsonl.lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "boot": "another"}))
    with pytest.raises(RuntimeError, match=rf"process 1 on elsewhere.*delete {lock}"):
        Ledger(path)
    lock.write_text(json.dumps({"pid": 1, "host": os.uname().nodename, "boot": "another"}))
    Ledger(path).close()
    lock.write_text('{"pid": 1, "ho')
    Ledger(path).close()


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


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    code = """
import resource, signal, sys
from onetrunk.feedback.ledger import Ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = Ledger(sys.argv[1])
ledger.put("a" * 64, "small")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    ledger.put("b" * 64, "large" * 1000)
except OSError as error:
    print(error.strerror)
ledger.put("c" * 64, "small again")
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "l")],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert (run.stdout.strip(), run.returncode) == ("File too large", 0), run.stderr
    before = (tmp_path / "l").read_bytes()
    with Ledger(tmp_path / "l") as ledger:
        assert list(ledger.keys()) == ["a" * 64, "c" * 64]
    assert (tmp_path / "l").read_bytes() == before


def test_a_value_that_is_replaced_stays_replaced_when_the_file_is_opened_again(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.put(key(0), "first")
        ledger.put(key(1), "other")
        assert ledger.replace(key(0), "second") == "second" == ledger.get(key(0))
    with Ledger(path) as ledger:
        assert ledger.get(key(0)) == "second" and ledger.get(key(1)) == "other" and len(ledger) == 2
    # A kill that tears the replacing line leaves the value before it.
    path.write_bytes(path.read_bytes()[:-5])
    with Ledger(path) as ledger:
        assert ledger.get(key(0)) == "first"
