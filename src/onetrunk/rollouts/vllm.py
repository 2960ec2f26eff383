"""Rollouts sampled by vLLM servers: only the adapter travels, and no sample is of another version.

A publication is a new folder and a new name on every server (`publishing.py`). Before training the servers' base is
compared with the trainer's, by its logprobs (`vllm_requests.py`). A server that loses an adapter has been started
again, perhaps with another base: the run ends, and a resumed run checks the base again.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from peft import PeftModel
from torch import nn

from onetrunk.parallel.groups import is_first_process, on_first_process, once_per_group
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.decoding import Completion, rollout_of
from onetrunk.rollouts.episodes.rows import Answers, Progress, play_row_by_row
from onetrunk.rollouts.publishing import (
    ADAPTERS_FOLDER,
    ROLES,
    AdapterFolder,
    Published,
    active_adapter,
    is_same_adapter,
    reference_adapter,
    role_of,
    servable_adapters,
)
from onetrunk.rollouts.vllm_requests import Request, checked_completion, probe_requests, requests_of, require_same_base
from onetrunk.servers.client import Connection, Server
from onetrunk.servers.errors import CallError
from onetrunk.servers.fleet import Fleet, RetryPolicy, gathered, run_async, within
from onetrunk.types import Rollout, RowKey
from onetrunk.utils.files import read_number
from onetrunk.utils.randomness import derived_seed

logger = logging.getLogger(__name__)

T = TypeVar("T")
HEALTH_S = 30.0
REQUEST_TIMEOUT_S = 900.0
# Why a load fails, by a part of the error, and what to change.
LOAD_HINTS = {
    "No adapter found": "; it must be able to read {folder}: put the folder where both see it",
    "rank": "; start it with --max-lora-rank {rank} or more",
    "HTTP 404": "; start it with --enable-lora and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as"
    " onetrunk serve does",
}


def load_servers(config: Any, **settings: Any) -> VLLMBackend:
    """Return the backend of the servers that a config (PPOConfig, or a stage's arguments) names.

    `settings` are further arguments of VLLMBackend.
    """
    return VLLMBackend(
        config.server_urls,
        Path(config.output_dir) / ADAPTERS_FOLDER,
        policy=vllm_policy(config.vllm_request_timeout),
        wait_s=config.vllm_server_timeout,
        api_key_env=config.vllm_api_key_env,
        **settings,
    )


def vllm_policy(timeout_s: float = REQUEST_TIMEOUT_S) -> RetryPolicy:
    """Return the policy of calls to vLLM servers; `timeout_s` is longer than the longest completion takes."""
    return RetryPolicy(max_calls=5, max_delay_s=10.0, call_timeout_s=timeout_s, patience_s=timeout_s, max_timeouts=1)


@dataclass(frozen=True)
class ServedBase:
    """The base model of a server: its name there, what it was loaded from, and its positions (0: unknown)."""

    name: str
    root: str
    max_length: int


@dataclass(eq=False, repr=False)
class VLLMBackend:
    """A `RolloutBackend` on vLLM servers, one or several of the same base model; `onetrunk serve` starts one.

    The draws of a row derive from its key, by way of the request's seed, but they come from the server: a row's
    completion may change with the other rows in flight, because float rounding does.

    Args:
        server_urls: addresses, such as "http://127.0.0.1:8000". Several single servers, not replicas behind one
            address: an adapter would reach only one of them.
        folder: where adapters are published; no other process publishes there, and the servers must be able to read it
            under the same path.
        keep_versions: policies that stay loaded, the newest included; at least 2, and `PPOConfig.versions_in_use`.
        roles: what is published and may be asked for; a stage that samples from one role publishes no other.
        policy: deadlines and repeated calls.
        wait_s: how long to wait until a server is up, at the start.
        max_concurrency: rows in flight per server.
        api_key_env: environment variable that holds the servers' key.
        progress: called as `progress(done_rows, total_rows, done_tokens)` whenever a row finishes.
        poll: called twice a second while waiting; may raise to stop sampling.

    Raises:
        ValueError: a setting that cannot work.
    """

    server_urls: Sequence[str] | str
    folder: str | Path
    _: KW_ONLY
    keep_versions: int = 2
    roles: tuple[str, ...] = ROLES
    policy: RetryPolicy = field(default_factory=vllm_policy)
    wait_s: float = 600.0
    max_concurrency: int = 256
    api_key_env: str | None = None
    progress: Progress | None = None
    poll: Callable[[], None] | None = None
    policy_version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        urls = [self.server_urls] if isinstance(self.server_urls, str) else list(self.server_urls)
        if not urls:
            raise ValueError("server_urls is empty; give the address of a vLLM server, such as http://127.0.0.1:8000")
        if self.keep_versions < 2:
            raise ValueError(
                f"keep_versions is {self.keep_versions}; set it to 2 or more: a version may be in use while the next"
                " one is published"
            )
        bare = [url.rstrip("/").removesuffix("/v1") for url in urls]
        if len(set(bare)) < len(bare):
            raise ValueError(f"server_urls names a server twice: {', '.join(urls)}")
        self.servers = [Server(url, "the address of a vLLM server", "vLLM server", self.api_key_env) for url in bare]
        self._files = AdapterFolder(self.folder)
        self._lock = threading.RLock()
        self._bases: dict[Server, ServedBase] = {}
        self._published: dict[tuple[str, int], Published] = {}
        # Unloaded, and to be deleted at the next publication: a call in flight may still read them.
        self._unloaded: list[Published] = []
        self._role = "policy"
        self._is_checked = self._is_proved = False
        self._proved_base: Callable[[], nn.Module | None] = lambda: None
        self._vllm_version = ""
        # Whether the reference of the model of the last sync is the servers' base.
        self._reference_is_base = True

    @property
    def description(self) -> str:
        """What samples, for reports; without addresses, because a server that moves is the same."""
        number = len(self.servers)
        return f"vLLM {self._vllm_version}".strip() + (f" on {number} servers" if number > 1 else "")

    @property
    def max_length(self) -> int | None:
        """Most tokens of prompt and completion together; None if the servers do not say."""
        return min((base.max_length for base in self._bases.values() if base.max_length), default=None)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        # The checks run while the trainer, whose hook this is, is still being made.
        if self.poll is not None and self._is_proved:
            self.poll()

    def _on_each(self, work: Callable[[Connection], Awaitable[T]]) -> dict[Server, T]:
        """Return what `work` returns for each server; RuntimeError names one that fails."""

        async def one(server: Server) -> T:
            async with Fleet([server], self.policy) as fleet:
                try:
                    return await fleet.call(work)
                except CallError as error:
                    raise RuntimeError(f"{server}: {error}") from None

        return dict(zip(self.servers, run_async(gathered(map(one, self.servers)), self._poll), strict=True))

    def _complete(
        self, servers: Sequence[Server], requests: Sequence[Request], progress: Progress | None = None
    ) -> list[Completion]:
        """Return the completions of requests; RuntimeError if a row gets no valid one."""
        rows: dict[int, Completion] = {}
        num_tokens = 0

        def done(index: int, outcome: Completion | CallError) -> None:
            nonlocal num_tokens
            if isinstance(outcome, CallError):
                hint = "; raise vllm_request_timeout if a completion takes longer" if outcome.timed_out else ""
                raise RuntimeError(f"{outcome.server} gives row {index} no completion: {outcome}{hint}")
            rows[index] = outcome
            num_tokens += len(outcome.token_ids)
            if progress is not None:
                progress(len(rows), len(requests), num_tokens)

        async def ask(to: Connection, index: int) -> Completion:
            request = requests[index]
            body = request.body(self._bases[to.server].name)
            try:
                return checked_completion(await to.ask("POST", "/v1/completions", body), request, body["model"])
            except CallError as error:
                if error.status == 404:
                    raise CallError(_lost(body["model"]), "stop", status=404) from None
                raise

        async def ask_all() -> None:
            async with Fleet(servers, self.policy, self.max_concurrency) as fleet:
                await fleet.answer_all(len(requests), ask, done)

        run_async(ask_all(), self._poll)
        return [rows[index] for index in range(len(requests))]

    # --- checks before training --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Wait for the servers, and unload what killed processes of this run have left on them. Runs once."""
        if not self._is_checked:
            on_first_process(self._check_servers)
            self._bases = {server: base for server, (base, _) in self._on_each(served_models).items()}
            self._is_checked = True
            atexit.register(self.close)

    def _check_servers(self) -> None:
        run_async(gathered(map(self._wait, self.servers)), self._poll)
        self._vllm_version = list(self._on_each(vllm_version).values())[-1]
        self._on_each(self._unload_leftovers)
        self._files.delete_leftovers()

    async def _wait(self, server: Server) -> None:
        """Wait until a server is up; RuntimeError after `wait_s`."""
        began, is_told = time.monotonic(), False
        async with server.connect() as connection:
            while True:
                try:
                    await within(HEALTH_S, connection.ask("GET", "/health", is_json=False))
                    return
                except CallError:
                    pass
                if time.monotonic() - began > self.wait_s:
                    raise RuntimeError(
                        f"{server}: not ready after {self.wait_s:.0f} s (vllm_server_timeout); start it in another"
                        " terminal (onetrunk serve MODEL --port PORT), or correct vllm_server_base_url"
                    )
                if not is_told:
                    logger.warning("waiting up to %.0f s for the %s (onetrunk serve MODEL)", self.wait_s, server)
                    is_told = True
                await asyncio.sleep(self.policy.first_delay_s)

    async def _unload_leftovers(self, to: Connection) -> None:
        names = await loaded_adapters(to)
        await unload_adapters(to, [name for name, folder in names.items() if self._files.is_leftover(folder)])

    def check_policy(self, model: nn.Module, longest_row: int = 0) -> None:
        """Check that the servers can sample from `model`: its adapter, its base by its logprobs, its lengths.

        Called by every process together. Runs once for a base, before its first rollout at the latest.
        """
        self.check()
        self._check_length(longest_row)
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        if self._is_proved and self._proved_base() is base:
            return
        servable_adapters(model, self.roles)
        self._prove_base(model)
        self._is_proved, self._proved_base = True, weakref.ref(base)

    def _check_length(self, longest_row: int) -> None:
        for server, base in self._bases.items():
            if longest_row > base.max_length > 0:
                raise RuntimeError(
                    f"{server} has {base.max_length} positions, and a prompt with its completion may have"
                    f" {longest_row} tokens; start it with --max-model-len {longest_row} or more, or lower"
                    " max_completion_length"
                )

    def _prove_base(self, model: nn.Module) -> None:
        """Compare logprobs of the servers' base with the trainer's, adapters off."""
        requests = probe_requests(model, self.max_length or 0)
        self._vocab_size = requests[0].vocab_size

        def sampled() -> list[tuple[str, str, list[Completion]]]:
            return [(str(s), self._bases[s].root, self._complete([s], requests)) for s in self.servers]

        for server, root, completed in on_first_process(sampled):
            require_same_base(model, server, root, requests, completed)

    # --- publishing --------------------------------------------------------------------------------------------------

    def sync(self, model: nn.Module, version: int) -> None:
        """Publish the policy as `version`, and sample from the role that is active in `model` from now on.

        The first process publishes, the others wait. The same version with the same weights is published once. A model
        without adapters samples from the servers' base.
        """
        self.check_policy(model)
        self._role, adapters = role_of(active_adapter(model)), servable_adapters(model, self.roles)
        self._reference_is_base = reference_adapter(model) is None
        if self._role != "policy":
            adapters.pop("policy", None)

        def publish() -> dict[tuple[str, int], Published]:
            for role in sorted(adapters, reverse=True):  # The reference first.
                self._publish(model, role, version if role == "policy" else 0, adapters[role])
            return self._published

        published = on_first_process(publish)
        with self._lock:
            self._published, self.policy_version = dict(published), version

    def _publish(self, model: PeftModel, role: str, version: int, adapter: str) -> None:
        """Write the adapter, load it on every server and unload old ones, unless the same is published already."""
        before = self._published.get((role, version))
        if before is not None and is_same_adapter(before, model, adapter):
            return
        published = self._files.write(model, adapter, role, version)
        rank = model.peft_config[adapter].r
        self._on_each(lambda to: load_adapter(to, published.name, published.folder, rank))
        for server, names in self._on_each(loaded_adapters).items():
            gone = [kept.name for kept in self._published.values() if kept.name not in names]
            if gone:
                raise RuntimeError(f"{server}: {_lost(gone[0])}; run the same command again with --resume auto")
        with self._lock:
            old = [] if before is None else [before]
            # Without it first, so that it becomes the newest one.
            self._published.pop((role, version), None)
            self._published[role, version] = published
            # In the order in which they were published: a second training begins again at version 0.
            policies = [key for key in self._published if key[0] == "policy"]
            old += [self._published.pop(key) for key in policies[: max(0, len(policies) - self.keep_versions)]]
        self._unload(old)

    def _unload(self, old: Sequence[Published]) -> None:
        """Unload adapters, and delete the files of those that were unloaded before."""
        if old:
            self._on_each(lambda to: unload_adapters(to, [published.name for published in old]))
        for published in self._unloaded:
            shutil.rmtree(published.folder, ignore_errors=True)
        self._unloaded = list(old)

    def close(self) -> None:
        """Unload what this process has published, and delete its files."""
        if not self._is_checked or not is_first_process():
            return
        policy = self.policy
        # Nobody waits for a server at the end of a run.
        self.policy = replace(policy, max_calls=1, call_timeout_s=min(10.0, policy.call_timeout_s))
        try:
            self._unload(list(self._published.values()))
        except Exception:
            # The files stay: a server that is only out of reach may still have their adapters.
            logger.warning("the servers do not answer, so adapters stay on them and in %s", self._files.path)
        else:
            self._files.delete()
        self.policy = policy
        self._published.clear()
        self._unloaded.clear()
        atexit.unregister(self.close)
        self._is_checked = self._is_proved = False

    # --- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        """Return one completion per prompt, from the role and version of the last `sync` (see `generate_as`)."""
        return self.generate_as(self._role, self.policy_version, prompt_ids, params, keys)

    def generate_as(
        self, role: str, version: int, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]
    ) -> Rollout:
        """Return one completion per prompt, sampled by a role at a version (see `VersionedBackend.generate_as`).

        It depends on nothing that a later `sync` changes, so it may run in a thread while one publishes.
        """
        return self._generate(role, version, self.progress, prompt_ids, params, keys)

    def generate_turns(
        self,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
        answers: Answers,
        role: str,
        version: int,
    ) -> Rollout:
        """Return one episode per prompt, each turn a request with the ids so far, which the server has cached."""
        generate = partial(self._generate, role, version, None)
        return play_row_by_row(generate, prompt_ids, params, keys, answers, self.progress)

    def _generate(
        self,
        role: str,
        version: int,
        progress: Progress | None,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
    ) -> Rollout:
        adapter = self._adapter_of(role, version)
        name = None if adapter is None else adapter.name
        requests = requests_of(prompt_ids, params, keys, name, self._vocab_size)
        self._check_length(max(map(len, prompt_ids), default=0) + params.max_completion_length)
        # The first server gets the calls of a single row: all turns of an episode go to the same.
        first = derived_seed(*keys[0][:3]) % len(self.servers) if keys else 0
        servers = [*self.servers[first:], *self.servers[:first]]
        # Processes that share a divided model must get the same tokens.
        rows = once_per_group(lambda: self._complete(servers, requests, progress))
        return rollout_of(prompt_ids, rows, version)

    def _adapter_of(self, role: str, version: int) -> Published | None:
        if not self._is_checked:
            raise RuntimeError("nothing is published yet; call sync(model, version) first")
        with self._lock:
            adapter = self._published.get((role, version if role == "policy" else 0))
            versions = sorted(v for r, v in self._published if r == "policy")
        if adapter is None and role == "reference" and not self._reference_is_base:
            raise ValueError("the reference is an adapter that is not published; name it in roles")
        if adapter is None and role == "policy":
            raise RuntimeError(
                f"version {version} of the policy is not on the servers, which have {versions or 'none'}; call"
                " sync(model, version) first, and set keep_versions to PPOConfig.versions_in_use"
            )
        return adapter


def _lost(name: str) -> str:
    return f"it no longer has the adapter {name}, so it was started again, or another process has unloaded it"


# --- the calls of a server ------------------------------------------------------------------------------------------


async def served_models(to: Connection) -> tuple[ServedBase, dict[str, str]]:
    """Return the base model and the loaded adapters, {name: folder}."""
    answer = await to.ask("GET", "/v1/models")
    try:
        base = next(entry for entry in answer["data"] if entry.get("parent") is None)
        adapters = {e["id"]: str(e.get("root")) for e in answer["data"] if e.get("parent") is not None}
        longest = read_number(base.get("max_model_len") or 0, int)
        return ServedBase(base["id"], str(base.get("root")), longest), adapters
    except (TypeError, KeyError, AttributeError, StopIteration, ValueError):
        raise CallError("a list of models of an unknown form") from None


async def loaded_adapters(to: Connection) -> dict[str, str]:
    """Return the adapters that a server has, {name: folder}."""
    return (await served_models(to))[1]


async def vllm_version(to: Connection) -> str:
    """Return the version of vLLM; CallError if another kind of server answers."""
    try:
        return str((await to.ask("GET", "/version"))["version"])
    except (TypeError, KeyError):
        raise CallError("no vLLM answers there (/version has another form)", "stop") from None
    except CallError as error:
        if error.status == 404:
            raise CallError(f"no vLLM answers there (/version: {error})", "stop") from None
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
    """Unload adapters from a server; one that is not loaded is not an error."""
    for name in names:
        try:
            await to.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, is_json=False)
        except CallError as error:
            if error.status != 404:
                raise
