"""Finds recipes and the commands that documents tell people to type."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

from onetrunk.verbs import VERBS
from tests.processes import ROOT

# recipes/launch holds files for schedulers (tests/test_launch_files.py).
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "launch")
FOLDERS = ("accelerate_configs", "recipes", "scripts", "src", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))])
# Of the stages.
TOOLS = ("bench", "check_gpu", "golden")
SCRIPTS = sorted(path for path in (ROOT / "scripts").glob("*.py") if not path.name.startswith(TOOLS))
# Verb with settings -> the function that parses its words.
PARSERS = {name: verb.parser for name, verb in VERBS.items() if verb.has_settings}
COMMANDS = ("onetrunk ", "accelerate ", "python ", "make ")


def load_recipe_module(recipe: str, name: str) -> ModuleType:
    return load_module(ROOT / "recipes" / recipe / f"{name}.py")


def load_module(path: Path) -> ModuleType:
    """Import a Python file of no package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}".replace("-", "_"), path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


def commands_of(text: str) -> list[list[str]]:
    """Return the commands in a document, as words: lines of code blocks, indented lines, and `inline code`.

    A line that ends with a backslash goes on; what follows a `#` is a comment. A verb alone is a name, no command.
    """
    joined = re.sub(r"\\+\n\s*", " ", text)
    lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
    inline = [code for code in re.findall(r"`([^`\n]+)`", joined) if "--" in code]
    found = [shlex.split(line, comments=True) for line in lines + inline if line.startswith(COMMANDS)]
    return [words for words in found if len(words) > 1]
