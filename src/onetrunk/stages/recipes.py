"""`onetrunk recipes list|copy NAME`: the recipes, launch files and accelerate configs that come with onetrunk.

Nothing here imports torch, so the answer comes at once.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from onetrunk.utils.files import atomic_write_bytes
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
    """Print each folder with the title of its README, and the names of its YAML files."""
    for name, folder in folders().items():
        readme = folder / "README.md"
        lines = readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else []
        title = next((line.lstrip("# ") for line in lines if line.startswith("# ")), name)
        print(name if title == name else f"{name}: {title}")
        files = [path.relative_to(folder).as_posix() for path in shipped_files(folder) if path.name != "README.md"]
        print(f"    {' '.join(files)}")
    print("\nonetrunk recipes copy NAME copies one of them here; onetrunk ppo --config tiny/ppo needs no copy.")


def copy_recipe(name: str, target: Path, overwrites: bool = False) -> list[Path]:
    """Copy a folder, or one file of it, and return the paths that were written.

    Args:
        name: a folder ("tiny", "accelerate_configs") or a file ("tiny/ppo", "tiny/rewards.py").
        target: the folder that gets `recipes/NAME`; it is made if it does not exist.
        overwrites: False raises ValueError if a file with other contents is in the way.
    """
    known = folders()
    name = name.removeprefix(f"{RECIPES}/").rstrip("/")
    folder, _, inside = name.partition("/")
    if folder not in known:
        near = difflib.get_close_matches(folder, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise ValueError(f"no recipe is called {folder!r}: {hint}")
    root = known[folder]
    there = Path(folder) if folder in FOLDERS else Path(RECIPES) / folder
    files = {path.relative_to(root).as_posix(): path for path in shipped_files(root)}
    if inside:
        chosen = files.get(inside) or files.get(f"{inside}.yaml")
        if chosen is None:
            raise ValueError(f"{folder} has no {inside!r}; it has {', '.join(files)}")
        files = {inside: chosen}
    copies = {path: target / there / path.relative_to(root) for path in files.values()}
    changed = [copy for path, copy in copies.items() if copy.exists() and copy.read_bytes() != path.read_bytes()]
    if changed and not overwrites:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise ValueError(f"{changed[0]}{more} exists with other contents; add --overwrite, or --to another folder")
    for path, copy in copies.items():
        atomic_write_bytes(copy, path.read_bytes())
    return list(copies.values())


def parse_recipes(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; SystemExit after a usage message, as argparse does."""
    parser = argparse.ArgumentParser(prog="onetrunk recipes", description=DESCRIPTION, allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|copy")
    actions.add_parser("list", help="show the recipes and their files", allow_abbrev=False)
    copy = actions.add_parser("copy", help="copy a recipe to the working folder", allow_abbrev=False)
    copy.add_argument("name", help="a folder or a file of `onetrunk recipes list`: tiny, tiny/ppo, accelerate_configs")
    copy.add_argument("--to", default=".", metavar="FOLDER", help="where it goes (default: the working folder)")
    copy.add_argument("--overwrite", action="store_true", help="replace files that have other contents")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk recipes`; return the exit code."""
    try:
        words = parse_recipes(argv)
    except SystemExit as end:
        return int(end.code or 0)
    if words.action == "list":
        list_recipes()
        return 0
    try:
        written = copy_recipe(words.name, Path(words.to), words.overwrite)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(str(path) for path in written))
    return 0
