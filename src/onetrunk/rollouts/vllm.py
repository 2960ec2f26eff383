"""Rollouts sampled by vLLM servers: only the adapter travels, and no sample is of another version.

A publication is a new folder and a new name on every server (`publishing.py`); `vllm_calls.py` has the calls. Before
training it must hold that the servers' base is the trainer's, by its logprobs, and that nobody else publishes there. A
server that loses an adapter has been started again, perhaps with another base: the run ends, and a resumed run proves
the base again.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from peft import PeftModel
from torch import nn

from onetrunk.parallel.groups import is_first_process, on_first_process, once_per_group
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.publishing import (
    AdapterFolder,
    Published,
    active_adapter,
    check_servable,
    is_same_adapter,
    owner_of,
    policy_adapter,
    reference_adapter,
    role_of,
)
from onetrunk.rollouts.same_base import probe_requests, require_same_base
from onetrunk.rollouts.vllm_calls import (
    Completed,
    Request,
    ServedBase,
    as_rollout,
    check_lora,
    checked_completion,
    checked_version,
    load_adapter,
    loaded_adapters,
    requests_of,
    served_base,
    unload_adapters,
)
from onetrunk.servers.client import Connection, Server
from onetrunk.servers.errors import CallError
from onetrunk.servers.fleet import Fleet, RetryPolicy, gathered, run_async, within
from onetrunk.types import Rollout, RowKey

logger = logging.getLogger(__name__)

T = TypeVar("T")
ROLES = ("policy", "reference")
# The servers' base itself, whatever the reference is.
BASE = "base"
TRIAL = ("trial", 0)
HEALTH_S = 30.0
REQUEST_TIMEOUT_S = 900.0


def vllm_policy(timeout_s: float = REQUEST_TIMEOUT_S) -> RetryPolicy:
    """Return the policy of calls to vLLM servers; `timeout_s` is longer than the longest completion takes."""
    return RetryPolicy(max_calls=5, max_delay_s=10.0, call_timeout_s=timeout_s, patience_s=timeout_s, max_timeouts=1)


@dataclass(eq=False, repr=False)
class VLLMBackend:
    """A `RolloutBackend` on vLLM servers, one or several of the same base model; `onetrunk serve` starts one.

    The draws of a row derive from its key, by way of the request's seed, but they come from the server: a row's
    completion may change with the other rows in flight, because float rounding does.

    Args:
        server_urls: of the servers, such as "http://127.0.0.1:8000". Several single servers, not replicas behind one
            address: an adapter would reach only one of them.
        folder: where adapters are published; the servers must be able to read it under the same path.
        keep_versions: policies that stay loaded, the newest included; at least 2, and staleness + 2.
        roles: what is published and may be asked for; a stage that samples from one role publishes no other.
        shares_servers: also work on servers on which another process publishes. A training needs its servers for
            itself when it starts; an evaluation does not.
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
    shares_servers: bool = False
    policy: RetryPolicy = field(default_factory=vllm_policy)
    wait_s: float = 600.0
    max_concurrency: int = 256
    api_key_env: str | None = None
    progress: Callable[[int, int, int], None] | None = None
    poll: Callable[[], None] | None = None
    policy_version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        urls = [self.server_urls] if isinstance(self.server_urls, str) else list(self.server_urls)
        if not urls:
            raise ValueError("server_urls is empty; give the address of a vLLM server, such as http://127.0.0.1:8000")
        if not self.roles or not set(self.roles) <= set(ROLES):
            raise ValueError(f"roles is {self.roles!r}; name policy, reference, or both")
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
        self,
        servers: Sequence[Server],
        requests: Sequence[Request],
        progress: Callable[[int, int, int], None] | None = None,
    ) -> list[Completed]:
        """Return the completions of requests; RuntimeError if a row gets no valid one."""
        rows: dict[int, Completed] = {}
        num_tokens = 0

        def done(index: int, outcome: Completed | CallError) -> None:
            nonlocal num_tokens
            if isinstance(outcome, CallError):
                hint = "; raise vllm_request_timeout if a completion takes longer" if outcome.timed_out else ""
                raise RuntimeError(f"{outcome.server} gives row {index} no completion: {outcome}{hint}")
            rows[index] = outcome
            num_tokens += len(outcome.token_ids)
            if progress is not None:
                progress(len(rows), len(requests), num_tokens)

        async def ask(to: Connection, index: int) -> Completed:
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
        """Check the servers alone: up, vLLM, new enough, LoRA at run time, one base, no other training. Runs once.

        Raises:
            RuntimeError: what is wrong with which server, and how to start it instead.
        """
        if not self._is_checked:
            on_first_process(self._check_servers)
            self._bases = self._on_each(served_base)
            self._is_checked = True
            atexit.register(self.close)

    def _check_servers(self) -> None:
        run_async(gathered(map(self._wait, self.servers)), self._poll)
        self._vllm_version = list(self._on_each(checked_version).values())[-1]
        self._on_each(check_lora)
        self._require_alone()

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
                        f"{server}: not ready after {self.wait_s:.0f} s (vllm_server_timeout); start it (onetrunk"
                        " serve MODEL --port ...), or correct its address"
                    )
                if not is_told:
                    logger.warning("waiting up to %.0f s for the %s", self.wait_s, server)
                    is_told = True
                await asyncio.sleep(self.policy.first_delay_s)

    def _require_alone(self) -> None:
        """Unload what a process that is gone has left; RuntimeError if another one needs the server."""
        left = []
        for server, adapters in ({} if self.shares_servers else self._on_each(loaded_adapters)).items():
            for name, folder in adapters.items():
                if f"-{self._files.nonce}-" in name:
                    continue
                owner = owner_of(name, folder)
                if owner is not None:
                    raise RuntimeError(
                        f"{server} is in use: {owner}; wait for the other training, or start a server of its own for"
                        " this training (onetrunk serve MODEL --port ...). In one process, close() the earlier"
                        " VLLMBackend first"
                    )
                left += self._files.left_by_another(name, folder)
        self._unload(left)

    def check_policy(self, model: nn.Module, longest_row: int = 0) -> None:
        """Check that the servers can sample from `model`: its adapter, its base by its logprobs, its lengths.

        Called by every process together. Runs once, before the first rollout at the latest.

        Args:
            model: the policy, unwrapped.
            longest_row: most tokens of a prompt and its completion.

        Raises:
            ValueError: an adapter that vLLM does not serve.
            RuntimeError: another base, raw logprobs, too few positions, or an adapter that the server rejects.
        """
        self.check()
        self._check_length(longest_row)
        if self._is_proved:
            return
        adapters = self._adapters_of(model)
        for adapter in adapters.values():
            check_servable(model.peft_config[adapter], f"the adapter {adapter!r}")
        self._prove_base(model)
        if adapters:
            on_first_process(lambda: self._try_adapter(model, next(iter(adapters.values()))))
        self._is_proved = True

    def _adapters_of(self, model: nn.Module) -> dict[str, str]:
        """Return the adapter of each role that is published; a role that the bare base plays has none."""
        by_role = {"policy": policy_adapter(model), "reference": reference_adapter(model)}
        return {role: adapter for role, adapter in by_role.items() if role in self.roles and adapter is not None}

    def _check_length(self, longest_row: int) -> None:
        for server, base in self._bases.items():
            if longest_row > base.max_length > 0:
                raise RuntimeError(
                    f"{server} has {base.max_length} positions, and a prompt with its completion may have"
                    f" {longest_row} tokens; start it with --max-model-len {longest_row} or more, or lower"
                    " max_completion_length"
                )

    def _prove_base(self, model: nn.Module) -> None:
        """Compare logprobs of the servers' base with those of the trainer's, adapters off."""
        requests = probe_requests(model, self.max_length or 0)
        self._vocab_size = requests[0].vocab_size

        def sampled() -> list[tuple[str, str, list[Completed]]]:
            return [(str(s), self._bases[s].root, self._complete([s], requests)) for s in self.servers]

        try:
            proofs = on_first_process(sampled)
        except RuntimeError as error:
            if "out of vocabulary" not in str(error):
                raise
            raise RuntimeError(
                f"a server serves another base model: it does not know every token of the policy ({error})"
            ) from None
        for server, root, completed in proofs:
            require_same_base(model, server, root, requests, completed)

    def _try_adapter(self, model: PeftModel, adapter: str) -> None:
        """Load the adapter on every server, so that a rank that is too large shows before training.

        The first publication unloads it, which shows whether a server was started again after its proof.
        """
        trial = self._files.write(model, adapter, *TRIAL)
        self._published[TRIAL] = trial
        rank = model.peft_config[adapter].r
        self._on_each(lambda to: load_adapter(to, trial.name, trial.folder, rank))
        # A training that began at the same moment is seen now.
        self._require_alone()

    # --- publishing --------------------------------------------------------------------------------------------------

    def sync(self, model: nn.Module, version: int) -> None:
        """Publish the policy as `version`, and sample from the role that is active in `model` from now on.

        The first process publishes, the others wait. The same version with the same weights is published once.

        Args:
            model: the policy, unwrapped; a model without adapters samples from the servers' base.
            version: number of optimizer steps so far.

        Raises:
            ValueError, RuntimeError: as `check` and `check_policy`; a server does not load the adapter.
        """
        self.check_policy(model)
        self._role, adapters = role_of(active_adapter(model)), self._adapters_of(model)
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
        if before is not None and (role == "reference" or is_same_adapter(before, model, adapter)):
            return
        published = self._files.write(model, adapter, role, version)
        rank = model.peft_config[adapter].r
        self._on_each(lambda to: load_adapter(to, published.name, published.folder, rank))
        for server, names in self._on_each(loaded_adapters).items():
            gone = [kept.name for kept in self._published.values() if kept.name not in names]
            if gone:
                raise RuntimeError(f"{server}: {_lost(gone[0])}; run the same command again with --resume auto")
        with self._lock:
            old = [self._published.pop(key) for key in ((role, version), TRIAL) if key in self._published]
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
            self._files.delete(published.folder)
        self._unloaded = list(old)

    def close(self) -> None:
        """Unload what this process has published, delete its files and release the folder."""
        if not self._is_checked or not is_first_process():
            return
        policy = self.policy
        # Nobody waits for a server at the end of a run.
        self.policy = replace(policy, max_calls=1, call_timeout_s=min(10.0, policy.call_timeout_s))
        try:
            self._unload(list(self._published.values()))
            self._unload([])
        except Exception:
            # The files stay: a server that is only out of reach may still have their adapters.
            logger.warning("the servers do not answer, so adapters stay on them and in %s", self._files.path)
            self._files.close(keeps_files=True)
        else:
            self._files.close()
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
        self,
        role: str,
        version: int,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
    ) -> Rollout:
        """Return one completion per prompt, in the order of the prompts, sampled by a role at a version.

        It depends on nothing that a later `sync` changes, so it may run in a thread while one publishes.

        Args:
            role: "policy"; "reference", the base or the adapter that the policy started from; or "base".
            version: of the policy; published, and not older than `keep_versions`. The reference has none.
            prompt_ids, params, keys: as in `RolloutBackend.generate`.

        Raises:
            ValueError: an empty prompt, rows without a key, or more tokens than the servers have positions.
            RuntimeError: the version is not published, no server is left, or a row gets no valid answer.
        """
        adapter = self._adapter_of(role, version)
        name = None if adapter is None else adapter.name
        requests = requests_of(prompt_ids, params, keys, name, self._vocab_size)
        self._check_length(max(map(len, prompt_ids), default=0) + params.max_completion_length)
        # Processes that share a divided model must get the same tokens.
        rows = once_per_group(lambda: self._complete(self.servers, requests, self.progress))
        return as_rollout(requests, rows, version)

    def _adapter_of(self, role: str, version: int) -> Published | None:
        if role not in (*ROLES, BASE):
            raise ValueError(f"role {role!r} is none of {', '.join((*ROLES, BASE))}")
        if not self._is_checked:
            raise RuntimeError("nothing is published yet; call sync(model, version) first")
        if role == BASE:
            return None
        with self._lock:
            adapter = self._published.get((role, version if role == "policy" else 0))
            versions = sorted(v for r, v in self._published if r == "policy")
        if adapter is None and role == "reference" and not self._reference_is_base:
            raise ValueError("the reference is an adapter that is not published; name it in roles")
        if adapter is None and role == "policy":
            raise RuntimeError(
                f"version {version} of the policy is not on the servers, which have {versions or 'none'}; call"
                " sync(model, version) first, and set keep_versions to staleness + 2"
            )
        return adapter


@dataclass(frozen=True)
class ServedModel:
    """One model on vLLM servers as a backend of its own: a published policy, or the servers' base.

    Args:
        servers: already synced to the model.
        role: "policy" or "base".
        version: under which it was published.
    """

    servers: VLLMBackend
    role: str
    version: int

    @classmethod
    def publish(cls, servers: VLLMBackend, model: nn.Module, version: int) -> ServedModel:
        """Publish a model and return its backend; the model is not needed any more.

        Raises:
            ValueError, RuntimeError: as `VLLMBackend.sync`; an adapter that vLLM does not serve.
        """
        adapter = policy_adapter(model)
        if adapter is not None:
            check_servable(model.peft_config[adapter])
        servers.sync(model, version)
        return cls(servers, BASE if adapter is None else "policy", version)

    @property
    def description(self) -> str:
        """What samples, for reports."""
        return self.servers.description

    @property
    def max_length(self) -> int | None:
        """Most tokens of prompt and completion together; None if the servers do not say."""
        return self.servers.max_length

    def sync(self, model: nn.Module, version: int) -> None:
        """Do nothing: the model was published, and does not change."""

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        """Return one completion per prompt (see `VLLMBackend.generate_as`)."""
        return self.servers.generate_as(self.role, self.version, prompt_ids, params, keys)


def _lost(name: str) -> str:
    return f"it no longer has the adapter {name}, so it was started again, or another process has unloaded it"
