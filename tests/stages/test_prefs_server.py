"""`onetrunk prefs` with a judge behind HTTP that does not answer as it should, through the command line."""

import pytest

from tests.feedback import runs
from tests.judges.stub_server import StubServer, completion
from tests.stages.small_runs import statistics


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = runs.make_inputs(tmp_path_factory.mktemp("inputs"), num_prompts=12)
    runs.write_recipe(folder, judge_model="judge-1")
    return folder


@pytest.fixture
def prefs(inputs, empty_folder):
    """Return a function that runs the verb in an empty folder, with a server as its judge."""
    return lambda stub, *options, out="out": runs.prefs(inputs, "--judge", stub.url, *options, out=out)


@pytest.fixture(scope="module")
def sound(inputs, tmp_path_factory):
    """Return the folder of a run whose judge answered every question."""
    folder = tmp_path_factory.mktemp("sound") / "out"
    with StubServer() as stub:
        assert runs.prefs(inputs, "--judge", stub.url, out=folder) == 0
    return folder


def rows(folder):
    return (folder / "data/preferences.jsonl").read_bytes()


# The first of the prompts.
PROMPT = f"{runs.WORDS[0]} {runs.WORDS[11]}"
REFUSAL = completion("judge-1", "I'm sorry, but I can't help with that.")


def test_a_server_that_wrote_no_verdicts_stops_the_run_and_is_asked_again(prefs, sound, tmp_path, capsys):
    with StubServer() as stub:
        stub.replies_instead = lambda body: None if "random" in str(body) else REFUSAL
        capsys.readouterr()
        assert prefs(stub) == 1
        said = capsys.readouterr().err
        assert "a reply without a verdict, past max_failed_fraction 0.1" in said and "replies are not labels" in said
        stub.replies_instead = lambda body: None
        assert prefs(stub) == 0
    assert rows(tmp_path / "out") == rows(sound)
    assert statistics(tmp_path / "out") == statistics(sound)
    assert statistics(tmp_path / "out")["counts"]["abstained"] == 0


def test_a_prompt_that_the_server_refuses_stops_nothing_and_is_asked_again(prefs, sound, tmp_path, capsys):
    # All pairs of the prompt are in one chunk: a quarter of the first questions.
    with StubServer() as stub:
        stub.status_instead = lambda body: 400 if PROMPT in str(body["messages"]) else 200
        assert prefs(stub) == 0
        said, found = capsys.readouterr().out, statistics(tmp_path / "out")
        # 3 pairs in both orders under two principles.
        assert found["judge"]["refused"] == found["judge"]["errors"] == 12
        assert found["counts"]["unjudged"] == 3 and found["counts"]["abstained"] == 0
        assert "the judge refused 12 questions" in said and "3 pairs have no verdict yet" in said
        assert "The judge refused 12 questions" in (tmp_path / "out/README.md").read_text()
        stub.status_instead = lambda body: 200
        assert prefs(stub) == 0
    assert rows(tmp_path / "out") == rows(sound)
