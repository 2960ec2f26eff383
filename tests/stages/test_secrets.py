"""Log records, warnings and stack traces of a stage hold no secret; secrets are refused as settings."""

import logging
import sys
import threading
import warnings

import pytest

from onetrunk.stages.eval import parse_eval
from onetrunk.stages.options.reading import UsageError
from onetrunk.stages.pipeline import load_pipeline
from onetrunk.stages.ppo import parse_ppo
from onetrunk.stages.run_context import secrets_redacted
from onetrunk.stages.sft import parse_sft
from tests.processes import python

CANARY = "canary-of-a-log-4711"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", CANARY)


def logged(log):
    """Return what a handler with a plain formatter writes of what `log` tells a logger."""
    stream, lines = logging.StreamHandler(), []
    stream.emit = lambda record: lines.append(stream.format(record))
    logger = logging.getLogger("a.library.of.others")
    logger.addHandler(stream)
    try:
        with secrets_redacted():
            log(logger)
    finally:
        logger.removeHandler(stream)
    return "\n".join(lines)


def raise_canary():
    raise RuntimeError(f"no access with {CANARY}")


def test_a_log_record_is_redacted_in_message_arguments_and_stack_trace():
    def log(logger):
        logger.warning("token %s of %d", CANARY, 3)
        logger.error(f"plain {CANARY}")
        logger.warning({"a mapping": CANARY})
        logger.warning("does not fit: %d rows", CANARY)
        try:
            raise_canary()
        except RuntimeError:
            logger.exception("it failed")

    said = logged(log)
    assert CANARY not in said and said.count("<redacted HF_TOKEN>") == 5
    assert "token <redacted HF_TOKEN> of 3" in said and "in raise_canary" in said


def test_a_warning_and_an_error_in_a_thread_are_redacted(capsys):
    with secrets_redacted():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            text = warnings.formatwarning(f"old name {CANARY}", UserWarning, "file.py", 1)
        thread = threading.Thread(target=raise_canary)
        thread.start()
        thread.join()
    err = capsys.readouterr().err
    assert CANARY not in text + err and "no access with <redacted HF_TOKEN>" in err


def hooks():
    shown = logging.getLogRecordFactory(), warnings.formatwarning
    return *shown, threading.excepthook, sys.excepthook, sys.unraisablehook


def test_everything_is_as_it_was_afterwards():
    before = hooks()
    with pytest.raises(KeyError), secrets_redacted():
        raise KeyError("x")
    assert hooks() == before


OWN_CLASSES = """
import os, sys
from onetrunk.stages.run_context import run_stage
token = os.environ["HF_TOKEN"]
class Own(Exception): pass
class Bare(BaseException): pass
class Dying:
    def __del__(self): raise Own("deleted " + token)
def chained():
    error = Own("second")
    error.add_note("noted " + token)
    try: raise KeyError(token)
    except KeyError as cause: raise error from cause
def group(): raise BaseExceptionGroup("several " + token, [Bare("one " + token), ExceptionGroup("in", [Own(token)])])
def deleted():
    Dying()
    raise Own("after it")
def work(): {name}()
sys.exit(run_stage("ppo", lambda argv: (), work, []))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chained", "group", "deleted"])
def test_an_error_of_a_class_of_ones_own_leaves_no_secret_on_any_way_out(name):
    run = python("-c", OWN_CLASSES.replace("{name}", name), code=1)
    assert f"in {name}" in run.stderr
    assert CANARY not in run.stderr + run.stdout and "<redacted HF_TOKEN>" in run.stderr


@pytest.mark.parametrize(
    ("parse", "words", "remedy"),
    [
        (parse_sft, ["--hub_token", CANARY], "HF_TOKEN, or run `hf auth login`"),
        (parse_sft, [f"--hub-token={CANARY}"], "HF_TOKEN, or run `hf auth login`"),
        (parse_eval, ["--judge_api_key", CANARY], "judge_api_key_env"),
    ],
)
def test_a_secret_on_a_command_line_is_refused_and_not_repeated(parse, words, remedy):
    with pytest.raises(UsageError, match="visible to all users") as caught:
        parse(["--output_dir", "x", *words])
    assert CANARY not in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("line", [f"hub_token: {CANARY}", f"model_init_kwargs: {{token: {CANARY}}}"])
def test_a_secret_in_a_recipe_is_refused_with_its_line_and_not_repeated(tmp_path, line):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output_dir: x\n{line}\n")
    with pytest.raises(UsageError, match=r"recipe\.yaml line 2: .*(HF_TOKEN|hf auth login)") as caught:
        parse_ppo(["--config", str(recipe)])
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        f"{{script: s.py, outputs: [o], options: {{api_key: {CANARY}}}}}",
        f"{{script: s.py, outputs: [o], launcher: env HF_TOKEN={CANARY} accelerate launch}}",
    ],
)
def test_a_secret_in_a_pipeline_is_refused_and_not_repeated(empty_folder, entry):
    (empty_folder / "s.py").write_text("")
    (empty_folder / "p.yaml").write_text(f"output_dir: out\nstages:\n  one: {entry}\n")
    with pytest.raises(UsageError, match="visible to all users") as caught:
        load_pipeline("p.yaml")
    assert CANARY not in str(caught.value)
