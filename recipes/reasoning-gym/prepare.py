"""Write questions of reasoning-gym for SFT, PPO and evaluation.

    python recipes/reasoning-gym/prepare.py

Everything is written below `runs/reasoning-gym`: sft.jsonl (with the right answers), prompts.jsonl and held_out.jsonl
(without). No question is in two of the files.
"""

import argparse
import json
import sys

from onetrunk.utils.files import atomic_write_text, require_output_dir

TASK = "chain_sum"
CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
SIZES = {"sft": 400, "prompts": 1280, "held_out": 400}


def make_rows() -> dict[str, list[dict[str, object]]]:
    """Return the rows of each file; every question is used once."""
    import reasoning_gym

    total = sum(SIZES.values())
    entries = {}
    for entry in reasoning_gym.create_dataset(TASK, seed=0, size=2 * total, **CONFIG):
        entries.setdefault(entry["question"], entry)
    remaining = iter(entries.values())
    return {name: [row_of(next(remaining), name == "sft") for _ in range(size)] for name, size in SIZES.items()}


def row_of(entry: dict[str, object], is_answered: bool) -> dict[str, object]:
    prompt = [{"role": "user", "content": entry["question"]}]
    if is_answered:
        return {"prompt": prompt, "completion": [{"role": "assistant", "content": entry["answer"]}]}
    return {"prompt": prompt, "entry": json.dumps(entry)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output_dir", default="runs/reasoning-gym", help="folder to write to (%(default)s)")
    args = parser.parse_args()
    try:
        folder, files = require_output_dir(args.output_dir), make_rows()
    except (ImportError, OSError, ValueError) as error:
        needed = "; pip install reasoning-gym" if isinstance(error, ImportError) else ""
        print(f"error: {error}{needed}", file=sys.stderr)
        return 1
    for name, rows in files.items():
        atomic_write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        print(f"{len(rows)} rows in {folder / name}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
