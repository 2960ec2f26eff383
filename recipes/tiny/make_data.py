"""The tiny recipe's world: a small grammar of household requests and of replies to them, good and bad ones.

Writes, into runs/tiny, a base model from scratch and three data sets:

    python recipes/tiny/make_data.py

- base/: a byte-level BPE tokenizer and a small Llama with random weights
- sft.jsonl: prompt and completion; the replies are of mixed quality on purpose, so that PPO has something to improve
- prompts.jsonl, held_out.jsonl: prompts with the columns that rewards.py reads; their requests share no
  (action, thing, place) with each other

Every sentence is made by this file. The same seed gives the same files.
"""

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

from onetrunk.models.build import BaseShape, make_base
from onetrunk.utils.files import atomic_write_text, require_output_dir

OUTPUT_DIR = "runs/tiny"
ACTIONS = "bring clean find fetch paint repair move check".split()
THINGS = "lamp chair table clock mirror carpet basket ladder bottle kettle blanket bucket candle drawer".split()
PLACES = "kitchen garden cellar attic hall garage library studio office workshop".split()
REQUESTS = (
    "Please {action} the {thing} in the {place}.",
    "Could you {action} the {thing} in the {place}?",
    "I need you to {action} the {thing} in the {place}.",
    "Would you {action} the {thing} in the {place} for me?",
)
COURTEOUS = ("Certainly", "Of course", "Gladly", "With pleasure")
PLAIN = ("Yes", "Fine", "Right")
RUDE = ("Not again", "If I must", "Why me", "What a bore")
# The chances of a reply of the training data: of being careful, and what a careful and a careless one do right.
CARE, RIGHT_WORD = 0.5, {True: 0.95, False: 0.3}
COURTESY, PLAINNESS, FULL_STOP, RAMBLING = 0.35, 0.3, 0.5, 0.35
HELD_OUT_SHARE = 0.1
# Every word is one token and the weights start small, to make it easier to compare a reply with its request.
SHAPE = BaseShape(vocab_size=512, hidden_size=64, num_layers=2, num_heads=4, max_positions=160, init_scale=0.5)
ROLES = ("<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def request(rng: random.Random, task: tuple[str, str, str]) -> str:
    """Return a sentence that asks for a task (action, thing, place)."""
    action, thing, place = task
    return rng.choice(REQUESTS).format(action=action, thing=thing, place=place)


def reply(rng: random.Random, task: tuple[str, str, str]) -> str:
    """Return a reply of mixed quality: careful, courteous, short and finished, each of them or not."""
    opening = rng.choices((COURTEOUS, PLAIN, RUDE), (COURTESY, PLAINNESS, 1 - COURTESY - PLAINNESS))[0]
    right_word = RIGHT_WORD[rng.random() < CARE]
    text = f"{rng.choice(opening)}, {_promise(rng, task, right_word)}"
    if rng.random() < RAMBLING:
        text += f" and then {_promise(rng, task, right_word)}"
    return text + ("." if rng.random() < FULL_STOP else "")


def _promise(rng: random.Random, task: tuple[str, str, str], right_word: float) -> str:
    said = (
        right if rng.random() < right_word else rng.choice(words)
        for right, words in zip(task, (ACTIONS, THINGS, PLACES), strict=True)
    )
    return "I will {} the {} in the {}".format(*said)


def split_tasks(rng: random.Random) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return all tasks, shuffled, as training tasks and held-out tasks."""
    tasks = list(itertools.product(ACTIONS, THINGS, PLACES))
    rng.shuffle(tasks)
    num_held_out = round(HELD_OUT_SHARE * len(tasks))
    return tasks[num_held_out:], tasks[:num_held_out]


def prompt_row(rng: random.Random, task: tuple[str, str, str]) -> dict[str, object]:
    """Return a row for PPO and evaluation: the prompt, and what the reward functions need to know of it."""
    names = dict(zip(("action", "thing", "place"), task, strict=True))
    return {"prompt": [{"role": "user", "content": request(rng, task)}], **names}


def completion_row(rng: random.Random, task: tuple[str, str, str]) -> dict[str, object]:
    """Return a row for supervised fine-tuning."""
    answer = [{"role": "assistant", "content": reply(rng, task)}]
    return {"prompt": prompt_row(rng, task)["prompt"], "completion": answer}


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as JSON lines."""
    atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_all(output_dir: str | Path = OUTPUT_DIR, seed: int = 0, num_sft_rows: int = 6000) -> Path:
    """Write the base model and the data sets; return the folder."""
    folder, rng = require_output_dir(output_dir), random.Random(seed)
    train, held_out = split_tasks(rng)
    sft = [completion_row(rng, rng.choice(train)) for _ in range(num_sft_rows)]
    write_rows(folder / "sft.jsonl", sft)
    write_rows(folder / "prompts.jsonl", [prompt_row(rng, task) for task in train])
    write_rows(folder / "held_out.jsonl", [prompt_row(rng, task) for task in held_out])
    texts = [message["content"] for row in sft for message in (*row["prompt"], *row["completion"])]
    make_base(texts, folder / "base", shape=SHAPE, chat_template=CHAT_TEMPLATE, special_tokens=ROLES, seed=seed)
    return folder


def main() -> int:
    """Write everything where the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the base model and the data sets of the tiny recipe.")
    parser.add_argument("--output_dir", default=OUTPUT_DIR, help="folder to write to (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and weights (%(default)s)")
    args = parser.parse_args()
    try:
        print(f"tiny: wrote a base model and data to {make_all(args.output_dir, args.seed)}")
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
