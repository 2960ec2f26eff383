"""What the processes of test_pipelined run: `python pipelined_runs.py FOLDER`, alone or launched.

The cases are those of two_processes.py. Alone, one process samples by itself; launched, two are stages of a pipeline
while they sample, and replicas (DDP) or shards (FSDP2) while they score and update.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from torch.distributed.tensor import DTensor

from onetrunk.models.base_model import decoder_layers
from onetrunk.utils.startup import freeze_loaded
from tests.ppo import two_processes
from tests.ppo.support import make_trainer

PIPELINED = {"rollout_backend": "pipelined", "pipeline_batches": 3}
IS_ALONE = os.environ.get("WORLD_SIZE", "1") == "1"
CASES = {"shared": {}, "dealt": {"max_rollout_rows": 2, "pipeline_split": [1, 1]}}


def whole_layers(folder: Path) -> None:
    """Write which layers a process holds whole while it samples."""
    case = {**two_processes.SHAPE, **two_processes.PLACE, **PIPELINED, "num_rollouts": 1}
    trainer, seen = make_trainer(folder / "layers", **case), set()
    backend = trainer.sampler.backend
    poll = backend.poll

    def look() -> None:
        for number, layer in enumerate(decoder_layers(trainer.model)):
            layer = vars(layer).get("stands_for", layer)
            if not any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
                seen.add(number)
        poll()

    backend.poll = look
    trainer.train()
    rank = trainer.accelerator.process_index
    (folder / f"layers-{rank}.json").write_text(json.dumps(sorted(seen)))


def main(folder: Path) -> None:
    for name, settings in CASES.items():
        if not IS_ALONE:
            two_processes.CASES[name] = {**two_processes.CASES[name], **PIPELINED, **settings}
        two_processes.run(name, folder)
    if not IS_ALONE:
        whole_layers(folder)
        two_processes.resume(folder, **PIPELINED, num_rollouts=3).accelerator.end_training()


if __name__ == "__main__":
    freeze_loaded()
    main(Path(sys.argv[1]))
