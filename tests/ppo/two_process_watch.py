"""What the processes of test_two_process_watch run under torchrun: `python two_process_watch.py FOLDER`.

Rank 1 is slow in the reward. Two of the four rollouts are traced.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

torch.set_num_threads(1)

from tests.ppo.support import even_share, make_trainer  # noqa: E402

SETTINGS = {"num_rollouts": 5, "num_ppo_epochs": 2, "rollout_batch_size": 8, "trace_rollouts": 2}
SLOW_S = 1.0


def main(folder: Path) -> None:
    def reward(prompts, completions, completion_ids, **kwargs):
        if trainer.accelerator.process_index == 1:
            time.sleep(SLOW_S)
        return even_share(prompts, completions, completion_ids)

    trainer = make_trainer(folder / "run", reward=reward, **SETTINGS)
    trainer.train()
    rank = trainer.accelerator.process_index
    (folder / f"history-{rank}.json").write_text(json.dumps(trainer.state.log_history))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
