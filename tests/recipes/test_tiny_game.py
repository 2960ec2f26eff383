"""tiny-game: the grid by hand, its rows, and the chain from random walks to a policy that arrives more often."""

import json
import re

import pytest

from onetrunk import cli
from tests.stages.recipes import load_recipe_module

game = load_recipe_module("tiny-game", "game")


def test_a_walk_by_hand():
    grid = game.Grid()
    assert grid.reset(seed=0, options={"prompt": "from 1 3 to 3 2\n"}) == ("", {})
    # Stones at (2, 3) and above: right leads nowhere. The way is down, right, right.
    assert grid.step("right\n") == ("1 3\n", 0.0, False, False, {})
    assert grid.step("down") == ("1 2\n", 0.1, False, False, {})
    assert grid.step("left\n") == ("0 2\n", -0.1, False, False, {})
    assert [grid.step("right")[1] for _ in range(2)] == [0.1, 0.1]
    assert grid.step("right") == ("3 2\n", 1.1, True, False, {})


def test_the_walk_ends_after_12_moves_and_other_words_lead_nowhere():
    grid = game.Grid()
    grid.reset(options={"prompt": "from 0 0 to 4 4\n"})
    steps = [grid.step(move) for move in ["fly", "", "down\n", *["up"] * 9]]
    assert [step[0] for step in steps[:4]] == ["0 0\n"] * 3 + ["0 1\n"]
    assert [step[3] for step in steps] == [False] * 11 + [True]


def test_distances_go_round_the_wall():
    found = game.distances((4, 0))
    assert len(found) == 21 and found[(4, 0)] == 0 and found[(3, 0)] == 1
    assert found[(0, 0)] == 8  # Two up, four right, two down.


def test_arrivals_are_read_from_a_whole_episode():
    prompts = ["from 1 3 to 3 2\n"] * 3
    texts = ["down\n1 2\nright\n2 2\nright", "down\n1 2\nright\n2 2\nleft", ""]
    assert game.arrived(prompts, texts) == [1, 0, 0]


def test_held_out_pairs_are_in_no_other_file_and_walks_are_true_to_the_rules(tmp_path):
    folder = game.make_all(tmp_path, num_walks=20)
    files = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("sft", "prompts", "held_out")}
    rows = {name: [json.loads(line) for line in lines] for name, lines in files.items()}
    held_out = {row["prompt"] for row in rows["held_out"]}
    # 21 places: 420 pairs, a fifth of them held out.
    assert len(held_out) == 84 and len(rows["prompts"]) == 336
    assert not held_out & {row["prompt"] for row in rows["sft"] + rows["prompts"]}
    for row in rows["sft"]:
        grid = game.Grid()
        grid.reset(options=row)
        lines = re.findall(r"[a-z]+\n|\d \d\n", row["completion"])
        for move, observation in zip(lines[::2], [*lines[1::2], None], strict=True):
            assert grid.step(move)[0] == observation or observation is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_chain_teaches_the_policy_to_arrive(workplace):
    assert cli.main(["run", "recipes/tiny-game/pipeline.yaml"]) == 0
    metrics = json.loads((workplace / "runs/tiny-game/eval/metrics.json").read_text())
    assert metrics["policy"]["score/arrived"] > metrics["reference"]["score/arrived"] + 0.2
