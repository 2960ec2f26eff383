"""What the processes of test_two_process_memory run under torchrun: `python two_process_memory.py FOLDER`.

In the update the second process has room for one row; its packs have two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from tests.ppo.support import make_trainer  # noqa: E402


def main(folder: Path) -> None:
    trainer = make_trainer(folder / "run", rollout_batch_size=8, check_memory=False)

    def check(module, args, kwargs):
        if torch.is_grad_enabled() and trainer.accelerator.process_index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    trainer.model.get_base_model().model.register_forward_pre_hook(check, with_kwargs=True)
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
