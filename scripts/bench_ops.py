"""Speed and memory of the fused and vectorised parts against their naive twins, as ratios from one run.

    python scripts/bench_ops.py                                        # CPU seconds, one thread; about 3 minutes
    python scripts/bench_ops.py --vocab 152000 --hidden 896 --dtype bfloat16
    python scripts/bench_ops.py --output_dir out/bench_ops             # and curves over tokens, width and vocabulary

Each pair runs alternately (A B A B) on the same inputs; a ratio below 1 means that ours is slower. Differences under
10% mean nothing. Peak memory is that of a process per variant, beyond what the inputs take. gpu_twins.py measures the
logprobs on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from bench.ops_cases import decode_pair, gae_pair, logprobs_run, medians
from bench.ops_memory import GROWTH, growth, measured
from bench.ops_plot import save_growth
from rich.console import Console
from rich.table import Table

PARTS = ("logprobs", "gae", "decode", "memory")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="completion tokens of a pack")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 152_000])
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the head and its input"
    )
    parser.add_argument("--prompts", type=int, default=32, help="prompts that decode together")
    parser.add_argument("--completion", type=int, default=128, help="longest completion, tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="measure these alone")
    parser.add_argument("--output_dir", type=Path, help="write growth.json and growth.png here; some minutes more")
    parser.add_argument(
        "--growth_sizes", type=int, nargs="+", help="sizes of every axis of the curves, for a short run"
    )
    args = parser.parse_args()
    sizes = [
        *args.vocab,
        *(args.growth_sizes or ()),
        *(value for value in vars(args).values() if isinstance(value, int)),
    ]
    if min(sizes) < 1:
        parser.error("every number must be 1 or more")
    return args


def print_seconds(console: Console, args: argparse.Namespace) -> None:
    """Measure and print the pairs one after another: the inputs of one are gone before the next begins."""
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    table = Table("part", "naive s", "ours s", "ratio", title=f"Seconds of {threads}, medians of {args.repeats}")

    def add(name: str, pair: tuple) -> None:
        naive, ours = medians(pair, args.repeats)
        table.add_row(name, f"{naive:.4f}", f"{ours:.4f}", f"{naive / ours:.2f}x")

    for vocab in args.vocab if "logprobs" in args.only else ():
        for trains, what in ((True, "forward and backward"), (False, "scoring")):
            case = (args.tokens, args.hidden, vocab, trains, args.dtype)
            shape = f"{args.tokens} tokens, width {args.hidden}, vocabulary {vocab}, {args.dtype}"
            pair = tuple(logprobs_run(variant, *case) for variant in ("naive", "fused"))
            add(f"logprobs, fused against naive, {what} ({shape})", pair)
    for rows, length in ((64, 512), (1, 4096), (8, 4096)) if "gae" in args.only else ():
        add(f"GAE, vectorised against loop ({rows} x {length} tokens)", gae_pair(rows, length))
    if "decode" in args.only:
        name = f"decode loop against generate ({args.prompts} prompts, up to {args.completion} tokens, mixed lengths)"
        add(name, decode_pair(args.prompts, args.completion))
    if table.rows:
        console.print(table)


def print_memory(console: Console, args: argparse.Namespace) -> None:
    """Measure and print the peaks of both variants, training and scoring."""
    table = Table("part", "naive MiB", "ours MiB", "ours / naive", title="Peak memory beyond the inputs")
    for vocab in args.vocab:
        for trains, what in ((True, "forward and backward"), (False, "scoring")):
            case = {"tokens": args.tokens, "hidden": args.hidden, "vocab": vocab, "trains": trains}
            case |= {"dtype": args.dtype, "threads": args.threads}
            naive, ours = (measured(variant=variant, **case)["extra_mb"] for variant in ("naive", "fused"))
            share = f"{ours / naive:.1%}" if naive > 0 else "-"
            table.add_row(f"logprobs, {what}, vocabulary {vocab}", f"{naive:.0f}", f"{ours:.0f}", share)
    console.print(table)


def main() -> int:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    # Wide enough that a row of the table is a line also where the output goes to a file.
    console = Console(width=None if sys.stdout.isatty() else 160)
    print_seconds(console, args)
    if "memory" in args.only:
        print_memory(console, args)
    if args.output_dir:
        base = {"tokens": args.tokens, "hidden": args.hidden, "vocab": max(args.vocab), "dtype": args.dtype}
        base |= {"threads": args.threads, "repeats": min(3, args.repeats)}
        axes = dict.fromkeys(GROWTH, args.growth_sizes) if args.growth_sizes else GROWTH
        title = (
            f"logprobs, forward and backward: {args.tokens} tokens, width {args.hidden}, vocabulary {base['vocab']}"
        )
        for path in save_growth(growth(base, axes), args.output_dir, title):
            console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
