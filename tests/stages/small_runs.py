"""Commands of every stage on a base of two layers and eight rows, as small as they can be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onetrunk import cli
from onetrunk.utils.files import load_tensors
from tests.models.reward_adapters import saved_base
from tests.processes import ROOT, python

NOUNS = "cat dog bird fish tree house river stone".split()
TRAINING = ("sft", "reward", "distill", "ppo")
TRAIN = "--use_cpu true --report_to none --disable_tqdm true --save_strategy no --lora_r 2".split()
TRAIN += ["--write_report", "false"]
OWN = {
    "sft": "--max_steps 2 --use_peft true",
    "reward": "--max_steps 2 --use_peft true --activation_checkpointing false",
    "distill": "--max_steps 2 --activation_checkpointing false",
    "ppo": "--reward_funcs reward.py:short --rollout_batch_size 4 --max_completion_length 4 --num_rollouts 1",
    "eval": "--reward_funcs reward.py:short --max_completion_length 4 --use_cpu true",
    "prefs": "--judge rubric --constitution principles.yaml --max_completion_length 4 --use_cpu true",
}
# SGD: weights are linear in the gradient, so that no sign of a rounding error decides.
LINEAR = "--report_to none --disable_tqdm true --lr_scheduler_type constant --optim sgd --learning_rate 0.1".split()
LINEAR += "--model_name_or_path base --lora_r 4 --dtype float32".split()
REWARD = "def short(completions, **kwargs):\n    return [-float(len(c)) for c in completions]\n"
CONSTITUTION = """
name: short
principles:
  - text: The shorter one is better.
    tags: [short]
"""


def write_rows(path: Path, rows: list) -> str:
    """Write rows as JSON lines; return the file's name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def nouns(number: int) -> list[tuple[str, str, int]]:
    """Return two nouns and the index of each of so many rows."""
    return [(NOUNS[i % 8], NOUNS[(i + 3) % 8], i) for i in range(number)]


def judged_pairs(number: int) -> list[dict[str, Any]]:
    """Return so many pairs with the probability that a judge gave them."""
    return [
        {"prompt": f"the {n} ", "chosen": f"runs {n} .", "rejected": f"no {o}", "probability": 0.6 + i % 3 / 10}
        for n, o, i in nouns(number)
    ]


def make_material(folder: Path) -> None:
    """Write a base, a reward function, a constitution and rows of every kind into a folder."""
    saved_base(folder / "base", num_hidden_layers=2)
    rows = [{"prompt": f"the {noun}", "completion": " runs fast"} for noun in NOUNS]
    write_rows(folder / "sft.jsonl", rows)
    write_rows(folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows])
    pairs = [{"prompt": row["prompt"], "chosen": "runs fast", "rejected": "no"} for row in rows]
    write_rows(folder / "reward.jsonl", pairs)
    write_rows(folder / "distill.jsonl", [{**pair, "probability": 0.8} for pair in pairs])
    (folder / "reward.py").write_text(REWARD)
    (folder / "principles.yaml").write_text(CONSTITUTION)


def words_of(verb: str, *options: str) -> list[str]:
    """Return the words of a stage's command, seen from the folder of its material; later options override."""
    rows = f"{verb}.jsonl" if verb in ("sft", "reward", "distill") else "prompts.jsonl"
    words = ["--model_name_or_path", "base", "--dataset_name", rows, "--output_dir", f"out-{verb}"]
    words += OWN[verb].split() + (TRAIN if verb in TRAINING else [])
    if verb == "prefs":
        words += ["--rubric", '{"short": "reward.py:short"}']
    return [verb, *words, *map(str, options)]


def run(verb: str, *options: str) -> int:
    """Run a stage in this process; return its exit code."""
    return cli.main(words_of(verb, *options))


def error_of(capsys: Any) -> str:
    """Return the first error message that was printed; there must be one, and no stack trace."""
    err = capsys.readouterr().err
    assert "Traceback" not in err, err
    return next(line for line in err.splitlines() if line.startswith("error: "))


def metrics(folder: str | Path) -> dict[str, Any]:
    return json.loads(Path(folder, "metrics.json").read_text())


def statistics(folder: str | Path) -> dict[str, Any]:
    return json.loads(Path(folder, "statistics.json").read_text())


def adapter(folder: Path) -> dict[str, Tensor]:
    return load_tensors(folder / "adapter_model.safetensors")


def require_same_adapter(folder: Path, other: Path, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Require that two runs have trained the same adapter, in all its parts."""
    found, expected = adapter(folder), adapter(other)
    assert found.keys() == expected.keys()
    assert all(found[name].any() for name in found if "lora_B" in name), "nothing was trained"
    for name in found:
        torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=rtol)


def on_two_processes(verb: str, *words: object) -> str:
    """Run the script of a stage in two CPU processes, in the working folder; return what it printed."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return python(*launch, f"{ROOT}/scripts/{verb}.py", *words, ACCELERATE_USE_CPU="true").stdout
