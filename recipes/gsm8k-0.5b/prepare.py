"""Write GSM8K as prompts with their true answers.

    python recipes/gsm8k-0.5b/prepare.py

reads openai/gsm8k from the Hub (MIT licence). Files that are already on the machine need no network:

    python recipes/gsm8k-0.5b/prepare.py --train_file gsm8k_train.jsonl --test_file gsm8k_test.jsonl

Both have the columns `question` and `answer`, whose last line is `#### number`. Everything is written below
`runs/gsm8k-0.5b`: train.jsonl, validation.jsonl (the last 500 training questions) and test.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from datasets import Dataset

from onetrunk.data.files import load_rows
from onetrunk.utils.files import atomic_write_text, require_output_dir

DATASET, CONFIG = "openai/gsm8k", "main"
INSTRUCTION = "Reason step by step. Then write the answer, a number alone, on a last line that begins with ####."
ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
VALIDATION = 500


def as_prompts(rows: Dataset, name: str) -> list[dict[str, object]]:
    """Return rows with `prompt`, a conversation, and `answer`, the true number as text.

    Raises:
        ValueError: a column is missing, or an answer has no last line `#### number`.
    """
    missing = {"question", "answer"} - set(rows.column_names)
    if missing:
        raise ValueError(f"{name} has no column {', '.join(sorted(missing))}; give a file of GSM8K")
    prompts = []
    for number, row in enumerate(rows, 1):
        answer = ANSWER.search(row["answer"])
        if answer is None:
            raise ValueError(f"{name}, row {number}: the answer has no last line '#### number'; give a file of GSM8K")
        content = f"{row['question'].strip()}\n\n{INSTRUCTION}"
        prompts.append({"prompt": [{"role": "user", "content": content}], "answer": answer[1].replace(",", "")})
    return prompts


def load(file: str | None, split: str) -> tuple[Dataset, str]:
    if file is not None:
        return load_rows(file), file
    return load_rows(DATASET, split=split, config_name=CONFIG), f"{DATASET}, split {split}"


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def prepare(train_file: str | None, test_file: str | None, output_dir: str) -> dict[str, int]:
    """Write the three files; return their numbers of rows."""
    train, test = as_prompts(*load(train_file, "train")), as_prompts(*load(test_file, "test"))
    if len(train) <= VALIDATION:
        raise ValueError(f"there are {len(train)} training rows; {VALIDATION} of them validate, give more")
    folder = require_output_dir(output_dir)
    files = {"train": train[:-VALIDATION], "validation": train[-VALIDATION:], "test": test}
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return {name: len(rows) for name, rows in files.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--train_file", help="JSON lines with question and answer; otherwise read from the Hub")
    parser.add_argument("--test_file", help="the same for the test questions")
    parser.add_argument("--output_dir", default="runs/gsm8k-0.5b")
    args = parser.parse_args()
    try:
        counts = prepare(args.train_file, args.test_file, args.output_dir)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{count} rows in {name}.jsonl" for name, count in counts.items()), f"in {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
