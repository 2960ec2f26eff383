"""Environments behind an OpenEnv server: a text answers a text, or the policy calls the tools that the server lists.

The client is OpenEnv's generic one, so that no package of an environment is installed or run here.
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import httpx2

from onetrunk.servers.client import MAX_BYTES
from onetrunk.utils.files import parse_json

CONNECT_S = 10.0
# The fields of an action that calls a tool; OpenEnv's bare Action has none.
CALL_FIELDS = {"type", "tool_name", "arguments"}


class LostSession(RuntimeError):
    """The connection to an environment broke, and with it the environment ended; or nobody can read its answers."""


class OpenEnv:
    """A session of the server at `address`, with Gymnasium's `reset`; `client` is `GenericEnvClient(...).sync()`."""

    def __init__(self, address: str, client: Any):
        self.address, self.client, self.close, self._socket = address, client, client.close, None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode. The server takes the seed and those columns of the row that its `reset` names."""
        # Of the calls of tools since they were last taken, and whether the episode is over.
        self.reward, self.is_over = 0.0, False
        columns = json.loads(json.dumps({"seed": seed, **(options or {})}, default=str))
        return _text(self._ask("reset", **columns).observation), {}

    def _ask(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        before = self._socket
        try:
            result = getattr(self.client, method)(*args, **kwargs)
        except Exception as error:
            if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
                raise  # What the server says of this call.
            raise LostSession(f"{self.address}: {type(error).__name__}: {error}") from error
        # The client connects again by itself, to another environment.
        self._socket = self.client.async_client._ws
        if method == "step" and self._socket is not before:
            raise LostSession(f"{self.address} ended the session before the episode was over")
        kinds = (result.observation, dict), (result.reward or 0, (int, float)), (result.done or False, bool)
        is_empty = method == "step" and not (result.observation or result.done) and result.reward is None
        if is_empty or not all(isinstance(*kind) for kind in kinds) or not math.isfinite(result.reward or 0):
            raise LostSession(f"{self.address} answers {method} without an observation, a finite reward and done")
        return result


class OpenEnvText(OpenEnv):
    """An environment whose action has one field, a text. An observation of one text is that text, any other JSON."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer a text, as Gymnasium's environments do."""
        [field] = action_fields(self.address)
        result = self._ask("step", {field: action})
        return _text(result.observation), float(result.reward or 0), bool(result.done), False, {}


class OpenEnvTools(OpenEnv):
    """An environment whose actions are calls of tools; `tool_schemas` are as in chat templates, by their names."""

    def __init__(self, address: str, client: Any, tools: list[dict[str, Any]]):
        super().__init__(address, client)
        own = [{"name": t["name"], "description": t["description"], "parameters": t["input_schema"]} for t in tools]
        self.tool_schemas = {tool["name"]: {"type": "function", "function": tool} for tool in own}

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the result of a tool; RuntimeError if it failed."""
        result = self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": arguments})
        self.reward, self.is_over = self.reward + float(result.reward or 0), self.is_over or bool(result.done)
        error, content = result.observation.get("error"), result.observation.get("result")
        try:
            if error:
                raise RuntimeError(error["message"])
            if isinstance(content, dict) and "data" in content:  # As FastMCP wraps it.
                texts = [part["text"] for part in content.get("content") or () if "text" in part]
                content = "\n".join(texts) if content["data"] is None else content["data"]
        except (TypeError, LookupError, AttributeError) as fault:
            raise LostSession(f"{self.address} answers a call of {name} without a tool's result") from fault
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def open_environment(address: str) -> OpenEnv:
    """Return a new environment; an error says that there is no client or server, or none that texts or tools play."""
    try:
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise ImportError(f"{address} needs OpenEnv's client; pip install 'onetrunk[openenv]'") from error
    fields = action_fields(address)
    # The limit of a call is `tool_timeout`.
    client = GenericEnvClient(address, CONNECT_S, message_timeout_s=None, mode="simulation").sync()
    if [field.get("type") for field in fields.values()] == ["string"]:
        return OpenEnvText(address, client)
    tools = client.step({"type": "list_tools"}).observation.get("tools") if fields.keys() <= CALL_FIELDS else None
    if not tools:
        client.close()
        raise ValueError(
            f"the actions of the environment at {address} have the fields {', '.join(fields) or '(none)'}; a policy"
            " plays by one text, or by calls of tools. Wrap the client in a class of your own, path/to/file.py:Class"
        )
    return OpenEnvTools(address, client, tools)


@cache
def action_fields(address: str) -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of an action's fields; ConnectionError if no OpenEnv server answers."""
    content = bytearray()
    try:
        with httpx2.stream("GET", f"{address.rstrip('/')}/schema", timeout=CONNECT_S) as reply:
            for part in reply.raise_for_status().iter_bytes():
                content += part
                if len(content) > MAX_BYTES:
                    raise ValueError(f"its schema has more than {MAX_BYTES // 2**20} MiB")
        fields = dict(parse_json(content)["action"].get("properties") or {})
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConnectionError(f"no OpenEnv server answers; start it, or correct {address} ({error})") from error
    return {name: schema for name, schema in fields.items() if name != "metadata"}


def _text(observation: dict[str, Any]) -> str:
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    [first, *others] = fields.values() or [""]
    return first if isinstance(first, str) and not others else json.dumps(fields, ensure_ascii=False)
