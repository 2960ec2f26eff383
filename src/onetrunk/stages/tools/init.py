"""`onetrunk init FOLDER --model NAME --data ROWS`: write a short recipe for PPO, to be changed.

The module imports neither torch nor transformers. What fits a GPU is the question of `onetrunk plan`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from onetrunk.stages.options.parser import Parser
from onetrunk.utils.files import atomic_write_text

CONFIG = """\
# PPO with a LoRA policy. `onetrunk config ppo` explains every option; `onetrunk plan` finds what fits your GPUs.
model_name_or_path: {model}
lora_r: 16
dataset_name: {data}
eval_size: 0.05
reward_funcs: [{reward}]
output_dir: {output_dir}

rollout_batch_size: 128
num_rollouts: 100
max_completion_length: 256
num_ppo_epochs: 4
num_minibatches: 4
# If memory runs out, lower these two; the result stays the same.
per_device_train_batch_size: 128
microbatch_tokens: 8192
learning_rate: 1.0e-4
beta: 0.05

save_steps: 160
report_to: tensorboard
log_completions: true
"""
REWARDS = '''"""Scores completions for PPO: a number each, higher is better. Change `score` to what you want.

A reward function has TRL's signature: columns of your rows arrive by name. None means that it does not apply to a row.
"""


def score(prompts, completions, **columns):
    """Return, per completion, the share of its words that are different words: it falls if a text repeats itself."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    words = [text.lower().split() for text in texts]
    return [len(set(row)) / len(row) if row else 0.0 for row in words]
'''


def main(argv: Sequence[str]) -> int:
    """Write the files; return the exit code."""
    parser = Parser(prog="onetrunk init", description="Write a recipe for PPO.", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where ppo.yaml is written")
    parser.add_argument("--model", required=True, help="folder or Hub name of the model to start from")
    parser.add_argument("--data", required=True, help="file, folder or Hub name of rows with a column prompt")
    parser.add_argument("--reward", help="as reward_funcs in ppo; without it, a rewards.py to change is written")
    words = parser.parse_args(list(argv))
    for path in write_recipe(words.folder, words.model, words.data, words.reward):
        print(f"wrote {path}")
    print(f"next: onetrunk ppo --config {words.folder / 'ppo.yaml'} --dry_run, then without --dry_run")
    return 0


def write_recipe(folder: Path, model: str, data: str, reward: str | None) -> list[Path]:
    """Write ppo.yaml and, without a reward, rewards.py; return their paths. Raises ValueError if one exists."""
    values = {
        "model": model,
        "data": data,
        "reward": reward or f"{folder / 'rewards.py'}:score",
        "output_dir": str(Path("runs") / folder.name),
    }
    # JSON strings are YAML strings, whatever they contain.
    config = CONFIG.format(**{name: json.dumps(value, ensure_ascii=False) for name, value in values.items()})
    texts = {folder / "ppo.yaml": config} | ({} if reward else {folder / "rewards.py": REWARDS})
    for path in texts:
        if path.exists():
            raise ValueError(f"{path} exists; name another folder, or delete the file")
    for path, text in texts.items():
        atomic_write_text(path, text)
    return list(texts)
