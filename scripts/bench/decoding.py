"""CPU seconds of sampling with and without each speedup of the local sampler, in turns in one process.

    python scripts/bench/decoding.py --shape base --generations 4 --rows 8

It prints one JSON line: the medians of each pair, and tokens per second. Completions end by themselves: a share of the
vocabulary are stop tokens, so that their lengths are geometric, as many as fit below the limit.

- `shared`: the completions of a prompt share its forward; without, every row has a prompt of its own, equally long.
- `refill`: rows that wait take the places of finished ones; without, one batch of `--rows` decodes after another.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from peft import LoraConfig
from workload import FIRST_WORD, LORA, Workload

from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts import LocalBackend, SamplingParams

Run = Callable[[int], int]


def sampled_tokens(backend: LocalBackend, prompts: Sequence[list[int]], params: SamplingParams, seed: int) -> int:
    """Sample a completion of each prompt; return their tokens."""
    keys = [(seed, 0, row) for row in range(len(prompts))]
    return sum(map(len, backend.generate(prompts, params, keys).completion_ids))


def in_turns(without: Run, with_it: Run, repeats: int) -> dict[str, Any]:
    """Return the median CPU seconds of both, in turns, and their ratio; the first pair warms up."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    tokens = {"without": 0, "with": 0}
    for seed in range(repeats + 1):
        for name, run in (("without", without), ("with", with_it)):
            start = time.process_time()
            count = run(seed)
            if seed:
                seconds[name].append(time.process_time() - start)
                tokens[name] += count
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    speed = {f"{name}_tokens_per_s": round(tokens[name] / sum(seconds[name])) for name in seconds}
    rounded = {name: round(value, 3) for name, value in medians.items()}
    return {**rounded, "ratio": round(medians["without"] / medians["with"], 2), **speed}


def pairs(given: argparse.Namespace) -> dict[str, tuple[Run, Run]]:
    """Return the two runs of each speedup."""
    work = Workload(shape=given.shape, mixed=True, prompt=given.prompt, rollout=given.prompts)
    model = TrunkModel(work.policy(), LoraConfig(**LORA), adapter_layers=given.adapter_layers)
    vocab = work.config().vocab_size
    prompts = work.prompts()[: given.prompts]
    generator = torch.Generator().manual_seed(1)
    repeated = [ids for ids in prompts for _ in range(given.generations)]
    distinct = [torch.randint(FIRST_WORD, vocab, (len(ids),), generator=generator).tolist() for ids in repeated]
    stops = tuple(range(0, vocab, given.mean_completion))
    params = SamplingParams(given.completion, stop_token_ids=stops)

    def all_at_once(rows: list[list[int]], seed: int, **settings: Any) -> int:
        return sampled_tokens(LocalBackend(model, **settings), rows, params, seed)

    def batches(seed: int) -> int:
        rows = sorted(distinct, key=len, reverse=True)
        parts = [rows[i : i + given.rows] for i in range(0, len(rows), given.rows)]
        return sum(all_at_once(part, seed * len(rows) + i) for i, part in enumerate(parts))

    found: dict[str, tuple[Run, Run]] = {
        "shared": (lambda seed: all_at_once(distinct, seed), lambda seed: all_at_once(repeated, seed)),
        "refill": (batches, lambda seed: all_at_once(distinct, seed, max_rows=given.rows)),
    }
    return found


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="base", help="of workload.SHAPES")
    parser.add_argument("--adapter_layers", default="all", help="all, or top-k")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--rows", type=int, default=8, help="most rows at once, for refill")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the longest prompt")
    parser.add_argument("--completion", type=int, default=64, help="tokens of the longest completion")
    parser.add_argument("--mean_completion", type=int, default=32, help="tokens of a completion without the limit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of the speedups to measure; default: all")
    return parser.parse_args()


def main() -> None:
    given = parse()
    torch.set_num_threads(1)
    chosen = {name: runs for name, runs in pairs(given).items() if not given.only or name in given.only}
    print(json.dumps({name: in_turns(*runs, given.repeats) for name, runs in chosen.items()}))


if __name__ == "__main__":
    main()
