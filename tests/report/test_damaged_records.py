"""`onetrunk report` of a run with a damaged file ends with a page or with one message."""

import json
import os
import random

import pytest

from onetrunk import cli
from tests.report.made_runs import write_judge_run, write_lines, write_pipeline, write_ppo_run, write_preferences

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
# What stands in the place of a value.
WRONG = (None, "x", -1, float("nan"), float("inf"), [], ["x"], {}, {"x": "y"}, True)


def write_small_run(folder):
    """Write a PPO run with one plot, which takes most of the time of a page."""
    write_ppo_run(folder)
    kept = {"event", "name", "text", "step", "time", "num_gpus", "num_processes", "score/mean", "alarm/kl"}
    path = folder / "_report" / "log.jsonl"
    log = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [{name: value for name, value in entry.items() if name in kept} for entry in log])
    return folder


def write_small_chain(folder):
    chain = write_pipeline(folder)
    write_small_run(folder / "ppo")
    return chain


def write_evaluation(folder):
    """Write an evaluation that is a stage of a pipeline, with its pairs."""
    write_small_chain(folder)
    pair = {"prompt": "p", "opponent": "o", "policy": "x", "outcome": "loss", "probability": 0.1}
    write_lines(folder / "eval" / "pairs.jsonl", [pair, pair])
    return folder / "eval"


def write_checkpoints(folder):
    """Write a run without a record: the log in its checkpoint."""
    (folder / "checkpoint-8").mkdir(parents=True)
    log = [{"step": step, "score/mean": step / 10, "time": 1.0 * step} for step in range(1, 9)]
    (folder / "checkpoint-8" / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    return folder


RUNS = {"ppo": write_small_run, "run": write_small_chain, "eval": write_evaluation, "checkpoint": write_checkpoints}
RUNS |= {"judge": write_judge_run, "prefs": write_preferences}


def places(value, at=()):
    """Return the paths of all values in a JSON value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, part in parts for path in places(part, (*at, key)))]


def replaced(value, at, new):
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


def damages(content, draws, count):
    """Yield the names and contents of damages of a file: fixed ones, and `count` of each kind that is drawn."""
    yield from (CONTENTS | {"missing": None, "cut": content[: len(content) // 2]}).items()
    lines = content.splitlines(keepends=True)
    for _ in range(count):
        flipped, place = bytearray(content), draws.randrange(len(content))
        flipped[place] ^= 1 << draws.randrange(8)
        yield f"bit flip in byte {place}", bytes(flipped)
        index = draws.randrange(len(lines))
        value = json.loads(lines[index])
        at, new = draws.choice(places(value)), draws.choice(WRONG)
        wrong = json.dumps(replaced(value, at, new)).encode() + b"\n"
        yield f"line {index}, {at}: {new}", b"".join([*lines[:index], wrong, *lines[index + 1 :]])


@pytest.mark.parametrize(("count", "step"), [(1, 13), pytest.param(8, 1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("kind", RUNS)
def test_a_damaged_file_of_a_record_gives_a_page_or_one_message(tmp_path, capsys, kind, count, step):
    """Every file of a run in turn has `count` damages of each drawn kind; of all damages every `step`-th is tried."""
    draws, run = random.Random(kind), RUNS[kind](tmp_path / "sound")
    contents = {path: path.read_bytes() for path in sorted((tmp_path / "sound").rglob("*.json*"))}
    every = [(path, *damage) for path, content in contents.items() for damage in damages(content, draws, count)]
    for path, name, damaged in every[::step]:
        path.unlink() if damaged is None else path.write_bytes(damaged)
        code = cli.main(["report", str(run)])
        err = capsys.readouterr().err
        assert code == 0 or (code == 1 and err.count("error: ") == 1 and "Traceback" not in err), (path, name, err)
        path.write_bytes(contents[path])


def test_pipes_and_folders_in_the_place_of_files_are_passed_over(tmp_path):
    run = write_small_run(tmp_path / "run")
    os.mkfifo(run / "picture.png")
    (run / "_report" / "run.json").unlink()
    (run / "_report" / "run.json").mkdir()
    (run / "_report" / "log.jsonl").unlink()
    os.mkfifo(run / "_report" / "log.jsonl")
    assert cli.main(["report", str(run)]) == 0
