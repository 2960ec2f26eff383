"""The stage `onetrunk judge`: how well judges agree with people, and what they are biased by.

Its names are imported when they are used: the settings in `arguments.py` need no trainer.
"""

from importlib import import_module
from typing import Any

__all__ = ["main", "parse_judge"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.stage"), name)
