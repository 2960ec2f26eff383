"""What the processes of test_two_process_ahead run: `python two_process_ahead.py FOLDER`, under a launcher.

For each case a run with rollouts ahead, and one that stops in the middle of a rollout. Each process has a sampler
of its own; rows are scored as they arrive.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

from safetensors.torch import save_file  # noqa: E402

from onetrunk.models.trunk import TrunkModel  # noqa: E402
from onetrunk.ppo.trainer import PPOTrainer  # noqa: E402
from onetrunk.utils.startup import freeze_loaded  # noqa: E402
from tests.fakes import CopyBackend  # noqa: E402
from tests.ppo.support import StopAt, base_model, lora, make_trainer, prompts, trained_weights, without_wall_clock  # noqa: E402

STOP = 6
CASES: dict[str, dict[str, Any]] = {"one_step": {"schedule": "one_step"}}
CASES["async"] = {"schedule": "async", "max_staleness": 2}
CASES["dis"] = {**CASES["async"], "policy_objective": "dis"}
# Rollouts of 4 steps. SGD: weights are linear in the gradient.
RUN = {"num_rollouts": 4, "num_ppo_epochs": 2, "num_minibatches": 2, "rollout_batch_size": 8}
RUN |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "normalize_scores": True}


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
        facts = {
            "num_processes": trainer.accelerator.num_processes,
            "kinds": sorted(
                {
                    (type(p).__name__, p.requires_grad)
                    for n, p in trainer.model.named_parameters()
                    if "value_head" not in n
                }
            ),
            "history": without_wall_clock(trainer.state.log_history),
        }
        (folder / f"{case}-{rank}.json").write_text(json.dumps(facts))
        make(folder / case / "cut", case, StopAt(STOP)).train()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    freeze_loaded()
    main(Path(sys.argv[1]))
