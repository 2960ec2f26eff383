"""What the processes of test_two_process_stop run under torchrun: `python two_process_stop.py FOLDER HOW`.

HOW is "whole", or "token": the second process gets a SIGTERM while it samples.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from tests.checkpoints.crash_runs import PPO, digest, drawing  # noqa: E402
from tests.ppo.support import make_trainer, prompts  # noqa: E402

SENDER = 1
# The signal comes before this token of the sender.
TOKENS = 9


def main(folder: Path, how: str) -> None:
    trainer = make_trainer(folder / "run", dataset=prompts(8), reward=drawing, **{**PPO, "rollout_batch_size": 8})
    rank = trainer.accelerator.process_index
    left = TOKENS

    def pass_by() -> None:
        nonlocal left
        left -= 1
        if left == 0 and rank == SENDER:
            os.kill(os.getpid(), signal.SIGTERM)

    def note(name: str, value: object) -> None:
        (folder / f"{name}-{rank}.json").write_text(json.dumps(value))

    if how == "token":
        poll = trainer.sampler.backend.poll
        trainer.sampler.backend.poll = lambda: (pass_by(), poll())[1]
    try:
        trainer.train(resume_from_checkpoint="auto")
    except SystemExit as stop:
        note("stopped", [stop.code, trainer.state.global_step])
        trainer.accelerator.end_training()
        raise
    note("digest", digest(trainer))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
