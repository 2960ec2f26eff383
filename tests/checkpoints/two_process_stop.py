"""What the processes of test_two_process_stop run under torchrun: `python two_process_stop.py FOLDER HOW`.

HOW is "whole", or "token": the second process gets a SIGTERM while it samples.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from tests.checkpoints.crash_runs import PPO, digest, drawing  # noqa: E402
from tests.ppo.support import make_trainer, prompts  # noqa: E402


def main(folder: Path, how: str) -> None:
    trainer = make_trainer(folder / "run", dataset=prompts(8), reward=drawing, **{**PPO, "rollout_batch_size": 8})
    rank = trainer.accelerator.process_index
    poll, tokens = trainer.sampler.backend.poll, itertools.count()

    def send_and_poll() -> None:
        if next(tokens) == 8 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        poll()

    def note(name: str, value: object) -> None:
        (folder / f"{name}-{rank}.json").write_text(json.dumps(value))

    if how == "token":
        trainer.sampler.backend.poll = send_and_poll
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
