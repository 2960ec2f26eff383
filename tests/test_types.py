"""The public names as a type checker sees them: correct code passes mypy's strict mode, and mistakes are found."""

import os
import sys

import pytest

import onetrunk
from tests.processes import ROOT, finished

USE = """
from collections.abc import Sequence

from datasets import Dataset

{imports}

def short(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float | None]:
    return [-float(len(text)) for text in completions]


class Reinforce(ExperienceStream):
    pass


class Own(PPOTrainer):
    stream_class = Reinforce


args = PPOConfig(output_dir="out", beta=0.1, num_rollouts=3, stop_tokens=["a"])
beta: float = args.beta
slots: int = args.steps_per_rollout
trainer = Own("base", [short], args, Dataset.from_dict({{"prompt": ["a"]}}), callbacks=None)
trainer.train(resume_from_checkpoint="auto")
metrics: dict[str, float] = trainer.final_evaluation()
version: str = __version__
"""
# Code -> the error that mypy reports.
MISTAKES = {
    "from onetrunk import PPOTrainr": "attr-defined",
    'args.beta = "much"': "assignment",
    'PPOConfig(output_dir="out", beta="much")': "arg-type",
    'Own("base", short, args, ref_model=None)': "call-arg",
    'Own("base", short, args, callbacks=3)': "arg-type",
    "name: str = trainer.planned_steps()": "assignment",
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_code_that_uses_the_public_names_passes_and_mistakes_are_found(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed; `make setup` installs it")
    imports = "\n".join(f"from onetrunk import {name}" for name in onetrunk.__all__)
    code = USE.format(imports=imports)
    first = len(code.splitlines()) + 1
    (tmp_path / "use.py").write_text(code + "\n".join(MISTAKES) + "\n")
    settings = (ROOT / "pyproject.toml").read_text()
    # The modules of the package are read, and what mypy thinks of their inside is not asked.
    settings += '\n[[tool.mypy.overrides]]\nmodule = ["onetrunk.*"]\nfollow_imports = "silent"\n'
    (tmp_path / "pyproject.toml").write_text(settings)
    options = ["--strict", "--allow-subclassing-any", "--allow-any-unimported", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, "--config-file", "pyproject.toml", "use.py"]
    run = finished(command, code=None, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT / "src")})
    errors = [line for line in run.stdout.splitlines() if ": error: " in line]
    found = {int(line.split(":")[1]): line.rsplit("[", 1)[-1].rstrip("]") for line in errors}
    expected = {first + place: name for place, name in enumerate(MISTAKES.values())}
    assert found == expected, run.stdout + run.stderr
