"""Write prompts of hh-rlhf, half of them attempts to get help with harm, as conversations.

    python recipes/constitutional-1.5b/prepare.py

reads Anthropic/hh-rlhf from the Hub (MIT licence). Files that are already on the machine need no network:

    python recipes/constitutional-1.5b/prepare.py --harmless_file harmless.jsonl --helpful_file helpful.jsonl

Rows have the column `chosen`, a transcript; only what comes before its last reply is used. No label of a person is
read. Everything is written below `runs/constitutional-1.5b`, without a conversation that is in two of the files:
revise.jsonl for critiques and revisions, prompts.jsonl for the judge and PPO, held_out.jsonl for the evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

from onetrunk.data.files import dataset_builder, load_rows
from onetrunk.types import Message
from onetrunk.utils.files import atomic_write_text, require_output_dir

DATASET = "Anthropic/hh-rlhf"
KINDS = ("harmless", "helpful")
TURN = re.compile(r"\n\n(Human|Assistant): ")
ROLES = {"Human": "user", "Assistant": "assistant"}


def conversation(transcript: str) -> list[Message] | None:
    """Return the turns before the last reply, or None if they do not alternate, are empty, or end otherwise."""
    before, *parts = TURN.split(transcript)
    turns = [
        {"role": ROLES[name], "content": text.strip()} for name, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    expected = [("user", "assistant")[i % 2] for i in range(len(turns))]
    is_whole = not before.strip() and len(turns) >= 2 and [turn["role"] for turn in turns] == expected
    if not is_whole or turns[-1]["role"] != "assistant" or not all(turn["content"] for turn in turns[:-1]):
        return None
    return turns[:-1]


def load_transcripts(file: str | None, kind: str) -> list[str]:
    """Return the transcripts of one kind, from a file or the Hub."""
    if file is not None:
        rows, name = load_rows(file), file
    else:
        name = f"{DATASET}, {kind}-base"
        builder = dataset_builder(DATASET, None, data_dir=f"{kind}-base")
        builder.download_and_prepare()
        rows = builder.as_dataset("train")
    if "chosen" not in rows.column_names:
        raise ValueError(f"{name} has no column chosen, only {', '.join(rows.column_names)}; give a file of hh-rlhf")
    return rows["chosen"]


def split_prompts(transcripts: dict[str, list[str]], sizes: dict[str, int]) -> dict[str, list[dict[str, object]]]:
    """Return the rows of each file: equally many of each kind, in a random order that depends on nothing else.

    Raises:
        ValueError: there are too few different prompts.
    """
    rng, files = random.Random(0), {name: [] for name in sizes}
    for kind, texts in transcripts.items():
        prompts = [prompt for prompt in map(conversation, texts) if prompt is not None]
        prompts = list({json.dumps(prompt): prompt for prompt in prompts}.values())
        needed = sum(size // len(transcripts) for size in sizes.values())
        if len(prompts) < needed:
            raise ValueError(f"there are {len(prompts)} different {kind} prompts, and {needed} are needed; give more")
        rng.shuffle(prompts)
        for name, size in sizes.items():
            files[name] += [{"prompt": prompts.pop(), "kind": kind} for _ in range(size // len(transcripts))]
    for rows in files.values():
        rng.shuffle(rows)
    return files


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for kind in KINDS:
        parser.add_argument(f"--{kind}_file", help="JSON lines with the column chosen; otherwise read from the Hub")
    for name, size in (("revise", 12_000), ("prompts", 20_000), ("held_out", 512)):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"rows of {name}.jsonl (default {size})")
    parser.add_argument("--output_dir", default="runs/constitutional-1.5b")
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("revise", "prompts", "held_out")}
    try:
        transcripts = {kind: load_transcripts(getattr(args, f"{kind}_file"), kind) for kind in KINDS}
        files = split_prompts(transcripts, sizes)
        folder = require_output_dir(args.output_dir)
        for name, rows in files.items():
            write_rows(folder / f"{name}.jsonl", rows)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{len(rows)} rows in {name}.jsonl" for name, rows in files.items()), f"in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
