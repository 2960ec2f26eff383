"""The calls to a vLLM server, and the checks that a completion must pass, of a server or of an engine in this process.

A completion counts only if it names the model that was asked, repeats the prompt, and has one logprob for each token
up to a stop token or the length limit. Anything else is an error, never a sample.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from onetrunk.rollouts.base import SamplingParams
from onetrunk.servers.errors import CallError
from onetrunk.types import Rollout, RowKey
from onetrunk.utils.randomness import derived_seed

if TYPE_CHECKING:
    from onetrunk.servers.client import Connection

# vLLM returns token ids, and logprobs after temperature, from this version on.
LEAST_VERSION = (0, 11)
# Rounding of the server: the logprob of a token that is certain.
ROUNDING = 1e-3
# Why a load fails, by a part of vLLM's message, and what to change.
LOAD_HINTS = {
    "No adapter found": "; it must be able to read {folder}: put the folder where both see it",
    "rank": "; start it with --max-lora-rank {rank} or more",
    "LoRA is not enabled": "; start it with --enable-lora",
}


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


def requests_of(
    prompt_ids: Sequence[list[int]],
    params: SamplingParams,
    keys: Sequence[RowKey],
    model: str | None,
    vocab_size: int = sys.maxsize,
) -> list[Request]:
    """Return a request per prompt; ValueError for an empty prompt, or rows without a key of their own."""
    if len(keys) != len(prompt_ids) or len(set(keys)) < len(keys):
        raise ValueError(f"{len(prompt_ids)} prompts and {len(set(keys))} different keys; give each row its own key")
    if not all(prompt_ids):
        raise ValueError("a prompt has no tokens; give it at least one, such as the beginning-of-sequence token")
    return [
        Request(list(ids), params, derived_seed(*key), model, vocab_size)
        for ids, key in zip(prompt_ids, keys, strict=True)
    ]


def as_rollout(requests: Sequence[Request], rows: Sequence[Completed], version: int) -> Rollout:
    """Return the completions of requests as a rollout of a policy version."""
    return Rollout(
        prompt_ids=[request.prompt_ids for request in requests],
        completion_ids=[row.token_ids for row in rows],
        sampler_logprobs=[torch.tensor(row.logprobs, dtype=torch.float32) for row in rows],
        stopped=[row.stopped for row in rows],
        policy_version=version,
    )


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


@dataclass(frozen=True)
class ServedBase:
    """The base model of a server: its name there, what it was loaded from, and its positions (0: unknown)."""

    name: str
    root: str
    max_length: int


async def _models(to: Connection) -> tuple[ServedBase, dict[str, str]]:
    """Return the base model and the loaded adapters, {name: folder}."""
    answer = await to.ask("GET", "/v1/models")
    try:
        base = next(entry for entry in answer["data"] if entry.get("parent") is None)
        adapters = {e["id"]: str(e.get("root")) for e in answer["data"] if e.get("parent") is not None}
        return ServedBase(base["id"], str(base.get("root")), int(base.get("max_model_len") or 0)), adapters
    except (TypeError, KeyError, AttributeError, StopIteration, ValueError):
        raise CallError("a list of models of an unknown form") from None


async def served_base(to: Connection) -> ServedBase:
    """Return the base model of a server."""
    return (await _models(to))[0]


async def loaded_adapters(to: Connection) -> dict[str, str]:
    """Return the adapters that a server has, {name: folder}."""
    return (await _models(to))[1]


async def checked_version(to: Connection) -> str:
    """Return the version of vLLM; CallError for an old one, and for another kind of server."""
    try:
        text = (await to.ask("GET", "/version"))["version"]
        numbers = tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
    except (TypeError, KeyError, AttributeError):
        raise CallError("no vLLM answers there (/version has another form)", "stop") from None
    except CallError as error:
        if error.kind == "again" and error.status is not None and error.status >= 500:
            raise
        raise CallError(f"no vLLM answers there (/version: {error})", "stop") from None
    # A build from source calls itself 0.1.dev: what it can do is seen by the probe.
    if "dev" not in text and numbers < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise CallError(f"its version {text} is too old; install vLLM {least} or later", "stop")
    return text


async def check_lora(to: Connection) -> None:
    """Check that the server takes adapters while it runs: it rejects an empty request, and does not say 404."""
    try:
        await to.ask("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""}, is_json=False)
    except CallError as error:
        if error.status in (404, 405):
            raise CallError(
                "it takes no adapters while it runs; start it with --enable-lora and the environment variable"
                " VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as onetrunk serve does",
                "stop",
            ) from None
        if error.kind != "refused":
            raise


async def load_adapter(to: Connection, name: str, folder: str, rank: int) -> None:
    """Load an adapter on a server; raises CallError with its reason, and what to change."""
    body = {"lora_name": name, "lora_path": folder}
    try:
        await to.ask("POST", "/v1/load_lora_adapter", body, is_json=False)
    except CallError as error:
        if error.status is None:
            raise
        # vLLM answers 500 too for an adapter that it does not load. A call whose answer was lost may have loaded it.
        if (await loaded_adapters(to)).get(name) != folder:
            hint = next((hint for word, hint in LOAD_HINTS.items() if word in str(error)), "")
            raise CallError(f"{error}{hint.format(folder=folder, rank=rank)}", "refused") from None


async def unload_adapters(to: Connection, names: Sequence[str]) -> None:
    """Unload adapters from a server; one that is not loaded is no error."""
    for name in names:
        try:
            await to.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, is_json=False)
        except CallError as error:
            if error.status != 404:
                raise
