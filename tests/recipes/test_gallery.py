"""The gallery, recipes/README.md: it lists every recipe and says of each what its files say."""

import re

import pytest

from tests.stages.recipes import RECIPES, ROOT

FOLDER = ROOT / "recipes"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/README.md") if path.parent.name != "launch")
NOT_RUN = "not yet run"


def rows():
    """Return {recipe: its row of the table}."""
    lines = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    return {match[1]: line for line in lines if (match := re.match(r"\| \[([^\]]+)\]\(\1/README.md\) \|", line))}


def test_the_gallery_lists_every_recipe():
    assert sorted(rows()) == NAMES and {path.parent.name for path in RECIPES} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_gallery_says_what_was_not_run_as_the_files_do(name):
    readme = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    files = [path for path in RECIPES if path.parent.name == name and not path.stem.startswith("constitution")]
    marked = [NOT_RUN in path.read_text(encoding="utf-8").lower() for path in files]
    assert len(set(marked)) == 1, "some files of the recipe say that they were not run, others do not"
    assert (NOT_RUN in rows()[name]) == marked[0] == (f"{NOT_RUN} on hardware" in readme.lower())


@pytest.mark.parametrize("file", ["reasoning-gym/rewards.py", "textarena/game.py"])
def test_a_readme_shows_the_glue(file):
    path = FOLDER / file
    assert path.read_text() in path.with_name("README.md").read_text()


def test_the_template_of_textarena_marks_once_what_the_assistant_says():
    template = (FOLDER / "textarena/chat_template.jinja").read_text()
    assert all(template.count(mark) == 1 for mark in ("{% generation %}", "{% endgeneration %}"))
