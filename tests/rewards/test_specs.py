"""Every text in `reward_funcs` is of one kind, and a kind is one file and one line of the table."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from onetrunk import rewards
from onetrunk.ppo.setup import ModelInputs, resolve_rewards
from onetrunk.rewards import resolve_reward, specs
from onetrunk.rewards.specs import KINDS, Kind, read_spec
from tests.processes import python

PACKAGE = Path(specs.__file__).parents[1]
TEXTS = {
    "http://127.0.0.1:8000/classify#model=m": "server",
    "https://scores.example.com/rate": "server",
    "prm:owner/model#separator=%0A": "process reward model",
    "prm:": "process reward model",
    "owner/reward-model": "reward model",
    "./a/missing/folder": "reward model",
    "judge": "judge",
    "my_reward": "function",
    "package.module.name": "function",
    "rewards.py": "function",
    "folder/rewards.py": "function",
    "folder/rewards.py:one": "function",
    "think_format_reward": "function",
}


@pytest.mark.parametrize(("text", "kind"), TEXTS.items())
def test_a_text_is_of_one_kind(text, kind):
    assert read_spec(text).kind.name == kind


def test_a_folder_is_a_model_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("judge", "my_reward", "a.b"):
        (tmp_path / name).mkdir()
        assert read_spec(name).kind.is_model
    assert read_spec(str(tmp_path)).kind.is_model


def test_a_text_of_no_form_is_answered_with_all_forms_but_that_of_functions():
    with pytest.raises(ValueError, match="nor a process reward model: 'prm:NAME'") as error:
        resolve_reward("my_reward")
    assert all(kind.form in str(error.value) for kind in KINDS[:-1])


def test_a_new_kind_is_a_file_and_a_line(tmp_path, monkeypatch):
    """A kind for texts such as longest:20, as someone would add it."""
    (tmp_path / "longest.py").write_text(
        "def load(text, policy):\n"
        "    most = int(text.removeprefix('longest:'))\n"
        "    return lambda completions, **columns: [float(len(c) <= most) for c in completions]\n"
    )
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    line = Kind("limit", "'longest:NUMBER'", lambda text: text.startswith("longest:"), "longest:load")
    monkeypatch.setattr(specs, "KINDS", (line, *KINDS))
    tokenizer = SimpleNamespace()
    [reward] = resolve_rewards(ModelInputs("base", "longest:3"), "cpu", "base", tokenizer)
    assert reward(completions=["abc", "abcd"]) == [1.0, 0.0]
    assert resolve_reward("longest:4")(completions=["abcd"]) == [1.0]


def test_the_grammar_is_in_one_place_and_reading_it_imports_no_torch():
    for path in (path for path in PACKAGE.rglob("*.py") if path.name != "specs.py"):
        assert '"prm:"' not in path.read_text(), path
    code = "import sys; from onetrunk.rewards.specs import read_spec; read_spec('a/b'); print('torch' in sys.modules)"
    assert python("-c", code).stdout.strip() == "False"
