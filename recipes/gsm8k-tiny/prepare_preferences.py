"""Make preferences over solutions of GSM8K, and small models from scratch to learn them.

    python recipes/gsm8k-tiny/prepare_preferences.py path/to/gsm8k_model_solutions.jsonl path/to/gsm8k_train.jsonl

Two tasks, both split by question. `solutions`: a model's correct solution over a wrong one to the same question, all
pairs. `arithmetic`: an answer over a copy in which the results of its calculations are wrong. The files are those of
https://github.com/openai/grade-school-math (MIT); the output is in `runs/gsm8k-tiny`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset

from onetrunk.data.files import load_rows
from onetrunk.models.build import BaseShape, make_base
from onetrunk.utils.files import require_output_dir

Row = dict[str, str]

SHAPES = {
    "base-reward": BaseShape(vocab_size=1024, hidden_size=128, num_layers=4, num_heads=4, max_positions=640),
    "base-student": BaseShape(vocab_size=512, hidden_size=64, num_layers=2, num_heads=4, max_positions=768),
}
# Questions that no model learns from: of 900, and of GSM8K's training file.
HELD_OUT = {"solutions": 150, "arithmetic": 500}
COPIES = 2
# "<<48/2=24>>24": a calculation, followed by its result.
STEP = re.compile(r"<<([^<>=]*)=(-?[\d,]*\.?\d+)>>(-?[\d,]*\.?\d+)?")


def wrong_number(number: str, rng: random.Random) -> str:
    """Return the number with one of its digits changed."""
    places = [i for i, sign in enumerate(number) if sign.isdigit()]
    place = rng.choice(places)
    digit = rng.choice([d for d in "0123456789" if d != number[place] and (d != "0" or place != places[0])])
    return number[:place] + digit + number[place + 1 :]


def corrupted(answer: str, rng: random.Random, share: float = 1.0) -> str:
    """Return the answer with a wrong result in each of its calculations, or in about that share of them.

    The number after `>>` changes too, and so does the last line if it repeats the last result. So a copy cannot be
    recognised by a difference from its annotations.
    """
    results: list[tuple[str, str]] = []

    def change(step: re.Match[str]) -> str:
        if share < 1 and rng.random() >= share:
            return step[0]
        wrong = wrong_number(step[2], rng)
        results.append((step[2], wrong))
        return f"<<{step[1]}={wrong}>>" + (wrong if step[3] == step[2] else step[3] or "")

    body, mark, last = STEP.sub(change, answer).rpartition("\n#### ")
    if results and last == results[-1][0] and share == 1:
        last = results[-1][1]
    return body + mark + last


def arithmetic_pairs(rows: Dataset, rng: random.Random) -> Iterator[Row]:
    """Yield COPIES pairs per question: its answer, and a copy that calculates wrongly."""
    for row in rows:
        for _ in range(COPIES):
            wrong = corrupted(row["answer"], rng)
            if wrong != row["answer"]:
                yield {"prompt": row["question"].strip() + "\n", "chosen": row["answer"], "rejected": wrong}


def unlabelled(rows: Dataset, rng: random.Random) -> Iterator[Row]:
    """Yield one completion per question, in which about half of the calculations are wrong."""
    for row in rows:
        yield {"prompt": row["question"].strip() + "\n", "completion": corrupted(row["answer"], rng, share=0.5)}


def solution_pairs(rows: Dataset) -> Iterator[Row]:
    """Yield every correct solution with every wrong one to the same question."""
    models = [name for name in rows.column_names if name not in ("question", "ground_truth")]
    for row in rows:
        right, wrong = (
            list(dict.fromkeys(row[m]["solution"] for m in models if row[m]["is_correct"] is is_right))
            for is_right in (True, False)
        )
        for chosen in right:
            for rejected in wrong:
                yield {"prompt": row["question"].strip() + "\n", "chosen": chosen, "rejected": rejected}


def read(path: str, columns: set[str], held_out: int) -> tuple[Dataset, Dataset]:
    """Return the rows of a file without the last `held_out` ones, and those."""
    rows = load_rows(path)
    if columns - set(rows.column_names):
        raise ValueError(f"{path} has no column {', '.join(sorted(columns - set(rows.column_names)))}")
    if len(rows) <= held_out:
        raise ValueError(f"{path} has {len(rows)} rows; {held_out} of them are held out, give more")
    return rows.select(range(len(rows) - held_out)), rows.select(range(len(rows) - held_out, len(rows)))


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def make_all(solutions: str, train: str, output_dir: str) -> dict[str, int]:
    """Write the pairs of both tasks and the base models; return the number of rows by file."""
    folder = require_output_dir(output_dir)
    rng = random.Random(0)
    files: dict[str, list[Row]] = {}
    parts = read(solutions, {"question", "ground_truth"}, HELD_OUT["solutions"])
    for part, rows in zip(("train", "held_out"), parts, strict=True):
        files[f"solutions_{part}"] = list(solution_pairs(rows))
    parts = read(train, {"question", "answer"}, HELD_OUT["arithmetic"])
    for part, rows in zip(("train", "held_out"), parts, strict=True):
        files[f"arithmetic_{part}"] = list(arithmetic_pairs(rows, rng))
    files["arithmetic_unlabelled"] = list(unlabelled(parts[0], random.Random(1)))
    for name, pairs in files.items():
        write(folder / f"{name}.jsonl", pairs)
    learned = [row for name in ("solutions_train", "arithmetic_train") for row in files[name]]
    texts = list(dict.fromkeys(row["prompt"] + row["chosen"] for row in learned))
    for name, shape in SHAPES.items():
        make_base(texts, folder / name, shape=shape)
    return {name: len(pairs) for name, pairs in files.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("solutions_file", help="gsm8k_model_solutions.jsonl (in the repository: example solutions)")
    parser.add_argument("train_file", help="gsm8k_train.jsonl: JSON lines with question and answer")
    parser.add_argument("--output_dir", default="runs/gsm8k-tiny")
    given = parser.parse_args()
    try:
        counts = make_all(given.solutions_file, given.train_file, given.output_dir)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("; ".join(f"{count} rows in {name}.jsonl" for name, count in counts.items()), f"in {given.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
