"""Output that outlives its reader and shows any text, tried in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
SCRIPT = r"""
import signal, sys
from onetrunk.utils.output import lasting_output
signal.signal(signal.SIGHUP, lambda *_: heard.append(1)) if {handled} else None
heard = []
with lasting_output():
    for line in range(20_000):
        print("caf\u00e9 \u65e5\u672c \ud83d", line)
    sys.stdout.flush()
    with open({out!r}, "w") as file:
        file.write(str(len(heard)))
"""


def run(script, *options, **env):
    command = [sys.executable, *options, "-c", script]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SOURCE), **env}
    )


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_a_reader_that_ends_is_one_hangup_and_no_error(tmp_path, options):
    process = run(SCRIPT.format(handled=True, out=str(tmp_path / "heard")), *options)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 0 and err == b""
    assert (tmp_path / "heard").read_text() == "1"


def test_without_a_handler_what_is_printed_goes_nowhere(tmp_path):
    process = run(SCRIPT.format(handled=False, out=str(tmp_path / "heard")))
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 0 and err == b""
    assert (tmp_path / "heard").read_text() == "0"


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("ascii", rb"caf\xe9 \u65e5\u672c \ud83d 0"), ("utf-8", "caf\u00e9 \u65e5\u672c ".encode() + rb"\ud83d 0")],
)
def test_text_that_the_encoding_lacks_is_shown_escaped(tmp_path, encoding, expected):
    process = run(SCRIPT.format(handled=True, out=str(tmp_path / "heard")), PYTHONIOENCODING=encoding)
    out, err = process.communicate()
    assert process.returncode == 0 and err == b"" and out.splitlines()[0] == expected


@pytest.mark.slow
def test_a_command_shows_its_table_in_ascii(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": " b"}')
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: base\ndataset_name: rows.jsonl\noutput_dir: \u00fcben/sft\n", encoding="utf-8"
    )
    (tmp_path / "p.yaml").write_text("output_dir: all\nstages:\n  sft: {config: sft.yaml}\n", encoding="utf-8")
    command = [sys.executable, "-m", "onetrunk.cli", "run", "p.yaml", "--dry-run"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert rb"\xfcben" in done.stdout and done.stdout.isascii()
