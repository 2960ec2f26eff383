"""What a reward function is, and how one is found by name. Knows no model, no dataset and no trainer.

The signature is the one that TRL's GRPO and RLOO trainers call, so that functions written for them work unchanged.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from onetrunk.types import Message, Prompt

Completion = str | list[Message]


class RewardFunction(Protocol):
    """A function, async function or callable object that gives one raw number per completion.

    It is called with keywords only. Beyond the three below it receives `completion_stopped` (n booleans, False where
    the completion was cut off at the length limit), every column of the dataset as a list of n entries, and
    `trainer_state`, `log_extra`, `log_metric`; so it takes `**columns`, whatever it uses of them.
    All lists are copies.

    Args:
        prompts: n texts or n conversations.
        completions: n texts, or n lists with one assistant message where the prompts are conversations.
        completion_ids: n lists of token ids, the stop token included where there is one.

    Returns:
        n numbers; None where the function does not apply to the row.
    """

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float | None] | Awaitable[list[float | None]]: ...


@dataclass(frozen=True)
class Scores:
    """What a set of reward functions gives n completions.

    Args:
        total: [n] float32, the weighted sum; NaN where no function applies or one gave a non-finite score.
        by_function: name of the function -> [n] float32, before weighting; NaN for None, non-finite scores as given.
    """

    total: Tensor
    by_function: dict[str, Tensor]


def is_async(function: Callable[..., Any]) -> bool:
    """Say whether calling `function` gives a coroutine: async functions, partials of them, async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def reward_name(function: Callable[..., Any]) -> str:
    """Return the name for metrics: `__name__`, else the object's `name`, else the name of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    for attribute in ("__name__", "name"):
        name = getattr(function, attribute, None)
        if isinstance(name, str) and name:
            return "lambda" if name == "<lambda>" else name
    return type(function).__name__


def unique_names(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Return one name per function; the second function of a name becomes `name_2`, and so on."""
    names: list[str] = []
    for function in functions:
        name, number = reward_name(function), 1
        candidate = name
        while candidate in names:
            number += 1
            candidate = f"{name}_{number}"
        names.append(candidate)
    return names


def names_a_model(spec: str) -> bool:
    """Say whether a text means a reward model, a folder or a Hub name "owner/model", and not a function."""
    if Path(spec).expanduser().is_dir():
        return True
    return "/" in spec and ":" not in spec and not spec.endswith(".py")


def names_a_server(spec: str) -> bool:
    """Say whether a text means a reward model behind HTTP (`rewards/remote.py`)."""
    return spec.startswith(("http://", "https://"))


def resolve_reward(spec: str | RewardFunction) -> RewardFunction:
    """Return the reward function that `spec` means.

    Args:
        spec: a callable, which is returned as it is; "package.module.name", which is imported;
            "path/to/file.py:name", which is loaded from that file; or the address of a reward server, which is called
            once to see whether it works.

    Raises:
        ValueError: the text is neither form, or names a model; there is no such module, file or name in it.
        RuntimeError: the module is there and fails while it is imported; the server does not answer as it should.
        TypeError: what was found is not a callable, or is a class where an instance is needed.
    """
    if not isinstance(spec, str):
        return _checked_callable(spec, repr(spec))
    if names_a_server(spec):
        from onetrunk.rewards.remote import remote_reward

        return remote_reward(spec)
    if names_a_model(spec):
        raise ValueError(f"reward function {spec!r} names a model; give onetrunk.rewards.ModelReward({spec!r})")
    path, separator, name = spec.rpartition(":")
    if separator:
        module = _module_from_file(spec, Path(path).expanduser())
    elif spec.endswith(".py"):
        raise ValueError(_without_a_name(spec))
    else:
        path, _, name = spec.rpartition(".")
        if not path or not all(part.isidentifier() for part in spec.split(".")):
            raise ValueError(
                f"reward function {spec!r} is neither 'package.module.name' nor 'path/to/file.py:name', nor a reward"
                " model: a folder that exists or a Hub name 'owner/model', nor a server: 'http://host/classify'"
            )
        module = _module_by_name(spec, path)
    if not hasattr(module, name):
        raise ValueError(f"reward function {spec!r}: {path} has no {name!r}; {_what_it_has(module, name)}")
    return _checked_callable(getattr(module, name), repr(spec))


def _what_it_has(module: ModuleType, name: str) -> str:
    found = vars(module).items()
    public = sorted(n for n, v in found if not n.startswith("_") and callable(v) and not inspect.isclass(v))
    near = difflib.get_close_matches(name, public, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"it has {', '.join(public[:20]) or 'no public functions'}"


def _without_a_name(spec: str) -> str:
    path = Path(spec).expanduser()
    if not path.is_file():
        return _no_file(spec, path)
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        body = []
    functions = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    public = [name for name in functions if not name.startswith("_")]
    hint = f", where NAME is {' or '.join(public[:20])}" if public else ""
    return f"reward function {spec!r} names a file and no function in it; write '{spec}:NAME'{hint}"


def _no_file(spec: str, path: Path) -> str:
    folder = "" if path.is_absolute() else f" (working folder {Path.cwd()})"
    return f"reward function {spec!r}: there is no file {path}{folder}; check the path"


def _checked_callable(function: Any, spec: str) -> RewardFunction:
    if not callable(function):
        raise TypeError(f"reward function {spec} is of type {type(function).__name__}; expected something to call")
    if inspect.isclass(function):
        raise TypeError(f"reward function {spec} is a class; give an instance of it, or a function")
    return function


def _module_by_name(spec: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(
                f"reward function {spec!r}: there is no module {error.name!r}; install it, put its folder on "
                "PYTHONPATH, or give 'path/to/file.py:name'"
            ) from error
        raise RuntimeError(f"reward function {spec!r}: importing {name} failed: {error}") from error
    except Exception as error:
        raise RuntimeError(f"reward function {spec!r}: importing {name} failed: {error!r}") from error


def _module_from_file(spec: str, path: Path) -> ModuleType:
    if path.suffix != ".py":
        raise ValueError(f"reward function {spec!r}: {path} is not a Python file; give 'path/to/file.py:name'")
    if not path.is_file():
        raise ValueError(_no_file(spec, path))
    # One module per file, registered before it runs: dataclasses and pickle look their module up by name.
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
