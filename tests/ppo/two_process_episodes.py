"""What the processes of test_episodes_in_training run: episodes of which all fail on the second of two processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from onetrunk.ppo.rollout import PromptOrder  # noqa: E402
from onetrunk.rollouts.playing import SEEDS  # noqa: E402
from onetrunk.utils.randomness import ENVIRONMENT_STREAM, derived_seed  # noqa: E402
from tests.ppo.support import logged  # noqa: E402
from tests.ppo.test_episodes_in_training import Words, words_trainer  # noqa: E402

LIMITS = {"some_fail": 0.5, "too_many_fail": 0.4}
METRICS = ("score/mean", "episode/failed", "episode/turns", "reward/turn_0", "kl/ref", "policy/loss", "grad_norm")


class Failing(Words):
    seeds, failed = (), 0

    def reset(self, *, seed=None, options=None):
        if seed in self.seeds:
            Failing.failed += 1
            raise OSError("no room")
        return super().reset(seed=seed)


def run(name: str, folder: Path) -> None:
    settings = {"max_failed_episodes_fraction": LIMITS[name], "max_unscored_fraction": 1.0, "num_rollouts": 1}
    reward = [lambda completions, **kwargs: [float(len(text)) for text in completions]]
    trainer = words_trainer(folder / name, Failing, reward, rollout_batch_size=4, **settings)
    rows, _ = PromptOrder.from_config(trainer.args, trainer.train_dataset).deal(0, 1, 2)
    Failing.seeds = {derived_seed(trainer.args.seed, 0, row, ENVIRONMENT_STREAM) % SEEDS for row in rows}
    Failing.failed, error = 0, ""
    try:
        trainer.train()
    except RuntimeError as raised:
        error = str(raised)
    metrics = {} if error else {metric: logged(trainer, metric) for metric in METRICS}
    facts = {"failed": Failing.failed, "error": error, "metrics": metrics}
    (folder / f"{name}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    for case in LIMITS:
        run(case, Path(sys.argv[1]))
