"""Our PPOTrainer on the study of learning: one factor at a time around the default.

    python scripts/bench/learning.py --task four_tokens
    python scripts/bench/learning.py --task sums --arms shared top-1

The defaults with adapters on all layers (`shared`), on the top quarter, and with lam 1. On tasks of turns (`chain-1`,
`chain`, `chain-16`, `dialogue`) `turn-rewards` pays each turn when it ends, and `sum` pays everything at the end.
Needs the repository's root in PYTHONPATH. Results: learning/README.md.
"""

from __future__ import annotations

import os

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import tempfile
import time
from typing import Any

import datasets
from datasets import Dataset
from learning_study import FOUR_RATES, Arm, Curve, Rule, parse, study
from learning_tasks import TINY_TASKS, TURN_TASKS, FourTurns
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback

from onetrunk import PPOTrainer
from onetrunk.rewards import PerTurn
from tests import learning

RATES = {task: [{"learning_rate": rate} for rate in FOUR_RATES] for task in TINY_TASKS}
# The best rate of few layers is higher.
HIGHER = {task: [{"learning_rate": 4 * rate} for rate in FOUR_RATES] for task in TINY_TASKS}
TWO_RATES = [{"learning_rate": rate} for rate in (5e-4, 1e-3)]
TURNS = {task: [{"learning_rate": rate} for rate in FOUR_RATES[1:]] for task in TURN_TASKS}
TURNS["dialogue"] = TWO_RATES
for task in TURN_TASKS:
    del RATES[task], HIGHER[task]
PRETRAINED = {"replies": [{"learning_rate": rate} for rate in (5e-4, 1e-3, 2e-3)], "rules": TWO_RATES}
ONE_RATE = {"replies": [{"learning_rate": 5e-4}], "sums": [{"learning_rate": 1e-3}]}
TWICE = {task: [{"learning_rate": 2 * entry["learning_rate"]} for entry in grid] for task, grid in ONE_RATE.items()}
HALF = {task: [{"learning_rate": entry["learning_rate"] / 2} for entry in grid] for task, grid in ONE_RATE.items()}
EVERY_LAYER = {"lora": {"layers_to_transform": None}}
ARMS = [
    Arm("turn-rewards", {"pays": "turns"}, TURNS),
    Arm("sum", {"pays": "end"}, TURNS),
    # GAE whose steps are turns.
    Arm("turn-gae", {"pays": "turns", "gae_unit": "turn"}, TURNS),
    Arm("sum-turn-gae", {"pays": "end", "gae_unit": "turn"}, TURNS),
    Arm("sum-lam-1", {"pays": "end", "lam": 1.0}, TURNS),
    Arm("shared", {}, {**RATES, **PRETRAINED}),
    Arm("top-1", {"adapter_layers": "top-1"}, HIGHER),
    # At the default rate of PPOConfig, half and a quarter of it. A run takes half an hour.
    Arm("all-layers", EVERY_LAYER, {"replies": [{"learning_rate": 3e-4}]}),
    Arm("all-layers-half-rate", EVERY_LAYER, {"replies": [{"learning_rate": 1.5e-4}]}),
    Arm("all-layers-quarter-rate", EVERY_LAYER, {"replies": [{"learning_rate": 7.5e-5}]}),
    # 40 fits of the head per rollout of 32 completions, in place of 10.
    Arm("40-fits", {"value_steps": 160}, {"replies": [{"learning_rate": 1e-3}]}),
    # GAE without decay: the whole return after a token, less its value.
    Arm("lam-1", {"lam": 1.0}, RATES),
    # What the defaults could be instead, one at a time around `one-rate`: --out learning/defaults.
    Arm("one-rate", {}, ONE_RATE),
    Arm("half-rate", {}, HALF),
    Arm("twice-rate", {}, TWICE),
    Arm("warmup", {"warmup_steps": 0.1}, ONE_RATE),
    Arm("constant-rate", {"lr_scheduler_type": "constant"}, ONE_RATE),
    Arm("1-epoch", {"num_ppo_epochs": 1}, TWICE),
    Arm("2-epochs", {"num_ppo_epochs": 2}, ONE_RATE),
    Arm("2-minibatches", {"num_minibatches": 2}, ONE_RATE),
    # A head that has seen 128 completions before the policy trains.
    Arm("pretrained-head", {"value_pretraining_rollouts": 4}, ONE_RATE),
    # As many completions with twice, or half as many rollouts.
    Arm("64-completions", {"rollout_batch_size": 64}, ONE_RATE),
    Arm("256-completions", {"rollout_batch_size": 256}, ONE_RATE),
]


class Recorder(TrainerCallback):
    """Keeps score, KL and CPU seconds of every rollout, and how much the values explained."""

    def __init__(self, rule: Rule) -> None:
        self.curve, self.rule = Curve(), rule
        self.start = 0.0
        self.explained: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "score/mean" in logs:
            # An environment scores an episode itself.
            score = self.rule.taken() if self.rule.scores else logs["score/mean"]
            self.curve.add(score, logs["kl/ref"], time.process_time() - self.start)
            self.explained.append(logs["value/explained_variance"])


def make_trainer(task: Any, rule: Rule, settings: dict[str, Any], seed: int, rollouts: int, folder: str) -> PPOTrainer:
    """Return our trainer of a task; settings that are not given are those of the learning tests."""
    settings = {**settings, "num_rollouts": rollouts}
    if isinstance(task, FourTurns):
        return learning.make_chain_trainer(task.chain, seed, folder, **settings)
    by_turn = settings.pop("pays", "end") == "turns"
    lora, backend = {**task.lora, **settings.pop("lora", {})}, settings.pop("rollout_backend", None)
    has_turns = hasattr(task, "environment")
    config = learning.make_config(folder, seed, task.length, {**task.settings, "beta": task.beta, **settings})
    shown = task.messages if has_turns else task.text
    trainer = PPOTrainer(
        task.model(seed),
        rule.function(lambda *ids: PerTurn(task.turn_rewards(*ids))) if by_turn else rule.function(),
        config,
        Dataset.from_dict({"prompt": [shown(row) for row in task.prompts(seed).tolist()]}),
        processing_class=rule.tokenizer,
        peft_config=LoraConfig(**lora),
        environment_factory=task.environment if has_turns else None,
        rollout_backend=backend,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run(task: Any, settings: dict[str, Any], seed: int, rollouts: int) -> tuple[Curve, dict[str, Any]]:
    """Train once."""
    before = {f"{name}_before": value for name, value in task.held_out(task.model(seed)).items()}
    with tempfile.TemporaryDirectory() as folder:
        rule = Rule(task, task.tokenizer())
        trainer, recorder = make_trainer(task, rule, settings, seed, rollouts, folder), Recorder(rule)
        trainer.add_callback(recorder)
        trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    later = recorder.explained[rollouts // 10 :]
    explained = {"explained_variance": round(sum(later) / len(later), 4)}
    return recorder.curve, {"trained": trained, **explained, **before, **task.held_out(trainer.model)}


def main(arguments: list[str] | None = None) -> None:
    datasets.disable_progress_bars()
    study(parse(__doc__.split("\n\n")[0], ARMS, arguments), ARMS, run)


if __name__ == "__main__":
    main()
