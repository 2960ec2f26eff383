"""textarena: a game by hand, the rows, and the chain on the pretrained model."""

import json

import pytest
from transformers import AutoTokenizer

from tests.recipes.pretrained import run_chain
from tests.stages.recipes import load_recipe_module

# Not a dev dependency: it brings nltk, chess and websockets, and one recipe alone needs it.
pytest.importorskip("textarena", reason="pip install textarena")

NAME = "textarena"
game = load_recipe_module(NAME, "game")


def play(guesses, seed=3):
    table = game.GuessTheNumber()
    prompt, info = table.reset(seed=0, options={"seed": seed})
    assert "between 1 and 10" in prompt and info == {}
    return table, [table.step(guess) for guess in guesses]


def number_of(seed):
    table, _ = play([], seed)
    return table.game.state.game_state["game_number"]


def test_a_game_by_hand():
    number = number_of(3)
    below = [f"[{number - 1}]"] if number > 1 else []
    table, steps = play([*below, f"[{number}]"])
    assert [step[0] for step in steps[:-1]] == ["The target number is higher."] * len(below)
    assert steps[-1][1:] == (1, True, False, {})
    assert game.won([table], prompts=None) == [1.0]


def test_a_lost_game_earns_how_near_its_last_guess_was():
    number = number_of(3)
    guesses = [guess for guess in range(1, 11) if guess != number][:4]
    table, steps = play([f"[{guess}]" for guess in guesses])
    # textarena grants one guess more than max_turns.
    assert [step[2] for step in steps] == [False] * 3 + [True]
    assert [step[1] for step in steps] == [0.0] * 3 + [pytest.approx(1 - abs(guesses[-1] - number) / 9)]
    assert game.won([table]) == [0.0]


def test_the_seed_of_the_row_chooses_the_number():
    assert [number_of(seed) for seed in range(5)] == [number_of(seed) for seed in range(5)]
    assert len({number_of(seed) for seed in range(100)}) == 10


# Of each stage: enough to run through all of it.
SIZES = {
    "sft": "--max_steps 1 --per_device_train_batch_size 2",
    "ppo": "--num_rollouts 2 --rollout_batch_size 4 --eval_dataset_split train[:2]",
    "eval": "--dataset_split train[:4]",
}


@pytest.mark.slow
def test_the_chain_runs_on_the_pretrained_model(workplace, monkeypatch, capsys):
    metrics = run_chain(NAME, SIZES, monkeypatch, capsys)
    assert {"score/won", "score/GuessTheNumber"} <= set(metrics["policy"])
    runs = workplace / "runs"
    rows = [json.loads(line) for line in (runs / NAME / "sft.jsonl").read_text().splitlines()]
    shown = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(rows[0]["messages"], tokenize=False)
        for folder in (runs / "smollm2-135m-cpu/base", runs / NAME / "sft")
    ]
    assert shown[0] == shown[1]
