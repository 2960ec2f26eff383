"""The stage `onetrunk prefs`: prompts -> completions -> a judge -> preference rows.

Its names are imported when they are used: the settings in `arguments.py` need no trainer.
"""

from importlib import import_module
from typing import Any

__all__ = ["main", "parse_prefs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.stage"), name)
