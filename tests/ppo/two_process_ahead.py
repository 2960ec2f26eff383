"""What the processes of test_two_process_ahead run: `python two_process_ahead.py FOLDER`, under a launcher.

For each case a run with rollouts ahead, and one that stops in the middle of a rollout. Each process has a sampler
of its own; rows are scored as they arrive.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.utils.startup import freeze_loaded
from tests.fakes import CopyBackend
from tests.ppo.support import SGD, StopAt, base_model, lora, make_trainer, prompts, trained_weights, without_wall_clock

STOP = 6
CASES: dict[str, dict[str, Any]] = {"one_step": {"schedule": "one_step"}}
CASES["async"] = {"schedule": "async", "max_staleness": 2}
CASES["dis"] = {**CASES["async"], "policy_objective": "dis"}
# Rollouts of 4 steps.
RUN = {"num_rollouts": 4, "num_ppo_epochs": 2, "num_minibatches": 2, "rollout_batch_size": 8}
RUN |= {**SGD, "normalize_scores": True}


def make(folder: Path, case: str, *callbacks: Any) -> PPOTrainer:
    backend = CopyBackend(TrunkModel(base_model(), lora()))
    settings = {**RUN, **CASES[case]}
    return make_trainer(folder, dataset=prompts(16), rollout_backend=backend, callbacks=callbacks, **settings)


def main(folder: Path) -> None:
    for case in CASES:
        trainer = make(folder / case / "whole", case)
        trainer.train()
        rank = trainer.accelerator.process_index
        save_file(trained_weights(trainer.model), folder / f"{case}-{rank}.safetensors")
        own = [p for n, p in trainer.model.named_parameters() if "value_head" not in n]
        facts = {
            "num_processes": trainer.accelerator.num_processes,
            "kinds": sorted({(type(p).__name__, p.requires_grad) for p in own}),
            "history": without_wall_clock(trainer.state.log_history),
        }
        (folder / f"{case}-{rank}.json").write_text(json.dumps(facts))
        make(folder / case / "cut", case, StopAt(STOP)).train()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    freeze_loaded()
    main(Path(sys.argv[1]))
