"""What the processes of test_episodes_in_training run: `python two_process_episodes.py FOLDER [CASE ...]`.

Episodes of several turns, and episodes of which all fail on the second of two processes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from safetensors.torch import save_file

from onetrunk.ppo.rollout import PromptOrder
from onetrunk.rollouts.episodes.playing import SEEDS
from onetrunk.utils.randomness import ENVIRONMENT_STREAM, derived_seed
from tests.ppo.support import SGD, logged, trained_weights
from tests.ppo.test_episodes_in_training import COMPACTED, Words, words_trainer

LIMITS = {"some_fail": 0.5, "too_many_fail": 0.4}
# Of compacted contexts processes get other numbers of segments.
SEVERAL_TURNS = {"several_turns": {"max_completion_length": 30, "gae_unit": "turn"}, "compacted": COMPACTED}
SETTINGS = {"num_rollouts": 2, "rollout_batch_size": 8, **SGD}
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


def run_several_turns(case: str, folder: Path) -> None:
    """Train on episodes of several turns, whose rewards arrive where they were earned; keep weights and metrics."""
    name, rank = folder / case, os.environ.get("RANK", "0")
    trainer = words_trainer(name, **SEVERAL_TURNS[case], **SETTINGS)
    before = trained_weights(trainer.model)
    trainer.train()
    save_file(before, f"{name}-{rank}-before.safetensors")
    save_file(trained_weights(trainer.model), f"{name}-{rank}.safetensors")
    kinds = sorted({type(p).__name__ for p in trainer.model.parameters()})
    metrics = {metric: logged(trainer, metric) for metric in (*METRICS, "episode/compactions")}
    facts = {"metrics": {metric: values for metric, values in metrics.items() if values}, "kinds": kinds}
    Path(f"{name}-{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    for case in sys.argv[2:] or [*SEVERAL_TURNS, *LIMITS]:
        if case in SEVERAL_TURNS:
            run_several_turns(case, Path(sys.argv[1]))
        else:
            run(case, Path(sys.argv[1]))
