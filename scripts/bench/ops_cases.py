"""Pairs of runs that do the same: the naive way, and ours. Imported by scripts/bench_ops.py and gpu_twins.py."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from onetrunk.ops import Head, fused_token_logprobs, gae, token_logprobs
from onetrunk.ops.advantages import gae_reference
from onetrunk.ops.masking import length_mask
from onetrunk.ops.packing import make_pack

Run = Callable[[], object]
Pair = tuple[Run, Run]
SHORTEST = 0.05


def logprobs_run(
    variant: str,
    tokens: int,
    hidden: int,
    vocab: int,
    trains: bool = True,
    dtype: str = "float32",
    device: str = "cpu",
) -> Run:
    """Return a run of logprobs and entropies of a pack: with the gradient of the hidden states, or scoring alone.

    It returns the logprobs and that gradient, or None.

    Args:
        variant: naive or fused.
        tokens: completion tokens of the pack.
        hidden: width of a hidden state.
        vocab: rows of the head.
        trains: False scores only.
        dtype: of hidden states and head.
        device: cpu or cuda.
    """
    kind = {"dtype": getattr(torch, dtype), "device": device}
    # In place: the peak of memory must not be that of making the inputs.
    weight = torch.empty(vocab, hidden, **kind).normal_(std=hidden**-0.5)
    states = torch.randn(tokens, hidden, **kind).requires_grad_(trains)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    function = {"naive": token_logprobs, "fused": fused_token_logprobs}[variant]

    def run() -> tuple[Tensor, Tensor | None]:
        logprobs, _ = function(states, Head(weight), targets)
        if trains:
            states.grad = None
            logprobs.sum().backward()
        return logprobs.detach(), states.grad

    return run


def gae_pair(rows: int, length: int) -> Pair:
    """Return (loop, vectorised) runs of generalised advantage estimation over rows that all have `length` tokens."""
    rewards, values = torch.randn(rows, length), torch.randn(rows, length)
    case = (rewards, values, length_mask(torch.full((rows,), length), length), 1.0, 0.95)
    return lambda: gae_reference(*case), lambda: gae(*case)


def decode_pair(rows: int, length: int) -> Pair:
    """Return (generate, own decode loop) runs that sample completions of mixed lengths from a 5M-parameter model.

    One token in 40 is a stop token, so that a completion of a random model ends after some 40 tokens. The two draw
    different completions of one distribution.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config

    from onetrunk.rollouts.base import SamplingParams
    from onetrunk.rollouts.local import LocalBackend

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


def seconds(run: Run, device: str = "cpu", number: int = 1) -> float:
    """Return the seconds of one of `number` runs: of this process on a CPU, of the clock on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(number):
        run()
    if device != "cpu":
        torch.cuda.synchronize()
    return (clock() - start) / number


def medians(pair: Pair, repeats: int) -> tuple[float, float]:
    """Return the median seconds of both, measured alternately after warm-ups.

    A short run is repeated until one measurement takes SHORTEST seconds, as timeit does: one call of a millisecond
    would measure what the call before it left in the caches.
    """
    for run in pair:
        run()
    numbers = [math.ceil(SHORTEST / max(seconds(run), SHORTEST / 1000)) for run in pair]
    rounds = [[seconds(run, number=n) for run, n in zip(pair, numbers, strict=True)] for _ in range(repeats)]
    naive, ours = zip(*rounds, strict=True)
    return statistics.median(naive), statistics.median(ours)
