"""A spike: one decoded token of all rows as a step over buffers that stay in place, which a GPU replays as a graph.

    python scripts/bench/decode_graph.py --shape base --rows 32

The local sampler launches a thousand or more operations per token (launches.py), and waits once. Here the keys and
values of all columns are allocated beforehand, the draw is in the step, and the host looks every few tokens whether a
row still runs. On a CPU the same step runs without a graph. It prints one JSON line: the share of rows with the
sampler's tokens, whether the graph draws the tokens of the step, and operations and milliseconds per token of sampler
and step. In bfloat16 attention rounds differently over more columns, so rows of a random model part sooner or later.

Left to do before the sampler may take it: rows that leave, join and wait for answers (a graph for each number of rows
and columns), states for the trunk's cut, sliding and linear layers, processors, sharded bases.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import eq
from typing import Any

import torch
from decode_profile import FEW, count_operations
from peft import LoraConfig
from torch import Tensor, nn
from transformers import StaticCache
from workload import LORA, Workload

from onetrunk.models.base_model import backbone
from onetrunk.models.speedups.merged import merged_policy, packed_weights
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts import LocalBackend, SamplingParams
from onetrunk.rollouts.decoding import FAULTS, STOPPED, draw, row_uniforms, status_of, truncation
from onetrunk.utils.versions import cache_keyword

# Steps between two looks at the rows.
LOOK = 8
REPEATS = 3


class StaticStep:
    """Decodes b rows, always the same number, over W = P + C columns.

    Args:
        model: a decoder whose layers all have full attention, with `logits_to_keep`.
        shape: (b, P, C): rows, tokens of the longest prompt, tokens of a completion.
        params: of every call.
        replays: capture the step as a CUDA graph.
        autocast: what the step runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: tuple[int, int, int],
        params: SamplingParams,
        replays: bool = False,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        rows, self.prompt, self.completion = shape
        width, device = self.prompt + self.completion, model.device
        self.model, self.params, self.autocast = model, params, autocast
        self.cache = StaticCache(config=model.config, max_cache_len=width)
        self.cached = {cache_keyword(backbone(model)): self.cache}
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.mask = torch.zeros(rows, 1, 1, width, dtype=torch.bool, device=device)
        self.running = torch.zeros(rows, dtype=torch.bool, device=device)
        self.uniforms = torch.zeros(rows, self.completion, dtype=torch.float64, device=device)
        self.drawn = torch.zeros(rows, self.completion, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, self.completion, device=device)
        self.status = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        self.run: Callable[[], Any] = self._captured() if replays else self.step

    def begin(self, prompts: list[list[int]], uniforms: Tensor) -> None:
        """Run the prompts, padded on the left, and draw the first tokens. `uniforms`: [b, C] float64."""
        lengths = torch.tensor([len(ids) for ids in prompts])
        padded = torch.tensor([[0] * (self.prompt - len(ids)) + ids for ids in prompts])
        columns, width = torch.arange(self.prompt), self.mask.shape[-1]
        real = columns >= self.prompt - lengths[:, None]
        # Padding sees itself, because a row of a mask must not be empty.
        sees = (columns <= columns[:, None]) & real[:, None] | torch.eye(self.prompt, dtype=torch.bool)
        mask = torch.zeros(len(prompts), 1, self.prompt, width, dtype=torch.bool)
        mask[..., : self.prompt] = sees[:, None]
        positions = (columns - (self.prompt - lengths)[:, None]).clamp(min=0)
        self.cache.reset()
        self.mask.zero_()
        self.mask[..., : self.prompt].copy_(real[:, None, None])
        self.positions.copy_(lengths[:, None] - 1)
        self.uniforms.copy_(uniforms)
        for buffer in (self.place, self.status, self.drawn, self.logprobs):
            buffer.zero_()
        self.running.fill_(True)
        device = self.tokens.device
        self.advance(self.logits(padded.to(device), positions.to(device), mask.to(device)))

    def logits(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of the last column, [b, V] float32."""
        with self.autocast():
            output = self.model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, logits_to_keep=1, **self.cached
            )
        return output.logits[:, -1].float()

    def step(self) -> None:
        """Run the last tokens, and draw the next ones. Nothing waits, and every buffer keeps its address."""
        self.advance(self.logits(self.tokens, self.positions, self.mask))

    def advance(self, logits: Tensor) -> None:
        """Draw a token of every row; those of rows that have ended are ignored."""
        temperature = self.params.temperature
        uniforms = self.uniforms.index_select(1, self.place)[:, 0] if temperature > 0 else None
        tokens, logprobs = draw(logits / temperature if temperature > 0 else logits, uniforms, truncation(self.params))
        status = status_of(tokens, logprobs, logits, self.stops)
        self.status.copy_(torch.where(self.running, status, self.status))
        self.drawn.index_copy_(1, self.place, tokens[:, None])
        self.logprobs.index_copy_(1, self.place, logprobs[:, None])
        self.running.logical_and_(status != STOPPED)
        self.tokens.copy_(tokens[:, None])
        self.positions.add_(1)
        self.mask.index_fill_(-1, self.place + self.prompt, True)
        self.place.add_(1)

    def generate(self, prompts: list[list[int]], uniforms: Tensor) -> list[list[int]]:
        """Return the completion of each prompt, with the stop token."""
        self.begin(prompts, uniforms)
        for number in range(1, self.completion):
            if number % LOOK == 0 and not self.running.any():
                break
            self.run()
        if not FAULTS.keys().isdisjoint(self.status.tolist()):
            raise RuntimeError("the logits of a row are not finite")
        # What is drawn after the first stop token is ignored.
        stops = torch.isin(self.drawn, self.stops)
        ends = torch.where(stops.any(1), stops.byte().argmax(1) + 1, self.completion).tolist()
        return [ids[:end] for ids, end in zip(self.drawn.tolist(), ends, strict=True)]

    def _captured(self) -> Callable[[], None]:
        """Return the replay of the step, after a few steps on another stream, as CUDA asks for."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return what the sampler and the step have in common, and what each costs."""
    work = Workload(shape=given.shape, mixed=True, prompt=given.prompt, rollout=given.rows)
    dtype = getattr(torch, given.dtype)
    model = TrunkModel(work.policy().to(given.device, dtype), LoraConfig(**LORA)).eval()
    autocast = partial(torch.autocast, given.device, dtype=dtype, enabled=dtype != torch.float32)
    prompts, keys = work.prompts()[: given.rows], [(0, 0, row) for row in range(given.rows)]
    uniforms = torch.stack([torch.from_numpy(row_uniforms(key, given.tokens)) for key in keys])
    shape = (given.rows, max(map(len, prompts)), given.tokens)
    backend = LocalBackend(model)

    def sampled(tokens: int) -> list[list[int]]:
        with autocast():
            return backend.generate(prompts, SamplingParams(tokens), keys).completion_ids

    def ms_per_token(run: Callable[[], Any]) -> float:
        """Return the least milliseconds of a few runs."""
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            if given.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return round(1e3 * min(seconds) / given.tokens, 2)

    expected = sampled(given.tokens)
    few, many = (count_operations(lambda length=length: sampled(length)).total() for length in (FEW, FEW + 4))
    sampler = {"operations": (many - few) // 4, "ms_per_token": ms_per_token(lambda: sampled(given.tokens))}
    # Adapters are merged or cast once, as in the sampler.
    with merged_policy(model), packed_weights(model):
        step = StaticStep(model, shape, SamplingParams(given.tokens), given.device == "cuda", autocast)
        replayed = step.generate(prompts, uniforms)
        milliseconds = ms_per_token(lambda: step.generate(prompts, uniforms))
        step.run = step.step
        is_equal = step.generate(prompts, uniforms) == replayed
        step.begin(prompts, uniforms)
        own = {"operations": count_operations(step.step).total(), "ms_per_token": milliseconds}
    equal = sum(map(eq, expected, replayed)) / given.rows
    return {"equal_rows": equal, "replay_equals_step": is_equal, "sampler": sampler, "step": own}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="base", help="of workload.SHAPES")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    with torch.no_grad():
        result = measure(parse(arguments))
    print(json.dumps(result))
    if not result["replay_equals_step"]:
        raise SystemExit("decode_graph: the graph draws other tokens than the step that it replays")


if __name__ == "__main__":
    main()
