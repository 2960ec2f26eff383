"""Make what the recipe starts from: a tokenizer and a small random Llama from the text itself, and the prompts.

    python recipes/gsm8k-tiny/prepare.py path/to/gsm8k_train.jsonl

The file is GSM8K's (https://github.com/openai/grade-school-math, MIT): JSON lines with `question` and `answer`.
Everything is written below `runs/gsm8k-tiny`; the last 500 rows are held out.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from datasets import Dataset

from onetrunk.data.files import load_rows
from onetrunk.models.build import BaseShape, make_base
from onetrunk.utils.files import require_output_dir

SHAPE = BaseShape(vocab_size=2048, hidden_size=160, num_layers=4, num_heads=5, max_positions=640)
HELD_OUT = 500


def as_prompts(rows: Dataset) -> list[dict[str, str]]:
    """Return rows with `prompt`, `completion` and the true `answer`."""
    return [
        {"prompt": row["question"].strip() + "\n", "completion": row["answer"], "answer": row["answer"]}
        for row in rows
    ]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("train_file", help="gsm8k_train.jsonl: JSON lines with question and answer")
    parser.add_argument("--output_dir", default="runs/gsm8k-tiny")
    given = parser.parse_args()
    try:
        rows = load_rows(given.train_file)
        missing = {"question", "answer"} - set(rows.column_names)
        if missing:
            raise ValueError(f"{given.train_file} has no column {', '.join(sorted(missing))}; give GSM8K's own file")
        if len(rows) <= HELD_OUT:
            raise ValueError(f"{given.train_file} has {len(rows)} rows; {HELD_OUT} of them are held out, give more")
        folder, prompts = require_output_dir(given.output_dir), as_prompts(rows)
        train, held_out = prompts[:-HELD_OUT], prompts[-HELD_OUT:]
        make_base((row["prompt"] + row["completion"] for row in train), folder / "base", shape=SHAPE)
        write_rows(folder / "train.jsonl", train)
        write_rows(folder / "held_out.jsonl", held_out)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(train)} training rows, {len(held_out)} held out, base model and rows in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
