"""A grid with a wall, as a Gymnasium text environment; run as a script, it makes what the recipe starts from.

    python recipes/tiny-game/game.py

The prompt names start and goal, the policy writes a move, the answer is where it stands now. Into runs/tiny-game go a
base model from scratch, random walks to learn the language of the game from (sft.jsonl), and pairs of start and goal:
prompts.jsonl and, with other pairs, held_out.jsonl.
"""

import argparse
import itertools
import json
import random
import re
import sys
from pathlib import Path

from onetrunk.models.build import BaseShape, make_base
from onetrunk.utils.files import atomic_write_text, require_output_dir

OUTPUT_DIR = "runs/tiny-game"
SIZE = 5
# A column of stones with a gap in the middle.
STONES = {(2, y) for y in range(SIZE) if y != 2}
MOVES = {"left": (-1, 0), "right": (1, 0), "down": (0, -1), "up": (0, 1)}
TURNS, ARRIVAL, NEARER = 12, 1.0, 0.1
HELD_OUT_SHARE = 0.2
SHAPE = BaseShape(vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, max_positions=128)


def moved(place, move):
    """Return where a move leads: nowhere at a stone, at the edge and for any other word."""
    dx, dy = MOVES.get(move, (0, 0))
    x, y = place[0] + dx, place[1] + dy
    return (x, y) if 0 <= x < SIZE and 0 <= y < SIZE and (x, y) not in STONES else place


def distances(goal):
    """Return the moves that each place is away from a goal."""
    found, newest = {goal: 0}, [goal]
    while newest:
        newest = list({moved(place, move) for place in newest for move in MOVES} - set(found))
        found |= {place: max(found.values()) + 1 for place in newest}
    return found


class Grid:
    """Walk from start to goal in TURNS moves. A move earns NEARER for each step nearer, and ARRIVAL at the goal."""

    def reset(self, *, seed=None, options=None):
        numbers = [int(digit) for digit in re.findall(r"\d", options["prompt"])]
        self.place, self.goal, self.turns = tuple(numbers[:2]), tuple(numbers[2:]), 0
        self.distances = distances(self.goal)
        return "", {}

    def step(self, action):
        self.turns += 1
        before, self.place = self.place, moved(self.place, action.strip())
        has_arrived = self.place == self.goal
        reward = NEARER * (self.distances[before] - self.distances[self.place]) + ARRIVAL * has_arrived
        return "{} {}\n".format(*self.place), reward, has_arrived, self.turns == TURNS, {}


def arrived(prompts, completions, completion_ids=None, **columns):
    """Return 1 where the walk ends at the goal: a reward function that is logged with weight 0."""
    scores = []
    for prompt, text in zip(prompts, completions, strict=True):
        grid = Grid()
        grid.reset(options={"prompt": prompt})
        scores.append(float(any([grid.step(move)[2] for move in re.findall(r"[a-z]+", text)])))
    return scores


def prompt_of(pair):
    """Return the prompt of a start and a goal."""
    return "from {} {} to {} {}\n".format(*pair[0], *pair[1])


def walk(rng, pair):
    """Return a random walk as the policy and the environment would write it."""
    grid, text, is_over = Grid(), "", False
    grid.reset(options={"prompt": prompt_of(pair)})
    while not is_over:
        move = rng.choice(list(MOVES))
        observation, _, *ends, _ = grid.step(move)
        is_over = any(ends)
        text += f"{move}\n" + ("" if is_over else observation)
    return text


def write_rows(path, rows):
    atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_all(output_dir=OUTPUT_DIR, seed=0, num_walks=3000):
    """Write the base model and the rows; return the folder."""
    folder, rng = require_output_dir(output_dir), random.Random(seed)
    places = [place for place in itertools.product(range(SIZE), repeat=2) if place not in STONES]
    pairs = list(itertools.permutations(places, 2))
    rng.shuffle(pairs)
    num_held_out = round(HELD_OUT_SHARE * len(pairs))
    held_out, train = pairs[:num_held_out], pairs[num_held_out:]
    walks = [{"prompt": prompt_of(pair), "completion": walk(rng, pair)} for pair in rng.choices(train, k=num_walks)]
    write_rows(folder / "sft.jsonl", walks)
    write_rows(folder / "prompts.jsonl", [{"prompt": prompt_of(pair)} for pair in train])
    write_rows(folder / "held_out.jsonl", [{"prompt": prompt_of(pair)} for pair in held_out])
    make_base([row["prompt"] + row["completion"] for row in walks], folder / "base", shape=SHAPE, seed=seed)
    return folder


def main():
    parser = argparse.ArgumentParser(description="Write the base model and the rows of the game.")
    parser.add_argument("--output_dir", default=OUTPUT_DIR, help="folder to write to (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of walks, pairs and weights (%(default)s)")
    given = parser.parse_args()
    try:
        print(f"tiny-game: wrote a base model and rows to {make_all(Path(given.output_dir), given.seed)}")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
