"""Find a reward function by its name: a dotted path, a function in a file, or the URL of a reward server."""

from __future__ import annotations

import inspect
from pathlib import Path

from onetrunk.rewards.remote import remote_reward
from onetrunk.rewards.reward import RewardFunction
from onetrunk.utils.import_path import find_object

WHAT = "reward function"
OTHERS = ", nor a reward model: a folder that exists or a Hub name 'owner/model', nor a server: 'http://host/classify'"


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
    return _checked_callable(find_object(spec, WHAT, OTHERS), repr(spec))


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
