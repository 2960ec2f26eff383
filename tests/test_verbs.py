"""A verb is one record: nothing else in the source knows a list of verbs, and a new record with its module works."""

import ast
import re
from pathlib import Path

import pytest

from onetrunk import cli, verbs
from onetrunk.report.runs import read_run
from onetrunk.stages.options.table import load_options
from onetrunk.stages.pipeline import load_pipeline
from onetrunk.verbs import VERBS, Verb
from tests.stages.recipes import ROOT, load_module

PACKAGE = ROOT / "src/onetrunk"
# Words that a table, a comparison or a text may share with the verbs by chance.
FEW = 2
MODULE = '''"""A stage that writes its text to a file."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onetrunk.stages.arguments import parse
from onetrunk.utils.options import option


@dataclass
class EchoArguments:
    text: str | None = option(None, "What is written.")
    output_dir: str | None = option(None, "Folder for the file.")


def run(args):
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "echo.txt").write_text(args.text)


def dry_run(args):
    print(f"would write {args.text}")


parse_echo = partial(parse, verb="echo", dataclass_types=(EchoArguments,))
'''
ECHO = Verb(
    "echo",
    "write a text to a file",
    "guest_stages.echo",
    dry_run="guest_stages.echo:dry_run",
    needed={"text": "hello", "output_dir": "runs/echo"},
    known_by="echo.txt",
)


def lists_of_verbs(source: str) -> list[int]:
    """Return the lines of a source text with a list of verbs: a literal, a text of words, or comparisons in a row."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Dict(keys=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                words = [part.value for part in parts if isinstance(part, ast.Constant)]
            case ast.Constant(value=str(text)):
                words = text.split() if set(text.split()) <= VERBS.keys() else []
            case ast.FunctionDef() | ast.Match():
                tests = [n for n in ast.walk(node) if isinstance(n, ast.Compare | ast.MatchValue)]
                words = [n.value for test in tests for n in ast.walk(test) if isinstance(n, ast.Constant)]
            case _:
                continue
        if len(VERBS.keys() & {word for word in words if isinstance(word, str)}) > FEW:
            found.add(node.lineno)
    return sorted(found)


def test_every_fact_about_verbs_is_in_their_records():
    files = [path for path in PACKAGE.rglob("*.py") if path != Path(verbs.__file__)]
    lists = {str(path.relative_to(PACKAGE)): lists_of_verbs(path.read_text()) for path in files}
    assert {name: lines for name, lines in lists.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        'NEEDED = {"sft": 1, "ppo": 2, "eval": 3}',
        'TRAININGS = ("sft", "reward", "ppo")',
        'NAMES = "sft reward ppo".split()',
        'def f(verb):\n    if verb == "sft":\n        return 1\n    return 2 if verb == "ppo" else verb in ("eval",)',
    ],
)
def test_a_table_or_a_chain_of_verbs_is_noticed(source):
    assert lists_of_verbs(source)


@pytest.fixture
def echo(empty_folder, monkeypatch):
    """Add a verb as CONTRIBUTING says: its record and its module."""
    package = empty_folder / "guest_stages"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "echo.py").write_text(MODULE)
    monkeypatch.syspath_prepend(empty_folder)
    monkeypatch.setitem(VERBS, "echo", ECHO)
    load_options.cache_clear()


def said(capsys, *words: str) -> str:
    """Run a command that must succeed; return what it prints, in one line."""
    code = cli.main(words)
    out, err = capsys.readouterr()
    assert code == 0, err
    return re.sub(r"\s+", " ", out)


def test_a_record_and_a_module_are_all_that_a_new_verb_needs(echo, tmp_path, capsys):
    assert "echo write a text to a file" in said(capsys, "--help")
    text = said(capsys, "echo", "--help")
    assert "--text What is written." in text and "--dry_run" in text
    assert cli.main(["config", "echo"]) == 0
    (tmp_path / "echo.yaml").write_text(capsys.readouterr().out)
    assert said(capsys, "echo", "--config", "echo.yaml", "--dry_run") == "would write hello "
    assert not (tmp_path / "runs").exists()
    assert cli.main(["echo", "--config", "echo.yaml", "--txt", "hi"]) == 2
    assert "did you mean 'text'?" in capsys.readouterr().err
    assert said(capsys, "echo", "--config", "echo.yaml", "--text", "hi") == ""
    assert (tmp_path / "runs/echo/echo.txt").read_text() == "hi"
    (tmp_path / "chain.yaml").write_text("output_dir: runs/chain\nstages: {echo: {config: echo.yaml}}\n")
    assert load_pipeline("chain.yaml").stages[0].settings["text"] == "hello"
    assert "never ran" in said(capsys, "run", "chain.yaml", "--dry-run")
    (tmp_path / "runs/echo/metrics.json").write_text('{"written": 1}')
    assert read_run("runs/echo").verb == "echo"
    assert "report.html" in said(capsys, "report", "runs/echo")


def test_the_site_has_a_page_for_a_new_verb(echo):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; `make setup` installs it")
    page = load_module(ROOT / "scripts/site/pages.py")._options_page("echo")
    assert page.startswith("# echo\n\nWrite a text to a file.\n") and "`text`" in page
