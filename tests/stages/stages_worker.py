"""Run stages one after the other in every process of a launch, and write down what each process held and exchanged."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from onetrunk import cli
from onetrunk.parallel.sharding import local_bytes
from onetrunk.stages import distill, reward, sft
from tests.parallel.split_worker import counted_collectives

STAGES = {"sft": sft, "reward": reward, "distill": distill}


def run(words: list[str]) -> dict[str, Any]:
    """Run a stage; return its exit code, and facts of the model once it has trained."""
    stage, facts = STAGES[words[0]], {}
    recorded = stage.recorded

    @contextlib.contextmanager
    def watched(trainer: Any, *rest: Any) -> Iterator[None]:
        # The processes stay a group for the next case.
        trainer.accelerator.end_training = lambda: None
        with counted_collectives() as traffic, recorded(trainer, *rest):
            yield
        parameters = list(trainer.model.parameters())
        facts.update(
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            distributed_type=trainer.accelerator.distributed_type.value,
            is_wrapped=type(trainer.model_wrapped).__name__,
            kinds=sorted({(type(p).__name__, p.requires_grad) for p in parameters}),
            local_bytes=local_bytes(trainer.model),
            whole_bytes=sum(p.nbytes for p in parameters if not isinstance(p, DTensor)),
            collectives=dict(traffic),
        )

    stage.recorded = watched
    try:
        return {"code": cli.main(words), **facts}
    finally:
        stage.recorded = recorded


if __name__ == "__main__":
    results = {name: run(words) for name, words in json.loads(Path(sys.argv[1]).read_text()).items()}
    rank = dist.get_rank() if dist.is_initialized() else 0
    Path(f"{sys.argv[2]}-{rank}.json").write_text(json.dumps(results))
