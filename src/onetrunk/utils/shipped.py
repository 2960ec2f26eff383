"""The recipes, launch files and accelerate configs that come with onetrunk, found from any working folder.

A wheel carries them in `onetrunk/shipped/`; in a checkout they are the folders at its root. In a YAML file, a path
that begins with the name of one of these folders and does not exist in the working folder means the file that came
with onetrunk, so that a recipe runs wherever it is started.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPES = "recipes"
FOLDERS = (RECIPES, "accelerate_configs")
PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder(name: str) -> Path:
    """Return where one of FOLDERS is; the path need not exist if onetrunk was installed in a way of its own."""
    inside = PACKAGE / "shipped" / name
    return inside if inside.is_dir() else PACKAGE.parents[1] / name


def shipped_files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in the order of their names, without caches and hidden files."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
            yield path


def find_config(name: str) -> Path:
    """Return the path of a YAML file: one in the working folder, else the recipe of this name ("tiny/ppo").

    If there is neither, it is the path as given.
    """
    path = Path(name)
    if path.exists() or path.is_absolute():
        return path
    inside = path.relative_to(RECIPES) if path.parts[:1] == (RECIPES,) else path
    for candidate in (inside, Path(f"{inside}.yaml")):
        recipe = shipped_folder(RECIPES) / candidate
        if len(inside.parts) > 1 and ".." not in inside.parts and recipe.is_file():
            return recipe
    return path


def missing_config_hint(name: str) -> str:
    """Return the start of a hint with recipes of nearly this name, "" if there are none."""
    folder = shipped_folder(RECIPES)
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml")]
    near = difflib.get_close_matches(name.removeprefix(f"{RECIPES}/").removesuffix(".yaml"), names, n=3)
    return f"recipes of nearly this name: {', '.join(near)}; " if near else ""


def with_shipped_files(value: Any) -> Any:
    """Return a value of a YAML file, with every path into FOLDERS that is not in the working folder replaced.

    A text may be a path with more after a colon, such as "recipes/tiny/rewards.py:polite".
    """
    if isinstance(value, dict):
        return {key: with_shipped_files(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_shipped_files(entry) for entry in value]
    if not isinstance(value, str) or not value.startswith(tuple(f"{name}/" for name in FOLDERS)):
        return value
    path, colon, rest = value.partition(":")
    folder, _, inside = path.partition("/")
    shipped = shipped_folder(folder) / inside
    if Path(path).exists() or ".." in Path(inside).parts or not shipped.is_file():
        return value
    return f"{shipped}{colon}{rest}"
