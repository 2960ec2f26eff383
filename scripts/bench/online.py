"""A reward that changes on the way: what follows it, the critic, a running mean, or the mean of a group?

    python scripts/bench/online.py             # 10 minutes on 1 core

Task B of tests/learning.py: four tokens, of which two of eight are good; after half of the rollouts two others are.
128 completions per rollout: of 128 prompts, or 8 of each of 16. The root of the repository must be in PYTHONPATH.
Results: learning/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import datasets
import torch
from torch import Tensor

from onetrunk.models.trunk import PackOutput
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.types import Pack
from tests import learning

TASK = learning.TASK_B
# Weight of a rollout in the running mean.
NEW_WEIGHT = 0.1
WINDOW = 10


class RunningMean(ExperienceStream):
    """The return less the mean of earlier rollouts, at the same token."""

    mean: Tensor | None = None

    def advantages(self, pack: Pack, output: PackOutput, rewards: Tensor, stopped: Tensor) -> tuple[Tensor, Tensor]:
        returns = rewards.flip(1).cumsum(1).flip(1) * pack.completion_mask
        if output.values.any():  # Not for the metrics, which ask once more with values of 0.
            new = returns.mean(0)
            self.mean = new if self.mean is None else (1 - NEW_WEIGHT) * self.mean + NEW_WEIGHT * new
        return (returns - (0.0 if self.mean is None else self.mean)) * pack.completion_mask, returns


class Groups(ExperienceStream):
    """The return of the completion less the mean of its prompt's completions, for all of its tokens."""

    def advantages(self, pack: Pack, output: PackOutput, rewards: Tensor, stopped: Tensor) -> tuple[Tensor, Tensor]:
        prompts = pack.input_ids[:, : int(pack.prompt_lengths[0])]
        _, group = prompts.unique(dim=0, return_inverse=True)
        total = rewards.sum(1)
        sums, counts = (torch.zeros(int(group.max()) + 1).index_add_(0, group, x) for x in (total, total * 0 + 1))
        advantages = (total - (sums / counts)[group])[:, None] * pack.completion_mask
        return advantages, advantages


GROUP = {"num_generations": 8, "rollout_batch_size": 16}
ARMS: dict[str, tuple[type[ExperienceStream], dict[str, Any]]] = {
    "critic": (ExperienceStream, {"lam": 1.0}),
    "critic, lam 0.95": (ExperienceStream, {"lam": 0.95}),
    "running mean": (RunningMean, {}),
    "groups of 8": (Groups, GROUP),
}


def run(arm: str, rate: float, seed: int, rollouts: int) -> list[float]:
    """Train once; return the mean score before the change, right after it, and at the end."""
    stream, settings = ARMS[arm]
    epochs = learning.SETTINGS["num_ppo_epochs"]

    def good_tokens(prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, **_: Any) -> list[float]:
        first = learning.FIRST + TASK.num_good * (trainer_state.global_step >= rollouts // 2 * epochs)
        good = range(first, first + TASK.num_good)
        return [sum(i in good for i in ids) / len(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        own = {"num_rollouts": rollouts, "learning_rate": rate, "lr_scheduler_type": "constant", **settings}
        trainer = learning.make_trainer(TASK, seed, folder, reward=good_tokens, **own)
        trainer.stream_class = stream
        trainer.train()
    scores = [entry["score/mean"] for entry in trainer.state.log_history if "score/mean" in entry]
    places = (rollouts // 2, rollouts // 2 + WINDOW, rollouts)
    return [sum(scores[end - WINDOW : end]) / WINDOW for end in places]


def main(arguments: list[str] | None = None) -> int:
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rollouts", type=int, default=80)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    print(
        f"| advantages | rate | before the change | {WINDOW} rollouts after it | at the end |\n|---|---|---|---|---|",
        flush=True,
    )
    for arm in given.arms:
        for rate in given.rates:
            runs = [run(arm, rate, seed, given.rollouts) for seed in given.seeds]
            cells = [f"{sum(scores) / len(scores):.3f} ({min(scores):.3f})" for scores in zip(*runs, strict=True)]
            print(f"| {arm} | {rate:g} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
