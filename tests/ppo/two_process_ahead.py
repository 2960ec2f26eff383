"""What the processes of test_two_process_ahead run under torchrun: `python two_process_ahead.py FOLDER`.

A run with rollouts ahead, and one that stops in the middle of a rollout. Each process has a sampler of its own.
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
from tests.fakes import CopyBackend  # noqa: E402
from tests.ppo.support import (  # noqa: E402
    StopAt,
    base_model,
    lora,
    make_trainer,
    prompts,
    trained_weights,
    without_wall_clock,
)

STOP = 6
# Rollouts of 4 steps. SGD: weights are linear in the gradient.
RUN = {"num_rollouts": 4, "num_ppo_epochs": 2, "num_minibatches": 2, "rollout_batch_size": 8, "schedule": "async"}
RUN |= {"max_staleness": 2, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "normalize_scores": True}


def make(folder: Path, *callbacks: Any) -> PPOTrainer:
    backend = CopyBackend(TrunkModel(base_model(), lora()))
    return make_trainer(folder, dataset=prompts(16), rollout_backend=backend, callbacks=callbacks, **RUN)


def main(folder: Path) -> None:
    trainer = make(folder / "whole")
    trainer.train()
    rank = trainer.accelerator.process_index
    save_file(trained_weights(trainer.model), folder / f"weights-{rank}.safetensors")
    history = without_wall_clock(trainer.state.log_history)
    (folder / f"facts-{rank}.json").write_text(json.dumps([trainer.accelerator.num_processes, history]))
    make(folder / "cut", StopAt(STOP)).train()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
