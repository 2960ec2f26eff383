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


def copy_recipe(name: str, target: Path, overwrites: bool = False) -> Path:
    """Copy a folder, or one file of it, and return the path of the copy.

    Args:
        name: a folder ("tiny", "accelerate_configs") or a file ("tiny/ppo", "tiny/rewards.py").
        target: the folder that gets `recipes/NAME`; it is made if it does not exist.
        overwrites: False raises ValueError if the copy exists already.
    """
    known = folders()
    folder, _, inside = name.removeprefix(f"{RECIPES}/").rstrip("/").partition("/")
    if folder not in known:
        raise ValueError(f"no recipe is called {folder!r}; there are {', '.join(known)}")
    root = known[folder]
    source = next((path for path in (root / inside, root / f"{inside}.yaml") if path.exists()), None)
    if source is None:
        names = (str(path.relative_to(root)) for path in shipped_files(root))
        raise ValueError(f"{folder} has no {inside!r}; it has {', '.join(names)}")
    copy = target / (folder if folder in FOLDERS else f"{RECIPES}/{folder}") / source.relative_to(root)
    if copy.exists() and not overwrites:
        raise ValueError(f"{copy} exists; add --overwrite, or --to another folder")
    if source.is_dir():
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"), dirs_exist_ok=True)
    else:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    return copy


def parse_recipes(argv: Sequence[str]) -> Namespace:
    """Return the arguments; raises UsageError for a mistake in them."""
    parser = Parser(prog="onetrunk recipes", description=DESCRIPTION, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|copy")
    actions.add_parser("list", help="show the recipes and their files", allow_abbrev=False)
    copy = actions.add_parser("copy", help="copy a recipe to the working folder", allow_abbrev=False)
    copy.add_argument("name", help="a folder or a file of `onetrunk recipes list`: tiny, tiny/ppo, accelerate_configs")
    copy.add_argument("--to", default=".", metavar="FOLDER", help="where it goes (default: the working folder)")
    copy.add_argument("--overwrite", action="store_true", help="replace existing files")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run `onetrunk recipes`; return the exit code."""
    words = parse_recipes(list(argv))
    if words.action == "list":
        list_recipes()
    else:
        print(copy_recipe(words.name, Path(words.to), words.overwrite))
    return 0
