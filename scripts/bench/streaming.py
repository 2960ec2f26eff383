"""Time and memory of rows that are read while training, over the number of rows: a Markdown table.

    python scripts/bench/streaming.py --rows 10000 100000 1000000

Writes rows of two texts of 40 words into 8 files of each format, in a temporary folder. Each measurement runs in a new
process: the index is made, made again from the cache, and then rows are read in their shuffled order, 64 at a time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from onetrunk.data.sharded import BlockSampler, load_sharded_rows

FILES, WORDS, BATCH, GROUP = 8, 40, 64, 1000
COLUMNS = (
    "rows",
    "format",
    "index, first time",
    "index, kept",
    "bytes of the index",
    "peak memory",
    "rows per second",
)


def write_files(folder: Path, num_rows: int) -> None:
    """Write the rows as Parquet and as JSONL."""
    generator = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(5000)])
    for file in range(FILES):
        texts = [" ".join(row) for row in words[generator.integers(0, len(words), (num_rows // FILES, WORDS))]]
        table = pa.table({"prompt": texts, "completion": texts[::-1]})
        pq.write_table(table, folder / f"{file}.parquet", row_group_size=GROUP)
        lines = (json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in zip(texts, texts[::-1], strict=True))
        with (folder / f"{file}.jsonl").open("w") as out:
            out.writelines(lines)


def measure(folder: Path, kind: str, most: int) -> list[str]:
    """Return a row of the table; reads at most `most` rows."""
    datasets.config.HF_DATASETS_CACHE = folder / f"cache-{kind}"
    times = []
    for _ in range(2):
        start = time.perf_counter()
        rows = load_sharded_rows(f"{folder}/*.{kind}")
        times.append(time.perf_counter() - start)
    size = sum(getattr(rows.index, name).nbytes for name in ("files", "begins", "ends", "sizes"))
    numbers = [number for number, _ in zip(BlockSampler(rows.order, seed=0), range(most), strict=False)]
    start = time.perf_counter()
    for first in range(0, len(numbers), BATCH):
        rows.__getitems__(numbers[first : first + BATCH])
    speed = len(numbers) / (time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cells = (f"{len(rows):,}", kind, f"{times[0]:.2f} s", f"{times[1]:.2f} s", f"{size:,}", f"{peak:.0f} MiB")
    return [*cells, f"{speed:,.0f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="Numbers of rows.")
    parser.add_argument("--read", type=int, default=100_000, help="Most rows to read.")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "FORMAT"), help="Measure these files in this process.")
    args = parser.parse_args()
    if args.one:
        print(f"| {' | '.join(measure(Path(args.one[0]), args.one[1], args.read))} |")
        return
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for num_rows in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder), num_rows)
            for kind in ("parquet", "jsonl"):
                options = ["--read", str(args.read), "--one", folder, kind]
                subprocess.run([sys.executable, __file__, *options], check=True)


if __name__ == "__main__":
    main()
