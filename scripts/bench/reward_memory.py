"""Time and memory of `onetrunk reward` over its number of rows: a Markdown table.

    python scripts/bench/reward_memory.py --rows 10000 50000 200000

Writes pairs of two texts of 40 words, and trains a reward model of 2 tiny layers on them for 2 steps: what remains is
reading, checking and tokenizing the rows. Each number runs in a new process with a cache of its own. Memory that
belongs to the process is sampled every 20 ms; pages of files that are mapped into it are not, because the system takes
them back when it needs them.
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
import threading
import time
from pathlib import Path

WORDS = 40
COLUMNS = (
    "rows",
    "CPU seconds",
    "memory of the process, MiB",
    "with the pages of mapped files, MiB",
    "tokens in the cache, MiB",
)


def write_inputs(folder: Path, num_rows: int) -> None:
    """Write the pairs, and a model with its tokenizer."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from onetrunk.models.build import train_tokenizer

    drawn = random.Random(0)

    def text() -> str:
        return " ".join(f"word{drawn.randrange(5000)}" for _ in range(WORDS))

    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(num_rows):
            row = {"prompt": f"prompt {number}: ", "chosen": text(), "rejected": text(), "probability": 0.9}
            file.write(json.dumps(row) + "\n")
    tokenizer = train_tokenizer([text() for _ in range(1000)], 1000)
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=1024, num_labels=1, num_key_value_heads=1, **sizes)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    Qwen2ForSequenceClassification(config).save_pretrained(folder / "model")


@contextlib.contextmanager
def peak_of_process(peaks: list[float]):
    """Append the largest memory of this process during the block, without mapped files, in MiB."""
    ended, largest = threading.Event(), 0

    def sample() -> None:
        nonlocal largest
        while not ended.wait(0.02):
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
            largest = max(largest, int(line.split()[1]))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()
    peaks.append(largest / 1024)


def measure(folder: Path, num_rows: int) -> list[str]:
    """Train in this process; return a row of the table."""
    import datasets

    from onetrunk import cli

    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    words = ["--dataset_name", f"{folder}/pairs.jsonl", "--model_name_or_path", f"{folder}/model", "--max_steps", "2"]
    words += ["--output_dir", f"{folder}/out", "--save_strategy", "no", "--report_to", "none", "--use_cpu", "true"]
    words += ["--bf16", "false", "--max_length", "1000", "--write_report", "false"]
    peaks: list[float] = []
    started = time.process_time()
    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
        with peak_of_process(peaks):
            code = cli.main(["reward", *words])
    if code:
        raise RuntimeError(f"onetrunk reward ended with exit code {code}")
    seconds = time.process_time() - started
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    kept = sum(file.stat().st_size for file in (folder / "cache").rglob("cache-*.arrow")) / 2**20
    return [f"{num_rows:,}", f"{seconds:.0f}", f"{peaks[0]:.0f}", f"{whole:.0f}", f"{kept:.0f}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 50_000, 200_000], help="numbers of rows")
    parser.add_argument("--here", type=Path, help="measure the first number in this process, in this folder")
    args = parser.parse_args()
    if args.here:
        print(f"| {' | '.join(measure(args.here, args.rows[0]))} |", flush=True)
        return 0
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for number in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder), number)
            subprocess.run([sys.executable, __file__, "--here", folder, "--rows", str(number)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
