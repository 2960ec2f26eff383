"""The four parts of this folder in one run, in Python.

    python recipes/extend/train.py

Needs runs/tiny/sft and the prompts of recipes/tiny. The advantages alone have no name in YAML: they are the trainer's
class.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from advantage import LeaveOneOutTrainer
from backend import TransformersBackend
from judge import on_topic
from reward import names_the_task

from onetrunk import PPOConfig
from onetrunk.data.files import load_rows


def main(num_rollouts: int = 16) -> LeaveOneOutTrainer:
    """Train, save and return the trainer."""
    trainer = LeaveOneOutTrainer(
        model="runs/tiny/sft",
        reward_funcs=[names_the_task, on_topic],
        args=PPOConfig(
            output_dir="runs/extend/train",
            rollout_batch_size=16,
            num_generations=4,
            num_rollouts=num_rollouts,
            max_completion_length=48,
            num_ppo_epochs=2,
            num_minibatches=2,
            whiten_advantages=False,
            learning_rate=3e-3,
            beta=0.05,
            report_to="tensorboard",
            use_cpu=True,
            save_strategy="no",
        ),
        train_dataset=load_rows("runs/tiny/prompts.jsonl"),
        rollout_backend=TransformersBackend(),
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    main()
