"""`onetrunk recipes list|copy NAME`: the recipes, launch files and accelerate configs that come with onetrunk.

Nothing here imports torch, so the answer comes at once.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from onetrunk.stages.options.reading import Parser
from onetrunk.utils.shipped import FOLDERS, RECIPES, shipped_files, shipped_folder

DESCRIPTION = """Recipes need not be copied to be run: onetrunk ppo --config tiny/ppo, onetrunk run tiny/pipeline.
A copy is for changing one. It goes to recipes/NAME (or accelerate_configs) in the working folder, where the paths in
it are valid."""


def folders() -> dict[str, Path]:
    """Return what can be copied: each folder of recipes by its name, and the other folders that come with onetrunk."""
    recipes = [path for path in sorted(shipped_folder(RECIPES).glob("*")) if next(shipped_files(path), None)]
    others = {name: shipped_folder(name) for name in FOLDERS if name != RECIPES}
    return {path.name: path for path in recipes if path.is_dir()} | others


def list_recipes() -> None:
    """Print each folder with the first line of its README, and the names of its files."""
    for name, folder in folders().items():
        readme = folder / "README.md"
        title = readme.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") if readme.is_file() else ""
        print(title if title.startswith(name) else f"{name}: {title}")
        print("   ", *(path.relative_to(folder) for path in shipped_files(folder) if path != readme))
    print("\nonetrunk recipes copy NAME copies one of them here; onetrunk ppo --config tiny/ppo needs no copy.")


def copy_recipe(name: str) -> Path:
    """Copy a folder ("tiny", "accelerate_configs") to its place in the working folder; return the path of the copy."""
    known, name = folders(), name.removeprefix(f"{RECIPES}/").rstrip("/")
    if name not in known:
        raise ValueError(f"no recipe is called {name!r}; there are {', '.join(known)}")
    copy = Path(name) if name in FOLDERS else Path(RECIPES, name)
    if copy.exists():
        raise ValueError(f"{copy} exists; delete it, or copy in another folder")
    shutil.copytree(known[name], copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    return copy


def parse_recipes(argv: Sequence[str]) -> tuple[Namespace]:
    """Return the arguments; raises UsageError for a mistake in them."""
    parser = Parser(prog="onetrunk recipes", description=DESCRIPTION, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|copy")
    actions.add_parser("list", help="show the recipes and their files", allow_abbrev=False)
    copy = actions.add_parser("copy", help="copy a recipe to the working folder", allow_abbrev=False)
    copy.add_argument("name", help="a folder of `onetrunk recipes list`: tiny, accelerate_configs")
    return (parser.parse_args(argv),)


def run(words: Namespace) -> None:
    if words.action == "list":
        list_recipes()
    else:
        print(copy_recipe(words.name))
