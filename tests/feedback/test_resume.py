"""Killed anywhere and run again: the same bytes as never killed, and nothing bought twice."""

import signal

import pytest

from onetrunk.feedback.shards import read_rows
from onetrunk.stages.prefs import sampling as prefs_sampler
from tests.feedback import runs
from tests.feedback.runs import CountingJudge, DyingBackend, files_of, in_a_process, questions_asked


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """An uninterrupted run: its folder, and the questions that it asked."""
    folder = tmp_path_factory.mktemp("whole")
    judge = CountingJudge(folder / "asked.log")
    made = runs.run(inputs, folder / "out", judge)
    asked = questions_asked(folder / "asked.log")
    assert made.num_rows > 30 and set(asked.values()) == {1}
    return folder / "out", asked


def test_a_judge_that_kills_the_process_anywhere_is_asked_nothing_twice_but_what_was_in_flight(
    inputs, whole, tmp_path
):
    out, log = tmp_path / "out", tmp_path / "asked.log"
    total = sum(whole[1].values())
    for dies_at in (1, 2, total // 3, total // 4):
        code = in_a_process(lambda at=dies_at: runs.run(inputs, out, CountingJudge(log, dies_at=at)))
        assert code == -signal.SIGKILL
        assert not list((out / "data").glob("*.jsonl"))
    assert in_a_process(lambda: runs.run(inputs, out, CountingJudge(log))) == 0
    assert files_of(out) == files_of(whole[0])
    asked = questions_asked(log)
    assert set(asked) == set(whole[1])
    # One question was in flight at each of the four deaths.
    assert sum(asked.values()) <= total + 4


def test_a_process_that_dies_while_it_samples_ends_with_the_same_file(inputs, whole, tmp_path):
    out, log = tmp_path / "out", tmp_path / "asked.log"

    def dying(at):
        DyingBackend.dies_at = at
        prefs_sampler.LocalBackend = DyingBackend
        runs.run(inputs, out, CountingJudge(log))

    for at in (1, 3, 2):
        assert in_a_process(lambda at=at: dying(at)) == -signal.SIGKILL
    assert in_a_process(lambda: runs.run(inputs, out, CountingJudge(log))) == 0
    assert files_of(out) == files_of(whole[0])
    assert sum(questions_asked(log).values()) <= sum(whole[1].values()) + 3


def test_ratings_and_verdicts_without_an_answer_leave_pairs_unjudged_and_are_asked_again(inputs, tmp_path):
    settings = {"pairing": "best_worst", "max_failed_fraction": 0.5}
    log = tmp_path / "asked.log"
    runs.run(inputs, tmp_path / "sound", CountingJudge(tmp_path / "sound.log"), **settings)
    first = runs.run(inputs, tmp_path / "out", CountingJudge(log, fails=lambda n: n % 9 == 0), **settings)
    assert first.statistics["counts"]["unjudged"] > 0
    assert first.num_rows < len(list(read_rows(tmp_path / "sound/data/preferences.jsonl")))
    asked = questions_asked(log)
    runs.run(inputs, tmp_path / "out", CountingJudge(log), **settings)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "sound")
    twice = [question for question, count in questions_asked(log).items() if count > 1]
    assert 0 < len(twice) == sum(asked.values()) // 9


def test_a_judge_that_is_down_stops_the_run_in_time_and_the_run_goes_on_when_it_is_back(inputs, whole, tmp_path):
    out, log = tmp_path / "out", tmp_path / "asked.log"
    with pytest.raises(RuntimeError, match="max_failed_fraction 0.1 .*down.*run the same command again"):
        runs.run(inputs, out, CountingJudge(log, fails=lambda n: n > 30))
    # 6 failures are more than a tenth of the first 50
    assert sum(questions_asked(log).values()) == 36
    with pytest.raises(RuntimeError, match="max_failed_fraction"):
        runs.run(inputs, out, CountingJudge(log, fails=lambda n: True))
    runs.run(inputs, out, CountingJudge(log))
    assert files_of(out) == files_of(whole[0])
