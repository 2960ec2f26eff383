"""Speed of the fused and vectorised parts against their naive twins, as ratios of medians from one run.

    python scripts/bench_ops.py                 # CPU seconds, one thread
    python scripts/bench_ops.py --vocab 152000 --repeats 3

Each pair runs alternately (A B A B) on the same inputs, forward and backward where there is a gradient; a ratio below
1 means that ours is slower. Differences under 10% mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from onetrunk.ops.advantages import gae, gae_reference
from onetrunk.ops.logprobs import fused_token_logprobs, token_logprobs

Run = Callable[[], None]


def logprobs_pair(tokens: int, hidden: int, vocab: int) -> tuple[Run, Run]:
    """Return (naive, fused) runs of logprobs and entropy with their gradient with respect to the hidden states."""
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden) / hidden**0.5
    targets = torch.randint(0, vocab, (tokens,))

    def run(function: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        states.grad = None
        function(states, weight, targets)[0].sum().backward()

    return lambda: run(token_logprobs), lambda: run(fused_token_logprobs)


def gae_pair(rows: int, length: int) -> tuple[Run, Run]:
    """Return (loop, scan) runs of generalised advantage estimation."""
    rewards, values = torch.randn(rows, length), torch.randn(rows, length)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1))

    def run(function: Callable[..., object]) -> None:
        function(rewards, values, mask, 1.0, 0.95)

    return lambda: run(gae_reference), lambda: run(gae)


def medians(pair: tuple[Run, Run], repeats: int) -> tuple[float, float]:
    """Return the median CPU seconds of both, run alternately after one warm-up each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for i in range(repeats + 1):
        for run, kept in zip(pair, seconds, strict=True):
            start = time.process_time()
            run()
            if i:
                kept.append(time.process_time() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="completion tokens of a pack")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if min(vars(given).values()) < 1:
        parser.error("every number must be 1 or more")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = f"{given.tokens} tokens, width {given.hidden}, vocabulary {given.vocab}"
    pairs = {
        f"logprobs, fused against naive ({shape})": logprobs_pair(given.tokens, given.hidden, given.vocab),
        "GAE, scan against loop (64 rows of 512)": gae_pair(64, 512),
    }
    table = Table("part", "naive s", "ours s", "ratio", title=f"CPU seconds, medians of {given.repeats}, one thread")
    for name, pair in pairs.items():
        naive, ours = medians(pair, given.repeats)
        table.add_row(name, f"{naive:.4f}", f"{ours:.4f}", f"{naive / ours:.2f}x")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
