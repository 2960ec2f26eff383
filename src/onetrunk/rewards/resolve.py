"""Find a reward function by its name: a dotted path, a function in a file, or the URL of a reward server."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from onetrunk.rewards.base import RewardFunction
from onetrunk.rewards.remote import remote_reward


def resolve_reward(spec: str | RewardFunction) -> RewardFunction:
    """Return the reward function that `spec` names.

    Args:
        spec: a callable, which is returned unchanged; "package.module.name"; "path/to/file.py:name"; or the URL of a
            reward server, which is called once to check that it works.

    Raises:
        ValueError: the text has another form or names a model, or the module, file or name does not exist.
        RuntimeError: importing the module failed, or the server does not answer as it should.
        TypeError: the object is not callable, or is a class where an instance is needed.
    """
    if not isinstance(spec, str):
        return _checked_callable(spec, repr(spec))
    if spec.startswith(("http://", "https://")):
        return remote_reward(spec)
    if names_a_model(spec):
        raise ValueError(f"reward function {spec!r} names a model; give onetrunk.rewards.ModelReward({spec!r})")
    path, separator, name = spec.rpartition(":")
    if separator:
        module = _module_from_file(spec, Path(path).expanduser())
    elif spec.endswith(".py"):
        functions = _public_functions(_module_from_file(spec, Path(spec).expanduser()))
        hint = f", where NAME is {' or '.join(functions[:20])}" if functions else ""
        raise ValueError(f"reward function {spec!r} names a file and no function in it; write '{spec}:NAME'{hint}")
    else:
        path, _, name = spec.rpartition(".")
        if not path or not all(part.isidentifier() for part in spec.split(".")):
            raise ValueError(
                f"reward function {spec!r} is neither 'package.module.name' nor 'path/to/file.py:name', nor a reward"
                " model: a folder that exists or a Hub name 'owner/model', nor a server: 'http://host/classify'"
            )
        module = _module_by_name(spec, path)
    if not hasattr(module, name):
        raise ValueError(f"reward function {spec!r}: {path} has no {name!r}; {_suggestion(module, name)}")
    return _checked_callable(getattr(module, name), repr(spec))


def names_a_model(spec: str) -> bool:
    """Return whether a text names a reward model (a folder, or a Hub name "owner/model") and not a function."""
    if Path(spec).expanduser().is_dir():
        return True
    return "/" in spec and ":" not in spec and not spec.endswith(".py")


def _checked_callable(function: object, spec: str) -> RewardFunction:
    if not callable(function):
        raise TypeError(f"reward function {spec} is of type {type(function).__name__}; expected something to call")
    if inspect.isclass(function):
        raise TypeError(f"reward function {spec} is a class; give an instance of it, or a function")
    return function


def _module_by_name(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):
            raise ValueError(
                f"reward function {spec!r}: there is no module {absent!r}; install it, put its folder on "
                "PYTHONPATH, or give 'path/to/file.py:name'"
            ) from error
        raise RuntimeError(f"reward function {spec!r}: importing {name} failed: {error!r}") from error


def _module_from_file(spec: str, path: Path) -> ModuleType:
    if path.suffix != ".py":
        raise ValueError(f"reward function {spec!r}: {path} is not a Python file; give 'path/to/file.py:name'")
    if not path.is_file():
        folder = "" if path.is_absolute() else f" (working folder {Path.cwd()})"
        raise ValueError(f"reward function {spec!r}: there is no file {path}{folder}; check the path")
    # One module per file, registered before it runs: dataclasses and pickle look up their module by name.
    name = f"onetrunk_reward_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RuntimeError(f"reward function {spec!r}: importing {path} failed: {error!r}") from error
    return module


def _suggestion(module: ModuleType, name: str) -> str:
    functions = _public_functions(module)
    near = difflib.get_close_matches(name, functions, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"it has {', '.join(functions[:20]) or 'no public functions'}"


def _public_functions(module: ModuleType) -> list[str]:
    members = vars(module).items()
    return sorted(n for n, v in members if not n.startswith("_") and callable(v) and not inspect.isclass(v))
