"""What a reward is computed from, as a short text. A resumed run compares it, so that no reward changes unnoticed.

A function is identified by a digest of its source file, a model by its weights and tokenizer, a server by its address
and the model's name. A script that is run directly also holds the settings of the run, so for its functions only their
own source counts, with the functions and values that they use. Imports are not followed. Values of settings are stored
only as digests, because some are secrets.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onetrunk.judges.judge import digest
from onetrunk.judges.rubric import source_identity
from onetrunk.models.loading import scorer_fingerprint, tensors_digest
from onetrunk.models.reward_model import ScoreAdapter
from onetrunk.rewards.ensemble import EnsembleReward
from onetrunk.rewards.judge_reward import COLUMN, JudgeReward, PairwiseReward
from onetrunk.rewards.model import SAMPLE_TEXTS, ModelReward, TrunkReward
from onetrunk.rewards.remote import RemoteReward
from onetrunk.rewards.reward import without_partials
from onetrunk.utils.http import shown

PLAIN = (str, int, float, bool, type(None))
OURS = (ModelReward, EnsembleReward, TrunkReward, RemoteReward, JudgeReward, PairwiseReward)
# Keys of an adapter's config that do not change what it computes.
PASSING_IN_ADAPTERS = ("base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping")


def content_of(reward: Callable[..., Any]) -> str:
    """Return what a reward function is computed from: the same text in every process, until something changes."""
    if not isinstance(reward, OURS):
        return _function(reward, {id(reward)})
    kind = type(reward)
    own = "" if kind in OURS else f", {kind.__name__} sha256 {source_identity(reward)['source']}"
    return f"{_content_of_ours(reward)}{own}"


def _content_of_ours(reward: Any) -> str:
    if isinstance(reward, ModelReward):
        tokenizer = reward.tokenizer
        tokens = _short([tokenizer(list(SAMPLE_TEXTS))["input_ids"], tokenizer.chat_template, tokenizer.pad_token_id])
        return f"{scorer_fingerprint(reward.model)}, tokenizer sha256 {tokens}, max_length {reward.max_length}"
    if isinstance(reward, EnsembleReward):
        scales = [[scale.mean, scale.std] for scale in reward.scales]
        members = [content_of(member) for member in reward.members]
        return f"ensemble, sha256 {_short([members, scales, reward.penalty])}"
    if isinstance(reward, TrunkReward):
        return f"adapter, sha256 {_adapter_digest(reward.adapter)}"
    if isinstance(reward, RemoteReward):
        return f"server {shown(reward.url)}, model {reward.model or 'not named'}"
    numbers = [reward.beta, reward.floor] if isinstance(reward, PairwiseReward) else []
    judge = _short([reward.judge.identity, numbers])
    return f"judge, sha256 {judge}, constitution {reward.constitution.version[:16]}"


def _adapter_digest(adapter: ScoreAdapter) -> str:
    config = {name: value for name, value in adapter.config.to_dict().items() if name not in PASSING_IN_ADAPTERS}
    ordered = {name: sorted(value) if isinstance(value, set) else str(value) for name, value in config.items()}
    weights = tensors_digest({**adapter.weights, **{f"head.{key}": t for key, t in adapter.head.items()}})
    return _short([ordered, weights, adapter.pad_token_id])


def _short(value: Any) -> str:
    return digest(value)[:16]


def columns_read(reward: Callable[..., Any], columns: Sequence[str]) -> list[str]:
    """Return the dataset's columns that a reward function reads, or may read.

    A function reads the columns among its parameters. If it uses its `**kwargs`, it may read every column.
    """
    if type(reward) is PairwiseReward:
        return [name for name in columns if name == COLUMN]
    if type(reward) in OURS:
        return []
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):
        return list(columns)
    rest = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    code = getattr(_inner_function(reward), "__code__", None)
    if rest is not None and (code is None or _reads(code, rest)):
        return list(columns)
    return [name for name in columns if name in parameters]


def _reads(code: types.CodeType, name: str) -> bool:
    """Return whether a function uses one of its parameters; `del` does not count."""
    if name in code.co_cellvars:
        return True
    return any(
        instruction.opname.startswith("LOAD")
        and (instruction.argval == name or isinstance(instruction.argval, tuple) and name in instruction.argval)
        for instruction in dis.get_instructions(code)
    )


def _function(reward: Callable[..., Any], seen: set[int]) -> str:
    inner = _inner_function(reward)
    # An attribute with an underscore, such as a counter, is not a setting.
    settings = {k: value for k, value in source_identity(reward)["settings"].items() if not k.startswith("_")}
    settings |= _closure_contents(inner, seen)
    about = f", settings sha256 {_short(settings)}" if settings else ""
    # A decorator may come from another file.
    sources = [source_identity(each)["source"] for each in (inner, reward)]
    if None in sources or inner.__module__ == "__main__":
        return f"{inner.__qualname__}, sha256 {_short(list(_sources(reward, inner)))}{about}"
    source = sources[0] if sources[0] == sources[1] else _short(sources)
    return f"{Path(inspect.getsourcefile(inner)).name}, sha256 {source}{about}"


def _inner_function(reward: Callable[..., Any]) -> Any:
    """Return the function inside partials, decorators and methods. For an object, its `__call__`, or its class if
    `__call__` is not written in Python."""
    reward = without_partials(reward)
    if not inspect.isroutine(reward):
        call = type(reward).__call__
        reward = call if inspect.isfunction(call) else type(reward)
    reward = inspect.unwrap(reward)
    return getattr(reward, "__func__", reward)


def _closure_contents(function: Any, seen: set[int]) -> dict[str, Any]:
    """Return the plain values and the reward functions in a function's closure and defaults."""
    if not inspect.isfunction(function):
        return {}
    values: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # Not assigned yet.
            values[name] = cell.cell_contents
    defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
    values |= {f"default {name}": value for name, value in defaults.items()}
    contents: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, PLAIN):
            contents[name] = repr(value)
        elif isinstance(value, OURS):
            contents[name] = content_of(value)
        elif inspect.isfunction(value) and id(value) not in seen:
            seen.add(id(value))
            contents[name] = _function(value, seen)
    return contents


def _sources(reward: Callable[..., Any], inner: Any) -> Iterator[str]:
    """Yield the source of an object's class, of the function, and of what it uses in its script or session."""
    reward = without_partials(reward)
    if not inspect.isroutine(reward) and not inspect.isclass(inner):
        with contextlib.suppress(OSError, TypeError):
            yield inspect.getsource(type(reward))
    yield from _function_sources(inner, set())


def _function_sources(function: Any, seen: set[Any]) -> Iterator[str]:
    seen.add(function)
    code = getattr(function, "__code__", None)
    try:
        yield inspect.getsource(function)
    except (OSError, TypeError):
        yield function.__qualname__ if code is None else repr(_bytecode(code))
    if code is None:
        return
    for name in sorted(_names(code)):
        value = function.__globals__.get(name)
        if isinstance(value, PLAIN) and name in function.__globals__:
            yield f"{name} = {value!r}"
        elif inspect.isfunction(value) and value.__module__ == function.__module__ and value not in seen:
            yield from _function_sources(value, seen)


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _bytecode(value: Any) -> Any:
    """Return bytecode and constants in a form whose text is the same in every process."""
    if isinstance(value, types.CodeType):
        return [value.co_code.hex(), value.co_names, [_bytecode(constant) for constant in value.co_consts]]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
