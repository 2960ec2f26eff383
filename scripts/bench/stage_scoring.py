"""Seconds of a rollout in two training stages: scored after it, and on the slots that batches leave when they end.

    python scripts/bench/stage_scoring.py
    python scripts/bench/stage_scoring.py --max_rows 8

It starts two processes, pinned to a core each, and prints one JSON line: wall-clock medians of sampling and scoring
together, and the share of the rows that were scored while others decoded. Completions end at random, as those of a
policy do. The two ways take turns; their outputs are compared bit for bit.
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

from onetrunk.models.pipeline import LayerSplit
from onetrunk.models.staged import StagedTrunk, keep_stage, staged
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.packing import PackLimits
from onetrunk.ppo.sampling import rollout_packs
from onetrunk.rollouts import PipelinedBackend, SamplingParams
from onetrunk.rollouts.stage_scoring import StageScoring
from onetrunk.types import PackOutput

STAGES, ROLES, MINIBATCHES, LIMITS = 2, ("policy", "value", "reference"), 4, PackLimits(4)
CPU = torch.device("cpu")


class Rollouts:
    """Samples and scores the same rows, in either way."""

    def __init__(self, stage: StagedTrunk, given: argparse.Namespace):
        self.stage = stage
        self.backend = PipelinedBackend(stage.trunk, stages=STAGES, shares_rows=True, max_rows=given.max_rows)
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
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES)
    trunk = TrunkModel(tiny_head(given), LoraConfig(r=8, target_modules="all-linear"))
    keep_stage(trunk, LayerSplit((given.layers // STAGES,) * STAGES), CPU)
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
    parser.add_argument("--rows", type=int, default=32, help=f"completions, a multiple of {MINIBATCHES}")
    parser.add_argument("--max_rows", type=int, default=None, help="most rows that decode at once, per process")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model, an even number")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=96, help="most tokens of a completion")
    parser.add_argument("--stop_tokens", type=int, default=8, help="tokens that end a completion, of 256")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    given.stage_ms = 0
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, args=(given, folder), nprocs=STAGES)
        print((Path(folder) / "result.json").read_text())


if __name__ == "__main__":
    main()
