"""Time and memory of labelling given pairs, over their number: a Markdown table.

    python scripts/bench/labelling.py --pairs 1000 10000 100000

Writes pairs of two texts of 40 words into a temporary folder, and runs `onetrunk prefs` on them (completions: given)
with a rubric in place of a model: what remains is reading, pairing, the ledger and writing. Each number runs in a new
process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = 40
CHECK = "def longer(completions, **columns):\n    return [len(text) / 1000 for text in completions]\n"
CONSTITUTION = "name: bench\nprinciples:\n  - {text: 'Which is longer?', tags: [longer]}\n"
COLUMNS = ("pairs", "CPU seconds", "CPU seconds per 1,000 pairs", "peak memory, MiB", "ledger, bytes per pair")


def write_inputs(folder: Path, num_pairs: int) -> None:
    """Write the pairs, a check and a constitution."""
    drawn = random.Random(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(num_pairs):
            texts = [" ".join(f"word{drawn.randrange(5000)}" for _ in range(WORDS)) for _ in range(2)]
            row = {"prompt": f"prompt {number}", "chosen": texts[0], "rejected": texts[1]}
            file.write(json.dumps(row) + "\n")
    (folder / "checks.py").write_text(CHECK)
    (folder / "constitution.yaml").write_text(CONSTITUTION)


def measure(folder: Path, num_pairs: int) -> list[str]:
    """Label the pairs in this process; return a row of the table."""
    from onetrunk import cli

    words = ["--completions", "given", "--dataset_name", f"{folder}/pairs.jsonl", "--judge", "rubric"]
    words += ["--rubric", json.dumps({"longer": f"{folder}/checks.py:longer"}), "--num_samples_to_print", "0"]
    words += ["--constitution", f"{folder}/constitution.yaml", "--output_dir", f"{folder}/out", "--streaming", "true"]
    started = time.process_time()
    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
        code = cli.main(["prefs", *words])
    if code:
        raise RuntimeError(f"onetrunk prefs ended with exit code {code}")
    seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ledger = (folder / "out/ledger/ledger.jsonl").stat().st_size / num_pairs
    return [f"{num_pairs:,}", f"{seconds:.1f}", f"{1000 * seconds / num_pairs:.2f}", f"{peak:.0f}", f"{ledger:.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[1000, 10_000, 100_000], help="numbers of pairs")
    parser.add_argument("--here", action="store_true", help="measure the first number in this process")
    args = parser.parse_args()
    if args.here:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder), args.pairs[0])
            print(f"| {' | '.join(measure(Path(folder), args.pairs[0]))} |", flush=True)
        return 0
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for number in args.pairs:
        subprocess.run([sys.executable, __file__, "--here", "--pairs", str(number)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
