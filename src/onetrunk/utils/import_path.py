"""Functions of the user: found by name (package.module.name or path/to/file.py:name), their answers checked."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

# Prefix of the names of modules made from files. Checkpoints contain it in the names of reward functions.
USER_MODULE = "onetrunk_reward_"


def find_object(spec: str, what: str, others: str = "") -> Any:
    """Return the object that `spec` names; a file is run once.

    Args:
        spec: "package.module.name" or "path/to/file.py:name".
        what: kind of object for messages, such as "reward function".
        others: other things that `spec` may name, for the message about a text of another form.

    Raises:
        ValueError: the text has another form, or the module, file or name does not exist.
        RuntimeError: importing the module failed.
    """
    path, separator, name = spec.rpartition(":")
    if separator:
        module = _module_from_file(spec, Path(os.path.expanduser(path)), what)
    elif spec.endswith(".py"):
        raise ValueError(f"{what} {spec!r} names a file; write '{spec}:NAME' for what you mean in it")
    elif is_dotted_path(spec):
        path, _, name = spec.rpartition(".")
        module = _module_by_name(spec, path, what)
    else:
        raise ValueError(f"{what} {spec!r} is neither 'package.module.name' nor 'path/to/file.py:name'{others}")
    if not hasattr(module, name):
        names = [public for public in vars(module) if not public.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:20]) or 'no public names'}"
        raise ValueError(f"{what} {spec!r}: {path} has no {name!r}; {hint}")
    return getattr(module, name)


def is_dotted_path(spec: str) -> bool:
    """Return whether a text has the form of "package.module.name"."""
    return "." in spec and all(part.isidentifier() for part in spec.split("."))


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
    if path.suffix != ".py" or not path.is_file():
        kind = "file" if path.suffix == ".py" else "Python file"
        raise ValueError(f"{what} {spec!r}: there is no {kind} {path} (working folder {Path.cwd()})")
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


def checked_scores(name: str, result: Any, num_rows: int) -> list[float | None]:
    """Return what a check or a reward function returned as one number per completion, None where it does not apply.

    Raises:
        TypeError: not a list of numbers. ValueError: another number of scores, or something that is not one number.
    """
    returned = f"{name} returned"
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(f"{returned} a coroutine; define it with 'async def'")
    values = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise TypeError(f"{returned} {type(values).__name__}; expected a list of {num_rows} numbers")
    values = list(values)
    if len(values) != num_rows:
        raise ValueError(
            f"{returned} {len(values)} scores, expected {num_rows}: one per completion, None where it does not apply"
        )
    for index, value in enumerate(values):
        if value is not None and not hasattr(value, "__float__"):
            raise TypeError(f"{returned} {value!r} at index {index}; expected a number or None")
    try:
        return [None if value is None else float(value) for value in values]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{returned} something that is not one number: {error}") from error
