"""Write conversations of a forgetful assistant for SFT, and the seeds of those that PPO and the evaluation play.

    python recipes/remember/prepare.py

Everything is written below `runs/remember`: sft.jsonl has one context per row, as onetrunk compacts them;
prompts.jsonl and held_out.jsonl have a prompt and a seed. No seed is in two of the files.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from onetrunk.rollouts.episodes.compaction import SUMMARY
from onetrunk.utils.files import atomic_write_text, require_output_dir

sys.path.insert(0, str(Path(__file__).parent))
import talk  # noqa: E402

HELD_OUT_SEEDS, SFT_SEEDS, PPO_SEEDS = range(64), range(100, 160), range(1000, 1768)
# How often a summary has the name, and the number.
REMEMBERS = 0.5
PROMPT = [
    {"role": "system", "content": "You are a friendly assistant. Answer in one short sentence."},
    {"role": "user", "content": "Hello!"},
]
REQUEST = "Sum up in one sentence what to remember about me."
REPLIES = ("That sounds lovely.", "What a nice day!", "How funny!", "I would like that too.", "Good for you!")
# Turns of the first context, and of the others; one of them is kept in the next.
FIRST_TURNS, OTHER_TURNS = 3, 2


def contexts(seed, rng):
    """Return a conversation as the contexts that the assistant reads, each with what it says in it."""
    table = talk.Talk()
    table.reset(seed=seed)
    known, rows, messages, left = [], [], list(PROMPT), FIRST_TURNS
    while True:
        said = messages[-1]["content"]
        if said == talk.QUESTION:
            return [*rows, [*messages, {"role": "assistant", "content": " ".join(known) or "I do not know."}]]
        turn = {"role": "assistant", "content": "Hello! How are you?" if said == "Hello!" else rng.choice(REPLIES)}
        answer = {"role": "user", "content": table.step(turn["content"])[0]}
        left -= 1
        if left:
            messages = [*messages, turn, answer]
            continue
        if not rows or known:  # What one summary forgets, no later one knows.
            facts = [f"You are {table.name}.", f"Your number is {table.number}."]
            known = [fact for fact in known or facts if rng.random() < (REMEMBERS if not rows else 0.9)]
        summary = " ".join(known) or "We talked about the day."
        request = [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": summary}]
        rows.append([*messages, turn, *request])
        task = {**PROMPT[1], "content": PROMPT[1]["content"] + SUMMARY + summary}
        messages, left = [PROMPT[0], task, turn, answer], OTHER_TURNS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output_dir", default="runs/remember", help="folder to write to (%(default)s)")
    args = parser.parse_args()
    rng = random.Random(0)
    try:
        folder = require_output_dir(args.output_dir)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows = {"sft": [{"messages": context} for seed in SFT_SEEDS for context in contexts(seed, rng)]}
    seeds = {"prompts": PPO_SEEDS, "held_out": HELD_OUT_SEEDS}
    rows |= {name: [{"prompt": PROMPT, "seed": seed} for seed in made] for name, made in seeds.items()}
    for name, lines in rows.items():
        atomic_write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in lines))
        print(f"{len(lines)} rows in {folder / name}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
