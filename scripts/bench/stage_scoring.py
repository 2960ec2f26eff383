"""Seconds of a rollout in training stages: scored after it, and on the slots that batches leave when they end.

    python scripts/bench/stage_scoring.py
    python scripts/bench/stage_scoring.py --max_rows 4
    python scripts/bench/stage_scoring.py --stages 4 --stage_ms 30

It starts the processes, pinned to a core each, and prints one JSON line: wall-clock medians of sampling and scoring
together, and the share of the rows that were scored while others decoded. Completions end at random, as those of a
policy do. The two ways take turns; their outputs are compared bit for bit.

With `--stage_ms` the time of a stage is EMULATED: a forward of its layers takes so long, whether of a token or of a
pack, as with packs so small that reading the weights bounds them too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from bench_pipeline import tiny_head
from peft import LoraConfig

from onetrunk.models.base import decoder_layers
from onetrunk.models.pipeline import LayerSplit
from onetrunk.models.staged import StagedTrunk, keep_stage, staged
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.packing import PackLimits
from onetrunk.ppo.sampling import rollout_packs
from onetrunk.rollouts import PipelinedBackend, SamplingParams
from onetrunk.rollouts.stage_scoring import StageScoring
from onetrunk.types import PackOutput

ROLES, MINIBATCHES, LIMITS = ("policy", "value", "reference"), 4, PackLimits(4)
CPU = torch.device("cpu")


class Rollouts:
    """Samples and scores the same rows, in either way."""

    def __init__(self, stage: StagedTrunk, given: argparse.Namespace):
        self.stage = stage
        self.backend = PipelinedBackend(stage.trunk, stages=given.stages, shares_rows=True, max_rows=given.max_rows)
        generator = torch.Generator().manual_seed(1)
        self.prompts = torch.randint(32, 256, (given.rows, given.prompt), generator=generator).tolist()
        self.keys = [(0, 0, row) for row in range(given.rows)]
        self.minibatches = torch.randperm(given.rows, generator=generator).view(MINIBATCHES, -1).sort().values.tolist()
        # Of 256 tokens, whose probabilities differ little.
        self.params = SamplingParams(given.completion, stop_token_ids=tuple(range(given.stop_tokens)))

    def made(self, scores_early: bool) -> tuple[dict[tuple[int, ...], PackOutput], float]:
        """Return the outputs of every pack, and the share of rows that were scored while others decoded."""
        prompts, stage = self.prompts, self.stage
        scoring = StageScoring(stage, prompts, self.minibatches, LIMITS, 0, ROLES, 1.0)
        keywords = {"scoring": scoring} if scores_early else {}
        rollout = self.backend.generate(prompts, self.params, self.keys, **keywords)
        packs = {tuple(x.rows): x.pack for x in rollout_packs(rollout, self.minibatches, LIMITS, 0, CPU)}
        rest = [rows for rows in packs if rows not in scoring.outputs]
        outputs = stage.outputs([packs[rows] for rows in rest], ROLES, 1.0)
        early = list(scoring.outputs)
        known = stage.known_outputs([packs[rows] for rows in early], ROLES, list(scoring.outputs.values()))
        return dict(zip([*rest, *early], [*outputs, *known], strict=True)), scoring.scored_share


def work(rank: int, given: argparse.Namespace, folder: str) -> None:
    """Sample and score in turns on one stage; the first one writes the result."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if not given.stage_ms:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=given.stages)
    trunk = TrunkModel(tiny_head(given), LoraConfig(r=8, target_modules="all-linear"))
    split = LayerSplit((given.layers // given.stages,) * given.stages)
    keep_stage(trunk, split, CPU)
    if given.stage_ms:
        first = decoder_layers(trunk)[split.layers(rank).start]
        first.register_forward_pre_hook(lambda *_: time.sleep(given.stage_ms / 1000))
    rollouts = Rollouts(staged(trunk.eval()), given)
    seconds: dict[str, list[float]] = {"after": [], "while": []}
    outputs: dict[str, Any] = {}
    for repeat in range(given.repeats + 1):
        for name in seconds:
            dist.barrier()
            start = time.perf_counter()
            outputs[name], share = rollouts.made(scores_early=name == "while")
            dist.barrier()
            if repeat:  # The first one warms up.
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        result = {
            "stage_time": f"emulated, {given.stage_ms:g} ms per forward" if given.stage_ms else "real compute",
            "stages": given.stages,
            "rows": given.rows,
            "tokens": sum(int(x.logprobs.ne(0).sum()) for x in outputs["after"].values()),
            "seconds": {name: round(value, 3) for name, value in medians.items()},
            "speedup": round(medians["after"] / medians["while"], 3),
            "scored_early": share,
            "same_outputs": all(same(x, outputs["while"][rows]) for rows, x in outputs["after"].items()),
            "load_average": round(os.getloadavg()[0], 1),
        }
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def same(one: PackOutput, other: PackOutput) -> bool:
    return all(a is None if b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--stages", type=int, default=2, help="processes")
    parser.add_argument("--stage_ms", type=float, default=0.0, help="emulated milliseconds of a forward; 0: compute")
    parser.add_argument("--rows", type=int, default=32, help=f"completions, a multiple of {MINIBATCHES}")
    parser.add_argument("--max_rows", type=int, default=None, help="most rows that decode at once, per process")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model, a multiple of --stages")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=96, help="most tokens of a completion")
    parser.add_argument("--stop_tokens", type=int, default=8, help="tokens that end a completion, of 256")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    for name, factor in (("layers", given.stages), ("rows", MINIBATCHES)):
        if getattr(given, name) % factor:
            parser.error(f"--{name} {getattr(given, name)} is not a multiple of {factor}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(given, folder), nprocs=given.stages)
        print((Path(folder) / "result.json").read_text())


if __name__ == "__main__":
    main()
