"""Time and memory of labelling given pairs, over their number: a Markdown table.

    python scripts/bench/labelling.py --pairs 1000 10000 100000

With `--keep FILE` each measurement is also appended to a file of JSON lines, which `--draw PNG` draws.

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


def measure(folder: Path, num_pairs: int) -> dict[str, float]:
    """Label the pairs in this process; return their number, CPU seconds, MiB, and bytes of the ledger per pair."""
    from onetrunk import cli

    words = ["--completions", "given", "--dataset_name", f"{folder}/pairs.jsonl", "--judge", "rubric"]
    words += ["--rubric", json.dumps({"longer": f"{folder}/checks.py:longer"})]
    words += ["--constitution", f"{folder}/constitution.yaml", "--output_dir", f"{folder}/out", "--streaming", "true"]
    started = time.process_time()
    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
        code = cli.main(["prefs", *words])
    if code:
        raise RuntimeError(f"onetrunk prefs ended with exit code {code}")
    seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ledger = (folder / "out/ledger/ledger.db").stat().st_size / num_pairs
    return {"pairs": num_pairs, "cpu_s": round(seconds, 1), "peak_mib": round(peak), "ledger_bytes": round(ledger)}


def cells(found: dict[str, float]) -> list[str]:
    """Return a row of the table."""
    number, seconds = found["pairs"], found["cpu_s"]
    per_thousand = f"{1000 * seconds / number:.2f}"
    return [f"{number:,}", f"{seconds:.1f}", per_thousand, f"{found['peak_mib']:.0f}", f"{found['ledger_bytes']:.0f}"]


def draw(path: Path, kept: Path) -> None:
    """Draw the measurements in a file of JSON lines: memory and time over the number of pairs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = sorted((json.loads(line) for line in kept.read_text().splitlines()), key=lambda one: one["pairs"])
    numbers = [one["pairs"] for one in found]
    figure, grid = plt.subplots(1, 2, figsize=(7.5, 2.8))
    for axes, name, label in zip(grid, ("peak_mib", "cpu_s"), ("peak memory, MiB", "CPU seconds"), strict=True):
        axes.plot(numbers, [one[name] for one in found], marker="o")
        axes.set(xlabel="pairs", ylabel=label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[1000, 10_000, 100_000], help="numbers of pairs")
    parser.add_argument("--keep", type=Path, help="append each measurement to this file of JSON lines")
    parser.add_argument("--draw", type=Path, help="draw what the file of --keep holds into this PNG")
    parser.add_argument("--here", action="store_true", help="measure the first number in this process")
    args = parser.parse_args()
    if args.draw and not args.keep:
        parser.error("--draw draws what a file of --keep holds; name it")
    if args.here:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder), args.pairs[0])
            found = measure(Path(folder), args.pairs[0])
        print(f"| {' | '.join(cells(found))} |", flush=True)
        if args.keep:
            with args.keep.open("a") as file:
                file.write(json.dumps(found) + "\n")
        return 0
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for number in args.pairs:
        keep = ["--keep", str(args.keep)] if args.keep else []
        subprocess.run([sys.executable, __file__, "--here", "--pairs", str(number), *keep], check=True)
    if args.draw:
        draw(args.draw, args.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
