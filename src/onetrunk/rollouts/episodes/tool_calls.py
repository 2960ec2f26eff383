"""Calling what the user wrote: tools and environments, each call in a thread of its own and with a time limit.

What a model writes is untrusted: arguments are compared with the schema of the tool, and nothing is evaluated.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from transformers.utils import get_json_schema

from onetrunk.rollouts.episodes.rows import in_thread
from onetrunk.utils.redaction import encodable

warn_once = functools.cache(logging.getLogger(__name__).warning)

# Calls that were given up and still run; with more of them the run ends.
MOST_ABANDONED = 256
# Seconds in which an event loop that is not blocked answers.
LOOP_S = 1.0
ABOUT_SIGNALS = (
    "a tool or an environment needs the main thread, and calls run in others: signal.alarm and signal.signal do not"
    " work there; take them out, because tool_timeout bounds each call"
)
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class TooManyHang(RuntimeError):
    """More calls hang than this process can leave behind."""


class TimedOut(Exception):
    """A call took longer than `tool_timeout`."""


@dataclass(eq=False)
class TimedCalls:
    """Calls functions with a time limit.

    A thread cannot be killed, so a call that takes too long is left behind, and its result is thrown away. Async
    functions run in one event loop, where such a call is cancelled.

    Args:
        timeout_s: of one call.
    """

    timeout_s: float
    _abandoned: list[Future[Any]] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what a function or an async function returns.

        Raises:
            TimedOut: it took too long.
            TooManyHang: so did more than MOST_ABANDONED others that still run.
            BaseException: what it raises.
        """
        return self.begin(function, *args, **kwargs)()

    def begin(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Begin a call; return what waits for its result, as `call` does."""
        loop = self._running_loop() if inspect.iscoroutinefunction(function) else None
        if loop is None:
            future = in_thread(function, *args, **kwargs)
        else:

            async def run() -> Any:  # Where `function` raises before it is awaited, the future has the error too.
                return await function(*args, **kwargs)

            future = asyncio.run_coroutine_threadsafe(run(), loop)
        return functools.partial(self._result, future, loop, time.monotonic() + self.timeout_s)

    def _result(self, future: Future[Any], loop: asyncio.AbstractEventLoop | None, deadline: float) -> Any:
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if future.done():  # Its own error, or just in time.
                return future.result()
        if loop is None:
            self._abandon(future)
        else:
            future.cancel()
            self._require_alive(loop)
        raise TimedOut(f"no answer within {self.timeout_s:g} seconds")

    def _abandon(self, future: Future[Any]) -> None:
        with self._lock:
            self._abandoned = [*(old for old in self._abandoned if not old.done()), future]
            num_hanging = len(self._abandoned)
        if num_hanging > MOST_ABANDONED:
            raise TooManyHang(
                f"{num_hanging} calls of tools or environments hang, each longer than tool_timeout"
                f" {self.timeout_s:g} s; give their requests a time limit of their own, or raise tool_timeout"
            )

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async tools", daemon=True).start()
            return self._loop

    def _require_alive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Leave a loop behind that a function blocks; the next call gets another."""
        answer: Future[None] = Future()
        loop.call_soon_threadsafe(answer.set_result, None)
        try:
            answer.result(LOOP_S)
        except TimeoutError:
            loop.call_soon_threadsafe(loop.stop)
            with self._lock:
                self._loop = None if self._loop is loop else self._loop
            self._abandon(answer)


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool, from its annotations and its docstring; ValueError says what they lack."""
    while isinstance(tool, functools.partial):
        tool = tool.func
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ValueError(
            f"the tool {getattr(tool, '__name__', tool)!r} cannot be described to the model:"
            f" {str(error).rstrip('.!')}. A tool has type hints and a docstring in Google's style, with a line for"
            " each argument under 'Args:'"
        ) from error


def argument_fault(arguments: Any, schema: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the arguments of a call by the schema of its tool; None if they fit."""
    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, not {_json_type(arguments)}"
    parameters = schema["function"]["parameters"]
    known = parameters.get("properties") or {}
    unknown = [str(name) for name in arguments if name not in known]
    if unknown:
        return f"unknown argument {unknown[0][:100]!r}; known: {', '.join(known) or 'none'}"
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    if missing:
        return f"the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        if not fits(value, known[name]):
            kind = known[name].get("enum") or known[name].get("type") or known[name]
            return f"the argument {name!r} must be {kind}, not {_json_type(value)}"
    return None


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a JSON value fits a schema that `get_json_schema` made."""
    if "anyOf" in schema:
        return any(fits(value, option) for option in schema["anyOf"])
    kinds = schema.get("type", list(JSON_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if value is None:
        return schema.get("nullable", False) or "null" in kinds
    if "enum" in schema:
        return any(value == choice and type(value) is type(choice) for choice in schema["enum"])
    kind = next((k for k in kinds if isinstance(value, JSON_TYPES.get(k, ()))), None)
    if kind is None or (isinstance(value, bool) and "boolean" not in kinds):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(fits(entry, schema["items"]) for entry in value)
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), dict):
        return all(fits(entry, schema["additionalProperties"]) for entry in value.values())
    return True


def _json_type(value: Any) -> str:
    names = [name for name, types in JSON_TYPES.items() if type(value) in types]
    return names[0] if names else type(value).__name__


def error_text(error: BaseException | str) -> str:
    """Return the observation for a call that failed."""
    text = encodable(error)
    if "main thread" in text:
        warn_once(ABOUT_SIGNALS)
    error = f"{type(error).__name__}: {text}" if isinstance(error, BaseException) else text
    return json.dumps({"error": error}, ensure_ascii=False)


def shortened(text: str, longest: int) -> str:
    """Return an `encodable` text without what comes after `longest` characters, and say how much that was."""
    return encodable(text if len(text) <= longest else f"{text[:longest]} ... ({len(text) - longest} more characters)")
