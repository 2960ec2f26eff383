"""`onetrunk chat` on a small adapter: answers to piped lines, with numbers, next to the model before training."""

import io

import pytest
import torch

from onetrunk import cli
from onetrunk.models.build import build_trunk
from tests.models.reward_adapters import saved_base
from tests.ppo.support import lora
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


@pytest.fixture
def there(empty_folder):
    """Return a working folder with a base, and a trunk's adapter on it that always says "yes" twice and stops."""
    saved_base("base", num_hidden_layers=2)
    trunk = build_trunk("base", lora())
    torch.nn.init.constant_(trunk.value_head.linear.bias, 0.25)
    trunk.save_pretrained("adapter")
    (empty_folder / "rewards.py").write_text(
        "def words(prompts, completions, **kwargs):\n    return [float(len(text.split())) for text in completions]\n"
    )
    return empty_folder


def chat(monkeypatch, capsys, text, *words):
    monkeypatch.setattr("sys.stdin", text and io.StringIO(text))
    code = cli.main(["chat", *words])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_every_line_is_answered_with_score_and_value_by_the_policy_and_by_the_model_before(there, monkeypatch, capsys):
    words = ["adapter", "--compare", "--reward_funcs", "rewards.py:words", "--max_completion_length", "3"]
    code, lines, err = chat(monkeypatch, capsys, "a dog\n\nthe sun\n", *words, "--temperature", "0")
    assert code == 0, err
    answers = [line for line in lines if line.startswith(("[policy] ", "[before] "))]
    assert [line[:8] for line in answers] == ["[policy]", "[before]"] * 2
    # The new adapter is 0, so both sides are the same model, and greedy.
    assert answers[0][9:] == answers[1][9:] and answers[2][9:] == answers[3][9:]
    numbers = [line.strip() for line in lines if line.strip().startswith("(")]
    assert numbers[0] == f"(words {len(answers[0][9:].split())}, value 0.25)" and len(numbers) == 4


def test_a_giant_line_and_half_a_character_do_not_end_the_conversation(there, monkeypatch, capsys):
    text = "a " * 5_000_000 + "\na \ud800 dog\nthe sun\n"
    code, lines, err = chat(monkeypatch, capsys, text, "adapter", "--max_completion_length", "2")
    assert code == 0 and "more than 100,000 characters" in err, err
    assert sum("value" in line for line in lines) == 2


def test_a_line_that_fails_is_one_message_and_the_next_one_is_answered(there, monkeypatch, capsys):
    (there / "picky.py").write_text(
        "def picky(prompts, **kwargs):\n    return [1.0 / (prompts[0][-1]['content'] != 'a dog') for _ in prompts]\n"
    )
    for folder in ("base", "adapter"):
        tokenizer = tiny_tokenizer()
        refusal = "{% if messages[-1]['content'] == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
        tokenizer.chat_template = refusal + CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)
    words = ["adapter", "--reward_funcs", "picky.py:picky", "--max_completion_length", "2"]
    code, lines, err = chat(monkeypatch, capsys, "a dog\nbad\n" + "a cat " * 200 + "\nthe sun\n", *words)
    assert code == 0 and "Traceback" not in err, err
    for reason in ("picky", "no bad words", "tokens and the model 128 positions"):
        assert err.count(reason) == 1, err
    assert err.count("the conversation continues") == 3
    assert sum("(picky 1, value" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, ["adapter"], "there is no standard input"),
        ("a\n", [], "no model is named; write onetrunk chat FOLDER"),
        ("a\n", ["base", "--compare"], "compare is set and base is not an adapter"),
        ("a\n", ["absent"], "absent"),
        ("a\n", ["adapter", "--temperature", "-1"], "temperature must be 0 or more"),
        ("a\n", ["adapter", "--reward_funcs", "nothing.py:f"], "nothing.py"),
    ],
)
def test_what_cannot_be_talked_to_says_why(there, monkeypatch, capsys, text, words, message):
    code, _, err = chat(monkeypatch, capsys, text, *words)
    assert code in (1, 2) and message in err and "Traceback" not in err
