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
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

from onetrunk.ops.advantages import gae, gae_reference
from onetrunk.ops.logprobs import fused_token_logprobs, token_logprobs
from onetrunk.ops.packing import make_pack
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend

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


def decode_pair(rows: int, length: int) -> tuple[Run, Run]:
    """Return (generate, own decode loop) runs that sample completions of mixed lengths from a 5M-parameter model.

    One token in 40 is a stop token, so that a completion of a random model ends after some 40 tokens. The two draw
    different completions of one distribution.
    """
    config = Qwen2Config(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = [torch.randint(60, 2048, (8 + 24 * i // rows,)).tolist() for i in range(rows)]
    stops = tuple(range(1, 52))
    pack = make_pack([p[::-1] for p in prompts], [[]] * rows, 0)
    ids, mask = pack.input_ids.flip(1), pack.attention_mask.flip(1)
    settings = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length, eos_token_id=list(stops), pad_token_id=0
    )  # fmt: skip
    backend, params = LocalBackend(model), SamplingParams(length, stop_token_ids=stops, pad_token_id=0)
    draw = iter(range(10**6))

    def own() -> None:
        number = next(draw)
        backend.generate(prompts, params, [(0, number, row) for row in range(rows)])

    return lambda: model.generate(ids, attention_mask=mask, generation_config=settings), own


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
    parser.add_argument("--prompts", type=int, default=32, help="prompts that decode together")
    parser.add_argument("--completion", type=int, default=128, help="longest completion, tokens")
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
        f"decode loop against generate ({given.prompts} prompts, up to {given.completion} tokens, mixed lengths)": (
            decode_pair(given.prompts, given.completion)
        ),
    }
    table = Table("part", "naive s", "ours s", "ratio", title=f"CPU seconds, medians of {given.repeats}, one thread")
    for name, pair in pairs.items():
        naive, ours = medians(pair, given.repeats)
        table.add_row(name, f"{naive:.4f}", f"{ours:.4f}", f"{naive / ours:.2f}x")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
