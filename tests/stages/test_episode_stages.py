"""`onetrunk ppo` and `onetrunk eval` with tools and environments from a file."""

from pathlib import Path

import pytest
import yaml

from onetrunk import cli
from tests.chat import CHAT_VOCAB, END, chat_tokenizer
from tests.stages.small_runs import error_of, metrics, read_rows, run, words_of, write_rows
from tests.tiny import tiny_model

GAME = '''
class Nouns:
    """Three turns of one to four tokens; a turn with the word cat in it has the reward 1."""

    def reset(self, *, seed=None, options=None):
        self.turn = 0
        return "", {}

    def step(self, action):
        self.turn += 1
        return " the", float("cat" in action), self.turn == 3, False, {}

    def __init__(self):
        note("made")

    def close(self):
        note("closed")


def note(word):
    with open("notes.txt", "a") as file:
        file.write(word + "\\n")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a + b


class Silent:
    def reset(self, **row): ...

    def look(self) -> str:
        """Look."""
        return ""
'''


@pytest.fixture
def material(own_material):
    (own_material / "game.py").write_text(GAME)
    return own_material


def command(verb, **settings):
    """Return the words of a stage with settings in a YAML file, and without reward functions."""
    words = words_of(verb)
    at = words.index("--reward_funcs")
    del words[at : at + 2]
    Path(f"{verb}.yaml").write_text(yaml.safe_dump(settings))
    return [*words, "--config", f"{verb}.yaml", "--max_completion_length", "16"]


STOPS = ["cat", "dog", "the", "runs", "a", "sees", "not", "on", "small"]


def test_rows_without_a_prompt_are_enough_for_an_environment_that_says_it(material, capsys):
    write_rows(material / "prompts.jsonl", [{"environment": "nouns"}] * 4)
    assert cli.main(command("ppo", reward_funcs=["reward.py:short"])) == 1 and "expected prompt" in error_of(capsys)
    settings = {"environment": {"nouns": "game.py:Nouns"}, "stop_tokens": STOPS}
    for verb in ("ppo", "eval"):
        assert cli.main(command(verb, **settings)) == 0


def test_an_environment_trains_and_is_evaluated_from_yaml(material):
    settings = {"environment": "game.py:Nouns", "max_turns": 5, "stop_tokens": STOPS}
    assert cli.main([*command("ppo", **settings), "--dry_run"]) == 0
    (material / "notes.txt").unlink()
    assert cli.main(command("ppo", **settings)) == 0
    assert "| rewards | the environment Nouns |" in (material / "out-ppo/README.md").read_text()
    words = command("eval", **settings)
    words[words.index("--model_name_or_path") + 1] = "out-ppo"
    assert cli.main(words) == 0
    found = metrics("out-eval")
    assert found["num_prompts"] == 8
    for side in ("policy", "reference"):
        assert found[side]["score/mean"] == found[side]["score/Nouns"]
        low, high = found[side]["score/interval"]
        assert low <= found[side]["score/mean"] <= high
    assert all("score/Nouns" in row for row in read_rows(Path("out-eval/samples-policy.jsonl")))
    notes = (material / "notes.txt").read_text().split()
    assert notes.count("closed") == notes.count("made") >= 8


def test_tools_come_from_yaml(material, capsys):
    questions = [{"prompt": [{"role": "user", "content": f"{i}+1?"}]} for i in range(8)]
    write_rows(material / "prompts.jsonl", questions)
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=CHAT_VOCAB, eos_token_id=END, bos_token_id=None)
    model.config.max_position_embeddings = 1200
    model.save_pretrained("base")
    chat_tokenizer().save_pretrained("base")
    assert cli.main([*command("ppo", tools=["game.py:add"], reward_funcs=["reward.py:short"]), "--dry_run"]) == 0
    assert "episodes: tools (add); max_turns is not set" in capsys.readouterr().out
    assert cli.main(command("ppo", environment="game.py:Silent")) == 1
    assert "give no rewards; set reward_funcs, or define get_reward" in error_of(capsys)
    assert run("ppo", "--tools", "game.py:add", "--max_tool_calling_iterations", 2) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "game.py:Verbs"}, "environment 'game.py:Verbs': game.py has no 'Verbs'; it has Nouns"),
        ({"environment": {"a": "game.py:Nouns"}}, "(environment in YAML) names several environments, and the dataset"),
        ({"environment": "http://127.0.0.1:9"}, "ImportError: http://127.0.0.1:9 needs OpenEnv's client; pip install"),
        ({"tools": ["game.py:add"]}, "reward_funcs is not set"),
        ({"environment": "game.py:Nouns", "tool_timeout": 0}, "tool_timeout is 0"),
    ],
)
def test_mistakes_are_one_message(material, capsys, settings, message):
    assert cli.main(command("ppo", **settings)) != 0
    assert message in error_of(capsys)
