"""Find an object of the user's by its name: package.module.name, or path/to/file.py:name."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

# Of modules made from files. Checkpoints have it: they name the functions and classes of rewards.
USER_MODULE = "onetrunk_reward_"


def find_object(spec: str, what: str, fits: Callable[[Any], bool], kinds: str, others: str = "") -> Any:
    """Return the object that `spec` names; a file is run once.

    Args:
        spec: "package.module.name" or "path/to/file.py:name".
        what: what the object is, for messages: "reward function".
        fits: whether an object could be meant, for suggestions.
        kinds: the plural of those, for messages: "functions".
        others: what else `spec` could have been, for the message about another form.

    Raises:
        ValueError: the text has another form, or the module, file or name does not exist.
        RuntimeError: importing the module failed.
    """
    path, separator, name = spec.rpartition(":")
    if separator:
        module = _module_from_file(spec, Path(path).expanduser(), what)
    elif spec.endswith(".py"):
        names = _names(_module_from_file(spec, Path(spec).expanduser(), what), fits)
        hint = f", where NAME is {' or '.join(names[:20])}" if names else ""
        raise ValueError(
            f"{what} {spec!r} names a file and no {kinds.removesuffix('s')} in it; write '{spec}:NAME'{hint}"
        )
    else:
        path, _, name = spec.rpartition(".")
        if not is_dotted_path(spec):
            raise ValueError(f"{what} {spec!r} is neither 'package.module.name' nor 'path/to/file.py:name'{others}")
        module = _module_by_name(spec, path, what)
    if not hasattr(module, name):
        raise ValueError(f"{what} {spec!r}: {path} has no {name!r}; {_suggestion(module, name, fits, kinds)}")
    return getattr(module, name)


def is_dotted_path(spec: str) -> bool:
    """Return whether a text has the form of "package.module.name"."""
    return "." in spec and all(part.isidentifier() for part in spec.split("."))


def is_public_function(value: Any) -> bool:
    """Return whether an object can be called and is no class."""
    return callable(value) and not inspect.isclass(value)


def _module_by_name(spec: str, name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):
            raise ValueError(
                f"{what} {spec!r}: there is no module {absent!r}; install it, put its folder on "
                "PYTHONPATH, or give 'path/to/file.py:name'"
            ) from error
        raise RuntimeError(f"{what} {spec!r}: importing {name} failed: {error!r}") from error


def _module_from_file(spec: str, path: Path, what: str) -> ModuleType:
    if path.suffix != ".py":
        raise ValueError(f"{what} {spec!r}: {path} is not a Python file; give 'path/to/file.py:name'")
    if not path.is_file():
        folder = "" if path.is_absolute() else f" (working folder {Path.cwd()})"
        raise ValueError(f"{what} {spec!r}: there is no file {path}{folder}; check the path")
    # One module per file, registered before it runs: dataclasses and pickle look up their module by name.
    name = f"{USER_MODULE}{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RuntimeError(f"{what} {spec!r}: importing {path} failed: {error!r}") from error
    return module


def _suggestion(module: ModuleType, name: str, fits: Callable[[Any], bool], kinds: str) -> str:
    names = _names(module, fits)
    near = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names[:20]) or f'no public {kinds}'}"


def _names(module: ModuleType, fits: Callable[[Any], bool]) -> list[str]:
    return sorted(name for name, value in vars(module).items() if not name.startswith("_") and fits(value))


def source_identity(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's name, a hash of its source file, and the plain settings of an object or a partial.

    A change in what the file imports is not noticed.
    """
    settings: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        settings |= _plain(function.keywords) | _plain(dict(enumerate(function.args)))
        function = function.func
    if not inspect.isroutine(function):
        settings |= _plain(getattr(function, "__dict__", {}))
        function = type(function)
    try:
        source = hashlib.sha256(Path(inspect.getsourcefile(function)).read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):
        source = None  # Built in, or typed into a console.
    return {"name": function.__qualname__, "source": source, "settings": settings}


def _plain(settings: Mapping[Any, Any]) -> dict[str, Any]:
    kinds = (str, int, bool, type(None))
    plain = {str(name): value for name, value in settings.items() if isinstance(value, kinds)}
    return plain | {str(name): repr(value) for name, value in settings.items() if isinstance(value, float)}
