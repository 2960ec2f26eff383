"""`onetrunk init FOLDER`: write a recipe for PPO from a few words, and check that it can be read.

    onetrunk init my-run --model Qwen/Qwen2.5-0.5B-Instruct --data prompts.jsonl --gpu_gib 24

The module imports neither torch nor transformers. The size of a model is read from its config.json, or from its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onetrunk.costs import ModelShape
from onetrunk.stages.options.parser import Parser, UsageError
from onetrunk.stages.options.reading import read
from onetrunk.stages.secrets import say
from onetrunk.utils.files import atomic_path, read_json

GIB = 2**30
# The share of a GPU's memory that 16-bit weights may take before they are loaded in 4 bit.
WEIGHTS_SHARE = 0.5
# Free memory for activations per GPU, GiB -> tokens in one forward; the first row that fits.
FORWARD_TOKENS = ((48, 16_384), (16, 8_192), (8, 4_096), (0, 2_048))

REWARD_FILE = '''"""Scores completions for PPO: a number each, higher is better. Change `score` to what you want.

A reward function has TRL's signature: columns of your rows arrive by name. None means that it does not apply to a row.
"""


def score(prompts, completions, **columns):
    """Return, per completion, the share of its words that are different words: it falls if a text repeats itself."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    words = [text.lower().split() for text in texts]
    return [len(set(row)) / len(row) if row else 0.0 for row in words]
'''


@dataclass(frozen=True)
class Recipe:
    """What `init` was told.

    Args:
        folder: to write to.
        model, data, reward: as in PPO's options; reward None: a file with a function to change is written.
        gpu_gib: memory of one GPU; 0: none.
        billions: weights of the model in billions; None: not known.
        num_layers, positions: of the model; None: not known.
    """

    folder: Path
    model: str
    data: str
    reward: str | None
    gpu_gib: float
    billions: float | None
    num_layers: int | None
    positions: int | None = None

    @property
    def weights_gib(self) -> float | None:
        """Memory of the weights in 16 bit."""
        return None if self.billions is None else self.billions * 1e9 * 2 / GIB


def main(argv: Sequence[str]) -> int:
    """Write the files; return the exit code."""
    parser = Parser(prog="onetrunk init", description="Write a recipe for PPO.", allow_abbrev=False)
    parser.add_argument("folder", help="folder that is created, or has none of the files yet")
    parser.add_argument("--model", required=True, help="folder or Hub name of the model to start from")
    parser.add_argument("--data", required=True, help="file, folder or Hub name of rows with a column prompt")
    parser.add_argument("--reward", help="as reward_funcs in ppo; without it, a function to change is written")
    parser.add_argument("--gpu_gib", type=float, default=0.0, help="memory of one GPU, GiB; 0 (default): a CPU")
    parser.add_argument("--billions", type=float, help="weights of the model in billions, if its name does not say")
    try:
        words = parser.parse_args(list(argv))
        for path in write_recipe(recipe_of(words)):
            print(f"wrote {path}")
    except SystemExit:
        return 0
    except UsageError as error:
        say(f"error: {error}", "all options: onetrunk init --help")
        return 2
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    config = Path(words.folder) / "ppo.yaml"
    print(f"next: onetrunk ppo --config {config} --dry_run, then without --dry_run")
    return 0


def recipe_of(words: Any) -> Recipe:
    """Return the Recipe of parsed words; reads the model's config.json if the model is a folder."""
    if words.gpu_gib < 0:
        raise UsageError(f"--gpu_gib is {words.gpu_gib:g}; give the memory of one GPU in GiB, or 0 for none")
    if words.billions is not None and words.billions <= 0:
        raise UsageError(f"--billions is {words.billions:g}; give the number of weights in billions, such as 0.5")
    billions, num_layers, positions = words.billions, None, None
    path = Path(words.model) / "config.json"
    if path.is_file():
        config = read_json(path)
        shape, positions = ModelShape.from_config(SimpleNamespace(**config)), config.get("max_position_embeddings")
        billions, num_layers = billions or shape.parameters / 1e9, shape.num_layers
    if billions is None:
        named = re.search(r"(\d+(?:\.\d+)?)\s*([bBmM])(?![A-Za-z])", words.model.rpartition("/")[2])
        billions = named and float(named[1]) / (1000 if named[2] in "mM" else 1)
    return Recipe(
        Path(words.folder), words.model, words.data, words.reward, words.gpu_gib, billions, num_layers, positions
    )


def write_recipe(recipe: Recipe) -> list[Path]:
    """Write the files of a recipe and return their paths.

    Raises:
        ValueError: one of them exists, or the settings do not fit together.
        FileNotFoundError: there is no such model, data or reward.
    """
    reward = recipe.reward or f"{recipe.folder / 'rewards.py'}:score"
    texts = {"ppo.yaml": config_of(recipe, reward)}
    if recipe.reward is None:
        texts["rewards.py"] = REWARD_FILE
    existing = [name for name in texts if (recipe.folder / name).exists()]
    if existing:
        raise ValueError(f"{recipe.folder / existing[0]} exists; name another folder, or delete the file")
    is_new = not recipe.folder.exists()
    recipe.folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in texts.items():
        paths.append(recipe.folder / name)
        with atomic_path(paths[-1]) as path:
            path.write_text(text, encoding="utf-8")
    try:
        read("ppo", ["--config", str(recipe.folder / "ppo.yaml")])
    except (ValueError, OSError):
        for path in paths:
            path.unlink()
        if is_new:
            recipe.folder.rmdir()
        raise
    return paths


def config_of(recipe: Recipe, reward: str) -> str:
    """Return the YAML of a recipe, with a reason for every choice."""
    on_gpu = recipe.gpu_gib > 0
    lines = [
        f"# PPO from {recipe.model}: onetrunk ppo --config {recipe.folder / 'ppo.yaml'}",
        "# `onetrunk config ppo` prints every option, `onetrunk ppo --help` the ones that matter most.",
        "",
        *_entries(model_name_or_path=recipe.model),
        *precision_lines(recipe),
        "lora_r: 16",
        *_layer_lines(recipe),
        "",
        *_entries(dataset_name=recipe.data),
        "eval_size: 0.05  # this share of the prompts is held out, and evaluated before and after",
        *_entries(reward_funcs=[reward]),
        "",
        f"rollout_batch_size: {128 if on_gpu else 16}  # prompts per rollout",
        "num_rollouts: 100",
        f"max_completion_length: {min(256, (recipe.positions or 512) // 2)}",
        "num_ppo_epochs: 4",
        "num_minibatches: 4  # 16 optimizer steps per rollout",
        f"per_device_train_batch_size: {128 if on_gpu else 8}  # rows in one forward; it does not change the result",
        f"microbatch_tokens: {forward_tokens(recipe)}  # tokens in one forward; lower it if memory runs out",
        "learning_rate: 1.0e-4",
        "beta: 0.05  # KL to the reference; raise it if completions drift",
        "",
        *_entries(output_dir=str(Path("runs") / recipe.folder.name)),
        "save_steps: 160  # every 10 rollouts",
        "report_to: tensorboard",
        "log_completions: true",
    ]
    return "\n".join(lines) + "\n"


def precision_lines(recipe: Recipe) -> list[str]:
    """Return the settings of the base model's precision, for the GPU and the size of the model."""
    if recipe.gpu_gib == 0:
        return ["use_cpu: true", "dtype: float32"]
    lines = ["dtype: bfloat16"]
    weights = recipe.weights_gib
    if weights is None:
        return [*lines, "# load_in_4bit: true  # if the weights take more than half of the GPU's memory"]
    if weights > WEIGHTS_SHARE * recipe.gpu_gib:
        lines.append(f"load_in_4bit: true  # {weights:.1f} GiB in bfloat16 would not leave room on {recipe.gpu_gib:g}")
        lines.append("activation_checkpointing: true")
    return lines


def forward_tokens(recipe: Recipe) -> int:
    """Return how many tokens one forward may have, by the memory that the weights leave."""
    weights = recipe.weights_gib or 0.0
    is_4bit = weights > WEIGHTS_SHARE * recipe.gpu_gib
    free = recipe.gpu_gib - (weights * 0.3 if is_4bit else weights)
    # A larger model keeps more per token: relative to one of a billion weights.
    free /= max(1.0, (recipe.billions or 1.0) ** 0.5)
    return next((tokens for least, tokens in FORWARD_TOKENS if free >= least), FORWARD_TOKENS[-1][1])


def _layer_lines(recipe: Recipe) -> list[str]:
    if recipe.num_layers is None or recipe.num_layers < 4:
        return ["adapter_layers: all  # top-8: only the last 8 layers train, the others run once per rollout"]
    return [f"adapter_layers: all  # top-{recipe.num_layers // 4}: the lower layers run once per rollout; faster"]


def _entries(**values: Any) -> list[str]:
    return [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
