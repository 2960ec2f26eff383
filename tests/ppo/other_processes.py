"""What the processes of test_other_processes run: `python other_processes.py OUTPUT [CHECKPOINT]`.

Trains to the end, from the start or from a checkpoint that another number of processes wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from tests.ppo.support import SGD, make_trainer, prompts, trained_weights, without_wall_clock

# Two rollouts of 4 steps; a checkpoint after each step.
RUN = {"num_rollouts": 2, "num_ppo_epochs": 2, "num_minibatches": 2, "rollout_batch_size": 8, **SGD}
RUN |= {"save_strategy": "steps", "save_steps": 1}
# Logs every three steps: at a checkpoint some metrics wait for their log. The states at the cut are captured.
RUN |= {"logging_steps": 3, "adapter_layers": "top-1", "normalize_scores": True}


def main(output: Path, checkpoint: str | None) -> None:
    trainer = make_trainer(output, dataset=prompts(16), **RUN)
    trainer.train(resume_from_checkpoint=checkpoint)
    rank = trainer.accelerator.process_index
    save_file(trained_weights(trainer.model), output / f"weights-{rank}.safetensors")
    facts = {"world_size": trainer.accelerator.num_processes, "history": without_wall_clock(trainer.state.log_history)}
    (output / f"facts-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
