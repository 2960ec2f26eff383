"""The ledger keeps what it was given: over kills, a full disk, damage, and a second process."""

import functools
import hashlib
import signal
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onetrunk.utils.ledger import Ledger
from tests.processes import environment, python

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def key(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


@settings(max_examples=20, deadline=None)
@example(values=[{"text": "a\nb\r\u2028\ud800 \x00", "number": 0.1}])  # With half a surrogate pair.
@given(values=st.lists(json_values, min_size=1, max_size=6))
def test_what_was_put_is_there_when_the_file_is_opened_again(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    with Ledger(path) as ledger:
        for i, value in enumerate(values):
            ledger.put(key(i), value)
    with Ledger(path) as ledger:
        assert ledger.keys() == [key(i) for i in range(len(values))]
        assert [ledger.get(key(i)) for i in range(len(values))] == values


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("short", 1, "non-hexadecimal"), (key(0), float("nan"), "not JSON"), (key(0), {1, 2}, "not JSON")],
)
def test_what_is_no_key_or_no_json_is_refused_and_leaves_no_trace(tmp_path, name, value, message):
    with Ledger(tmp_path / "ledger.db") as ledger:
        with pytest.raises(ValueError, match=message):
            ledger.put(name, value)
        assert ledger.keys() == []


def test_what_is_put_together_is_kept_together_or_not_at_all(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        with pytest.raises(ZeroDivisionError), ledger.writing():
            ledger.put(key(0), 0)
            raise ZeroDivisionError
        with ledger.writing():
            ledger.put(key(1), 1)
            ledger.put(key(2), 2)
        assert ledger.keys() == [key(1), key(2)]


WRITER = """
import hashlib, os, sys
from onetrunk.utils.ledger import Ledger
ledger = Ledger(sys.argv[1])
for i in range(10**6):
    ledger.put(hashlib.sha256(str(i).encode()).hexdigest(), "x" * (i % 700))
    os.write(1, f"{i}\\n".encode())
"""


def test_kill_9_loses_nothing_that_was_put_and_only_then_lets_a_second_process_in(tmp_path):
    path = tmp_path / "ledger.db"
    for killed_after in (1, 1500):
        command = [sys.executable, "-c", WRITER, str(path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())
        for _ in range(killed_after):
            last = int(writer.stdout.readline())
        with pytest.raises(RuntimeError, match="ledger.db cannot be used .*locked.*end the process that uses it"):
            Ledger(path)
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        last = int(rest[-1]) if rest else last
        with Ledger(path) as ledger:
            assert ledger.get(key(last)) == "x" * (last % 700)


@pytest.mark.parametrize("damage", ["text", "cut"])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path, damage):
    path = tmp_path / "ledger.db"
    with Ledger(path) as ledger, ledger.writing():
        for number in range(500):
            ledger.put(key(number), "x" * 100)
    path.write_bytes(b"a text\n" * 1000 if damage == "text" else path.read_bytes()[:20_000])
    with pytest.raises(RuntimeError, match="ledger.db cannot be used .*; if it is damaged, restore a copy or delete"):
        with Ledger(path) as ledger:
            for number in range(500):
                ledger.get(key(number))


def test_a_full_disk_loses_what_did_not_fit_and_nothing_else(tmp_path):
    code = """
import resource, signal, sys
from onetrunk.utils.ledger import Ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = Ledger(sys.argv[1])
ledger.put("a" * 64, "small")
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    ledger.put("b" * 64, "large" * 100_000)
except RuntimeError as error:
    print("if the disk is full, free some space" in str(error))
ledger.put("c" * 64, "small again")
"""
    assert python("-c", code, tmp_path / "l").stdout.strip() == "True"
    with Ledger(tmp_path / "l") as ledger:
        assert ledger.keys() == ["a" * 64, "c" * 64]


def test_an_answer_that_nests_too_deeply_is_neither_kept_nor_read(tmp_path):
    deep = functools.reduce(lambda inner, _: [inner], range(100_000), "answer")
    with Ledger(tmp_path / "ledger.db") as ledger:
        with pytest.raises(ValueError, match="is not JSON"):
            ledger.put(key(1), deep)
        with ledger.writing() as database:
            row = bytes.fromhex(key(2)), b"[" * 100_000
            database.execute("INSERT INTO answers (key, value) VALUES (?, ?)", row)
        with pytest.raises(RuntimeError, match="holds an answer that is not JSON .nested too deeply"):
            ledger.get(key(2))
