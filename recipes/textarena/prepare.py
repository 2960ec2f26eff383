"""Write games of an imperfect player for SFT, and the seeds of the games that PPO and the evaluation play.

    python recipes/textarena/prepare.py

Everything is written below `runs/textarena`: sft.jsonl (conversations), prompts.jsonl and held_out.jsonl (seeds alone:
the environment's `reset` says the prompt). No seed is in two of the files.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from onetrunk.utils.files import atomic_write_text, require_output_dir

HELD_OUT_SEEDS, SFT_SEEDS, PPO_SEEDS = range(100), range(100, 180), range(1000, 1768)
# How often the player remembers the hints. Otherwise it names any number that it did not name before.
REMEMBERS = 0.4


def play(seed, rng):
    """Return a game as a conversation. Its last message is the player's last guess."""
    import game

    table, is_over = game.GuessTheNumber(), False
    text, _ = table.reset(seed=seed)
    messages, left = [], set(range(1, game.GAME["max_number"] + 1))
    possible = set(left)
    while not is_over:
        guess = rng.choice(sorted(possible if rng.random() < REMEMBERS else left))
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": f"[{guess}]"}]
        text, _, is_over, _, _ = table.step(f"[{guess}]")
        left -= {guess}
        possible = {number for number in possible & left if (number > guess) == ("higher" in text)}
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output_dir", default="runs/textarena", help="folder to write to (%(default)s)")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    rng = random.Random(0)
    try:
        folder = require_output_dir(args.output_dir)
        games = [{"messages": play(seed, rng)} for seed in SFT_SEEDS]
    except (ImportError, OSError, ValueError) as error:
        needed = "; pip install textarena" if isinstance(error, ImportError) else ""
        print(f"error: {error}{needed}", file=sys.stderr)
        return 1
    seeds = {"prompts": PPO_SEEDS, "held_out": HELD_OUT_SEEDS}
    files = {"sft": games} | {name: [{"seed": seed} for seed in made] for name, made in seeds.items()}
    for name, rows in files.items():
        atomic_write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} rows in {folder / name}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
