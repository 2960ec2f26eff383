"""Seconds of pipelined sampling: one batch at a time, the same cut into parts, and independent batches in flight.

    python scripts/bench_pipeline.py --stages 4 --stage_ms 50
    python scripts/bench_pipeline.py --stages 2 --stage_ms 50 --clock wall
    python scripts/bench_pipeline.py --stages 2
    python scripts/bench_pipeline.py --stages 2 --clock wall
    python scripts/bench_pipeline.py --stages 2 --clock wall --device cuda --layers 32 --hidden 4096

It starts the processes itself and prints one JSON line. All schedules sample the same rows with the same result:

- `naive`: one batch of `--rows` rows is in flight; the next one starts when it is finished.
- `microbatched`: each batch is cut into one part per stage, and the parts are in flight.
- `interleaved`: as many whole batches are in flight as there are stages.

With `--stage_ms` the time of a stage is EMULATED: a forward takes so long, whatever the rows, as where reading the
weights bounds a step. Without, the stages compute. The bound is the number of stages.

`--clock model` counts the work of each stage (emulated forwards, or the processor time of its thread): messages carry
the time at which they were sent, and a stage continues when it is free and the message is there. What else the machine
does hardly matters then; sending costs nothing. `--clock wall` measures, and needs a core for each process; emulated
forwards sleep. `--device cuda` needs a GPU for each stage (not yet run on hardware).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from onetrunk.models.base_model import decoder_layers
from onetrunk.parallel.stages import StageLinks
from onetrunk.rollouts import PipelinedBackend, SamplingParams

NAMES = ("naive", "microbatched", "interleaved")


def backends(model: nn.Module, given: argparse.Namespace, links: StageLinks) -> dict[str, PipelinedBackend]:
    """Return the backend of each schedule."""
    stages, rows = given.stages, given.rows
    # Of each: the batches, and the rows of a batch.
    shapes = {"naive": (1, rows), "microbatched": (stages, rows // stages), "interleaved": (stages, rows)}
    split = {"split": [given.layers // stages] * stages}
    return {
        name: PipelinedBackend(
            model, batches=batches, max_rows=size * batches // stages, links=links, stages=stages, **split
        )
        for name, (batches, size) in shapes.items()
    }


def tiny_head(given: argparse.Namespace) -> nn.Module:
    """Return a model whose layers take all of the time, so that equal numbers of layers are equal stages."""
    hidden = 32 if given.stage_ms else given.hidden
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=2,
        max_position_embeddings=given.prompt + given.completion,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


class ClockedLinks(StageLinks):
    """Links whose messages carry the time at which they were sent: a stage continues when it is free and has them.

    Args:
        num_stages: of the pipeline.
        spent: returns the nanoseconds that the stage has worked since the last call.
    """

    def __init__(self, num_stages: int, spent: Callable[[], int]):
        super().__init__(num_stages)
        self.spent, self.now = spent, 0

    def _stamp(self) -> Tensor:
        self.now += self.spent()
        return torch.tensor([self.now])

    def _arrived(self, sent: Tensor) -> None:
        self.now = max(self.now + self.spent(), int(sent))

    def send_on(self, plan: Tensor, states: Tensor | None = None) -> None:
        super().send_on(torch.cat([self._stamp(), plan]), states)

    def next_plan(self, length: int) -> tuple[Tensor, torch.dtype | None]:
        message, dtype = super().next_plan(length + 1)
        self._arrived(message[0])
        return message[1:], dtype

    def send_back(self, tokens: Tensor) -> None:
        super().send_back(torch.cat([tokens, self._stamp().expand(2, 1)], dim=1))

    def next_tokens(self, count: int) -> Tensor:
        message = super().next_tokens(count + 1)
        self._arrived(message[0, -1])
        return message[:, :-1]


class Clock:
    """The work of a stage in nanoseconds: emulated forwards, or the processor time of its thread."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self._last, self._emulated = 0, 0

    def spent(self) -> int:
        """Return the work since the last call."""
        total = self._emulated if self.given.stage_ms else time.thread_time_ns()
        work, self._last = total - self._last, total
        return work

    def forward(self, *_: Any) -> None:
        """Let an emulated forward pass; a hook on the first layer of a stage."""
        if self.given.clock == "wall":
            time.sleep(self.given.stage_ms / 1000)
        self._emulated += round(self.given.stage_ms * 1e6)


def work(rank: int, given: argparse.Namespace, folder: str) -> None:
    """Run the schedules in turns on one process of the pipeline; the first process writes the medians."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    device, kind = torch.device("cpu"), "gloo"
    if given.device == "cuda":
        device, kind = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    elif not given.stage_ms:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group(kind, init_method=f"file://{folder}/store", rank=rank, world_size=given.stages)
    model = tiny_head(given).to(device)
    clock = Clock(given)
    links = ClockedLinks(given.stages, clock.spent)
    runs = backends(model, given, links)
    if given.stage_ms:
        first = runs["naive"].split_of(model).layers(rank).start
        decoder_layers(model)[first].register_forward_pre_hook(clock.forward)
    # Rows of equal length, all on the first process: every batch is full until it ends.
    number = given.rows * given.stages * given.rounds if rank == 0 else 0
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 256, (number, given.prompt), generator=generator).tolist()
    params = SamplingParams(given.completion)
    keys = [(0, 0, row) for row in range(number)]
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    results: dict[str, Any] = {}
    for repeat in range(given.repeats + 1):
        for name, backend in runs.items():
            dist.barrier()
            clock.spent()
            start, links.now = time.perf_counter(), 0
            rollout = backend.generate(prompts, params, keys)
            modelled = links.now / 1e9
            dist.barrier()
            if repeat:  # The first one warms up.
                seconds[name].append(time.perf_counter() - start if given.clock == "wall" else modelled)
            results[name] = rollout.completion_ids
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(summary(given, seconds, results)))
    dist.destroy_process_group()


def summary(given: argparse.Namespace, seconds: dict[str, list[float]], results: dict[str, Any]) -> dict[str, Any]:
    """Return the medians, and how many times faster than `naive` each schedule is."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    how = f"emulated, {given.stage_ms:g} ms per forward" if given.stage_ms else "real compute"
    how += " on GPUs" if given.device == "cuda" else ""
    clock = "wall clock" if given.clock == "wall" else f"clock of {'forwards' if given.stage_ms else 'processor time'}"
    return {
        "stage_time": f"{how}, {clock}",
        "stages": given.stages,
        "rows_per_batch": given.rows,
        "tokens": sum(map(len, results["naive"])),
        "seconds": {name: round(value, 3) for name, value in medians.items()},
        "speedup": {name: round(medians["naive"] / value, 2) for name, value in medians.items()},
        "bound": given.stages,
        "same_tokens": all(rows == results["naive"] for rows in results.values()),
        "load_average": round(os.getloadavg()[0], 1),
        "cores": len(os.sched_getaffinity(0)) if given.stage_ms else os.cpu_count(),
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stages", type=int, default=2, help="processes")
    parser.add_argument("--stage_ms", type=float, default=0.0, help="emulated milliseconds of a forward; 0: compute")
    parser.add_argument("--clock", choices=("model", "wall"), default="model", help="see above")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each stage")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch, a multiple of --stages")
    parser.add_argument("--rounds", type=int, default=1, help="batches of each stage")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model, a multiple of --stages")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size, where the stages compute")
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=32, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(words)
    for name in ("rows", "layers"):
        if getattr(given, name) % given.stages:
            parser.error(f"--{name} {getattr(given, name)} is not a multiple of --stages {given.stages}")
    if given.device == "cuda" and (given.clock != "wall" or torch.cuda.device_count() < given.stages):
        parser.error(
            f"--device cuda needs --clock wall and a GPU for each of --stages {given.stages}; here are"
            f" {torch.cuda.device_count()}"
        )
    return given


def main() -> None:
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(given, folder), nprocs=given.stages)
        print((Path(folder) / "result.json").read_text())


if __name__ == "__main__":
    main()
