"""What the processes of test_two_process_alarm run under torchrun: `python two_process_alarm.py FOLDER`.

A run of four rollouts that an alarm ends with the second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from tests.ppo.support import make_trainer, without_wall_clock  # noqa: E402

SETTINGS = {"num_rollouts": 4, "num_ppo_epochs": 2, "rollout_batch_size": 8, "logging_steps": 3}
SETTINGS |= {"alarm_limits": {"entropy": 10.0}, "alarm_patience": 2, "stop_on_alarm": ["entropy"]}


def main(folder: Path) -> None:
    trainer = make_trainer(folder / "run", **SETTINGS)
    trainer.train()
    facts = {
        "step": trainer.state.global_step,
        "said": trainer.alarms.explanation,
        "alarms": trainer.alarms.state_dict(),
        "history": without_wall_clock(trainer.state.log_history),
    }
    rank = trainer.accelerator.process_index
    (folder / f"facts-{rank}.json").write_text(json.dumps([trainer.accelerator.num_processes, facts]))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
