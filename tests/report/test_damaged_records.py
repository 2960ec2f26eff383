"""`onetrunk report` of a run with a damaged file ends with a page or with one message."""

import os

import pytest

from onetrunk import cli
from tests.report.made_runs import write_ppo_run

FILES = ["_report/log.jsonl", "_report/run.json", "_report/completions-after.jsonl", "_finished.json", "metrics.json"]
CONTENTS = {
    "empty": b"",
    "list": b"[1, 2]",
    "text": b'"text"',
    "numbers": b'{"step": "x", "prompt": 1, "score": [], "event": "alarm", "policy": 3, "settings": [], "ended": 5}',
    "NaN": b'{"step": NaN, "score/mean": NaN, "time": NaN, "planned_steps": NaN}',
    "huge": b'{"step": 1' + b"0" * 400 + b', "time": 1e400}',
    "deep": b"[" * 100_000,
    "bytes": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_record_gives_a_page_or_one_message(tmp_path, capsys, name, content):
    run = write_ppo_run(tmp_path / "run")
    (run / name).write_bytes(content)
    code = cli.main(["report", str(run)])
    err = capsys.readouterr().err
    assert code in (0, 1) and "Traceback" not in err
    assert code == 0 or err.count("error: ") == 1


def test_pipes_and_folders_in_the_place_of_files_are_passed_over(tmp_path):
    run = write_ppo_run(tmp_path / "run")
    os.mkfifo(run / "picture.png")
    (run / "_report" / "log.jsonl").unlink()
    os.mkfifo(run / "_report" / "log.jsonl")
    assert cli.main(["report", str(run)]) == 0
