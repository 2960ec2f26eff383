"""One vLLM server: the calls that rollouts need, and the checks of its answers.

An answer counts only if it names the model that was asked, repeats the prompt, and has one logprob for each
token up to a stop token or the length limit. Anything else is an error, never a sample.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from onetrunk.rollouts.base import SamplingParams
from onetrunk.types import RowKey
from onetrunk.utils.calls import CallError
from onetrunk.utils.http import (
    check_host,
    check_url,
    failure_of_response,
    guarded_client,
    is_html,
    json_of,
    read_secret,
    send,
    shown,
)

# vLLM returns token ids, and logprobs after temperature, from this version on.
LEAST_VERSION = (0, 11)
WHAT = "the address of a vLLM server"
# Rounding of the server: the logprob of a token that is certain.
ROUNDING = 1e-3


class AdapterMissing(CallError):
    """The server does not know the adapter that a row was asked from."""


@dataclass(frozen=True)
class ServedBase:
    """The base model of a server.

    Args:
        name: under which it is asked for.
        root: the path or Hub name that the server loaded it from.
        max_length: most tokens of prompt and completion together.
    """

    name: str
    root: str
    max_length: int


@dataclass(frozen=True)
class Completed:
    """A completion that passed every check; `logprobs` are those of `token_ids`."""

    token_ids: list[int]
    logprobs: list[float]
    stopped: bool


@dataclass(frozen=True)
class Request:
    """One completion to ask for.

    Args:
        prompt_ids: token ids, not empty.
        params: of the call.
        seed: of this row's draws, below 2**63.
        model: name of the adapter that samples; None: the server's base model.
        vocab_size: the token ids that the policy knows are below.
    """

    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    model: str | None = None
    vocab_size: int = sys.maxsize

    def body(self, base: str) -> dict[str, Any]:
        """Return the JSON to send. Every setting is given: a server would fill in those of generation_config.json."""
        return {
            "model": self.model or base,
            "prompt": self.prompt_ids,
            "max_tokens": self.params.max_completion_length,
            "temperature": self.params.temperature,
            "seed": self.seed,
            "stop_token_ids": list(self.params.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "top_p": self.params.top_p,
            "top_k": self.params.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens": 0,
            "n": 1,
            "stream": False,
        }


class VLLMServer:
    """The calls to one server. Calls are coroutines that raise CallError; `client` opens their connections.

    Args:
        url: such as "http://127.0.0.1:8000", with or without "/v1".
        api_key_env: environment variable that holds the key; None sends no credentials.
        allow_http: plain http also to hosts outside this machine and private networks.

    Raises:
        ValueError: a URL that may not be called, or a variable that is not set.
    """

    def __init__(self, url: str, api_key_env: str | None = None, allow_http: bool = False):
        self.url = check_url(url, WHAT, allow_http).removesuffix("/v1")
        self.api_key_env, self.allow_http = api_key_env, allow_http
        read_secret(api_key_env)
        # Set by the check at startup.
        self.base: ServedBase | None = None
        self.is_up, self.in_flight = True, 0

    def __str__(self) -> str:
        return f"vLLM server {shown(self.url)}"

    def check_host(self) -> None:
        """Look up the host and check its addresses (see `utils.http.check_host`)."""
        check_host(self.url, WHAT, self.allow_http)

    def client(self, max_connections: int = 2) -> httpx2.AsyncClient:
        """Return a client for this server."""
        return guarded_client(self.url, self._secret(), max_connections)

    async def is_healthy(self, client: httpx2.AsyncClient) -> bool:
        """Return whether the server is ready and its engine alive."""
        try:
            return (await send(client, "GET", f"{self.url}/health", self._secret())).is_success
        except CallError:
            return False

    async def version(self, client: httpx2.AsyncClient) -> str:
        """Return the version of vLLM; raises a CallError of the kind "stop" if this is another server."""
        response = await send(client, "GET", f"{self.url}/version", self._secret())
        if response.status_code >= 500:
            raise failure_of_response(response, self._secret())
        answer = {} if is_html(response) or not response.is_success else json_of(response, self._secret())
        if not isinstance(answer, Mapping) or not isinstance(answer.get("version"), str):
            raise CallError(f"no vLLM answers there (/version: HTTP {response.status_code})", "stop")
        return answer["version"]

    async def models(self, client: httpx2.AsyncClient) -> tuple[ServedBase, dict[str, str]]:
        """Return the base model and the loaded adapters, {name: folder}."""
        answer = await self._json_of(client, "GET", "/v1/models")
        try:
            entries = answer["data"]
            base = next(entry for entry in entries if entry.get("parent") is None)
            adapters = {e["id"]: str(e.get("root")) for e in entries if e.get("parent") is not None}
            return ServedBase(base["id"], str(base.get("root")), int(base.get("max_model_len") or 0)), adapters
        except (TypeError, KeyError, AttributeError, StopIteration, ValueError):
            raise CallError("a list of models of an unknown form") from None

    async def can_load_adapters(self, client: httpx2.AsyncClient) -> bool:
        """Return whether the server takes new adapters while it runs: an empty request is rejected, not unknown."""
        body = {"lora_name": "", "lora_path": ""}
        response = await send(client, "POST", f"{self.url}/v1/load_lora_adapter", self._secret(), body)
        if response.status_code >= 500:
            raise failure_of_response(response, self._secret())
        return response.status_code not in (404, 405)

    async def load(self, client: httpx2.AsyncClient, name: str, folder: str) -> None:
        """Load an adapter; raises a CallError of the kind "refused" with the server's reason."""
        body = {"lora_name": name, "lora_path": folder}
        response = await send(client, "POST", f"{self.url}/v1/load_lora_adapter", self._secret(), body)
        if response.is_success:
            return
        error = failure_of_response(response, self._secret())
        # vLLM answers 500 for an adapter that it cannot load; an engine that died is seen by its health.
        if not await self.is_healthy(client):
            raise error
        # A second process, or a retry, may have loaded the same files.
        _, loaded = await self.models(client)
        if loaded.get(name) != folder:
            raise CallError(str(error), "refused")

    async def unload(self, client: httpx2.AsyncClient, name: str) -> None:
        """Unload an adapter; one that is not loaded is no error."""
        body = {"lora_name": name}
        response = await send(client, "POST", f"{self.url}/v1/unload_lora_adapter", self._secret(), body)
        if not response.is_success and response.status_code != 404:
            raise failure_of_response(response, self._secret())

    async def complete(self, client: httpx2.AsyncClient, request: Request) -> Completed:
        """Return a completion; raises AdapterMissing if the server does not know the adapter."""
        body = request.body(self.base.name)
        response = await send(client, "POST", f"{self.url}/v1/completions", self._secret(), body)
        if response.status_code == 404:
            raise AdapterMissing(f"it no longer has the adapter {body['model']}")
        if not response.is_success:
            raise failure_of_response(response, self._secret())
        return checked_completion(json_of(response, self._secret()), request, body["model"])

    async def _json_of(self, client: httpx2.AsyncClient, method: str, path: str) -> Any:
        response = await send(client, method, self.url + path, self._secret())
        if not response.is_success:
            raise failure_of_response(response, self._secret())
        return json_of(response, self._secret())

    def _secret(self) -> str | None:
        # Read for every call and not stored, so that no attribute holds the key.
        return read_secret(self.api_key_env)


def require_rows(prompt_ids: Sequence[list[int]], keys: Sequence[RowKey]) -> None:
    """Raise ValueError for rows without a key of their own, or an empty prompt."""
    if len(keys) != len(prompt_ids) or len(set(keys)) < len(keys):
        raise ValueError(f"{len(prompt_ids)} prompts and {len(set(keys))} different keys; give each row its own key")
    if not all(prompt_ids):
        raise ValueError("a prompt has no tokens; give it at least one, such as the beginning-of-sequence token")


def checked_completion(answer: Any, request: Request, model: str) -> Completed:
    """Return the completion in a parsed answer of `/v1/completions`, or in one of that form.

    Raises:
        CallError: of another model or prompt, incomplete, or of an unexpected form.
    """
    try:
        (choice,) = answer["choices"]
        reported, prompt_ids = answer["model"], choice.get("prompt_token_ids")
        token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    except (TypeError, KeyError, ValueError, AttributeError):
        raise CallError("an answer of another form than a completion") from None
    if reported != model:
        raise CallError(f"an answer of the model {reported!r} where {model!r} was asked")
    if token_ids is None or prompt_ids is None:
        raise CallError("it returns no token ids; it needs vLLM 0.11 or later", "stop")
    if prompt_ids != request.prompt_ids:
        raise CallError("an answer to another prompt than the one that was sent")
    if not _are(token_ids, int) or not _are(logprobs, float):
        raise CallError("an answer without token ids or without logprobs")
    stops, most = request.params.stop_token_ids, request.params.max_completion_length
    stopped = bool(token_ids) and token_ids[-1] in stops
    unknown = [token for token in token_ids if not 0 <= token < request.vocab_size]
    if unknown:
        knows = f"and the policy knows {request.vocab_size} tokens"
        raise CallError(f"it serves another base model: it sampled the token {unknown[0]}, {knows}", "stop")
    if len(logprobs) != len(token_ids):
        raise CallError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
    if any(token in stops for token in token_ids[:-1]) or len(token_ids) > most:
        raise CallError(f"a completion of {len(token_ids)} tokens that goes on after its end")
    if not token_ids or (not stopped and len(token_ids) < most):
        raise CallError(f"a completion that was cut off after {len(token_ids)} of {most} tokens")
    if not all(math.isfinite(logprob) and logprob <= ROUNDING for logprob in logprobs):
        raise CallError("logprobs that are not finite, or above 0")
    return Completed(token_ids, [float(min(logprob, 0.0)) for logprob in logprobs], stopped)


def _are(values: Any, kind: type) -> bool:
    kinds = (int,) if kind is int else (int, float)
    return isinstance(values, Sequence) and all(type(value) in kinds for value in values)
