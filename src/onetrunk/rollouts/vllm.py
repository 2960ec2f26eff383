"""Rollouts sampled by vLLM servers: only the adapter travels, and no sample is of another version.

A publication is a new folder and a new name on every server (`adapters.py`). Calls and their checks are in
`server.py`, balancing in `pool.py`. This file decides what is published, asked and unloaded, and what must hold before
training: the servers' base is the trainer's, by its logprobs, and nobody else publishes there.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn

from onetrunk.parallel.groups import is_first_process, on_first_process, once_per_group
from onetrunk.rollouts.adapters import (
    DTYPES,
    AdapterFolder,
    Published,
    active_adapter,
    check_servable,
    is_same_adapter,
    owner_of,
    policy_adapter,
    published_dtype,
    reference_adapter,
    role_of,
)
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.pool import Connection, ServerPolicy, ServerPool
from onetrunk.rollouts.proof import Probe, probe_of, require_same_base
from onetrunk.rollouts.server import LEAST_VERSION, Completed, Request, VLLMServer, require_rows
from onetrunk.types import Rollout, RowKey
from onetrunk.utils.calls import CallError
from onetrunk.utils.randomness import derived_seed

logger = logging.getLogger(__name__)

ROLES = ("policy", "reference")
# The servers' base itself, whatever the reference is.
BASE = "base"
TRIAL = ("trial", 0)


@dataclass(eq=False, repr=False)
class VLLMBackend:
    """A `RolloutBackend` on vLLM servers, one or several of the same base model; `onetrunk serve` starts one.

    The draws of a row derive from its key, by way of the request's seed, but they come from the server: a row's
    completion may change with the other rows in flight, because float rounding does.

    Args:
        server_urls: of the servers, such as "http://127.0.0.1:8000". Several single servers, not replicas behind one
            address: an adapter would reach only one of them.
        folder: where adapters are published; the servers must be able to read it under the same path.
        adapter_dtype: of the published weights: "float32", "bfloat16", "float16", or "auto" for that of the base in
            the trainer. Choose the servers' own: the server converts to it anyway.
        keep_versions: policies that stay loaded, the newest included; at least 2, and staleness + 2.
        roles: what is published and may be asked for; a stage that samples from one role publishes no other.
        shares_servers: also work on servers on which another process publishes. A training needs its servers for
            itself when it starts; an evaluation does not.
        policy: deadlines, waits and concurrency.
        api_key_env: environment variable that holds the servers' key.
        allow_http: plain http also to hosts outside this machine and private networks.
        progress: called as `progress(done_rows, total_rows, done_tokens)` whenever a row finishes.
        poll: called twice a second while waiting; may raise to stop sampling.

    Raises:
        ValueError: a setting that cannot work.
    """

    server_urls: Sequence[str] | str
    folder: str | Path
    _: KW_ONLY
    adapter_dtype: str = "auto"
    keep_versions: int = 2
    roles: tuple[str, ...] = ROLES
    shares_servers: bool = False
    policy: ServerPolicy = field(default_factory=ServerPolicy)
    api_key_env: str | None = None
    allow_http: bool = False
    progress: Callable[[int, int, int], None] | None = None
    poll: Callable[[], None] | None = None
    policy_version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        urls = [self.server_urls] if isinstance(self.server_urls, str) else list(self.server_urls)
        if not urls:
            raise ValueError("server_urls is empty; give the address of a vLLM server, such as http://127.0.0.1:8000")
        if self.adapter_dtype not in ("auto", *DTYPES):
            raise ValueError(f"adapter_dtype is {self.adapter_dtype!r}; expected auto, {', '.join(DTYPES)}")
        if not self.roles or not set(self.roles) <= set(ROLES):
            raise ValueError(f"roles is {self.roles!r}; name policy, reference, or both")
        if self.keep_versions < 2:
            raise ValueError(
                f"keep_versions is {self.keep_versions}; set it to 2 or more: a version may be in use while the next"
                " one is published"
            )
        servers = [VLLMServer(url, self.api_key_env, self.allow_http) for url in urls]
        if len({server.url for server in servers}) < len(servers):
            raise ValueError(f"server_urls names a server twice: {', '.join(urls)}")
        self.pool = ServerPool(servers, self.policy, self._poll)
        self._files = AdapterFolder(self.folder)
        self._lock = threading.RLock()
        # By role and version; and what is to be unloaded and deleted: {publication: whether it was unloaded before}.
        self._published: dict[tuple[str, int], Published] = {}
        self._retired: dict[Published, bool] = {}
        self._role = "policy"
        self._is_checked = self._is_proved = False
        self._vllm_version = ""
        # Whether the reference of the model of the last sync is the servers' base.
        self._reference_is_base = True
        # Seconds and bytes of the last publication.
        self.last_sync: dict[str, float] = {}

    def _poll(self) -> None:
        # The checks run while the trainer, whose hook this is, is still being made.
        if self.poll is not None and self._is_proved:
            self.poll()

    @property
    def description(self) -> str:
        """What samples, for reports; without addresses, because a server that moves is the same."""
        number = len(self.pool.servers)
        return f"vLLM {self._vllm_version}".strip() + (f" on {number} servers" if number > 1 else "")

    # --- checks before training --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the servers alone: up, vLLM, new enough, LoRA at run time, one base, no other training. Runs once.

        Raises:
            ValueError: an address that may not be called.
            RuntimeError: what is wrong with which server, and how to start it instead.
        """
        if not self._is_checked:
            on_first_process(self._check_servers)
            if not is_first_process():  # The bases are needed to ask for them.
                self._read_bases()
            self._is_checked = True
            atexit.register(self.close)

    def _check_servers(self) -> None:
        for server in self.pool.servers:
            server.check_host()
        self.pool.wait()
        self.pool.on_each(self._check_version)
        self._read_bases()
        self.pool.on_each(self._check_lora)
        self._require_alone()

    def _read_bases(self) -> None:
        async def read(connection: Connection) -> None:
            connection.server.base, _ = await connection.server.models(connection.client)

        self.pool.on_each(read)

    async def _check_version(self, connection: Connection) -> None:
        text = await connection.server.version(connection.client)
        numbers = tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
        # A build from source calls itself 0.1.dev: what it can do is seen by the probe.
        self._vllm_version = text
        if "dev" not in text and numbers < LEAST_VERSION:
            least = ".".join(map(str, LEAST_VERSION))
            raise CallError(f"its version {text} is too old; install vLLM {least} or later", "stop")

    async def _check_lora(self, connection: Connection) -> None:
        if not await connection.server.can_load_adapters(connection.client):
            raise CallError(
                "it takes no adapters while it runs; start it with --enable-lora and the environment variable"
                " VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, as onetrunk serve does",
                "stop",
            )

    def _require_alone(self) -> None:
        """Unload what a process that is gone has left; RuntimeError if another one needs the server."""
        if self.shares_servers:
            return
        listed = self._listed()
        for server, adapters in listed.items():
            for name, folder in adapters.items():
                if f"-{self._files.nonce}-" in name:
                    continue
                owner = owner_of(name, folder)
                if owner is None:
                    self._retired |= {left: False for left in self._files.left_by_another(name, folder)}
                else:
                    raise RuntimeError(f"{server} is in use: {owner}; {_remedy(owner)}")
        self._sweep(listed)

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
        adapters = self._adapters(model)
        for adapter in adapters.values():
            check_servable(model.peft_config[adapter], f"the adapter {adapter!r}")
        self._prove_base(model)
        if adapters:
            on_first_process(lambda: self._try_adapter(model, next(iter(adapters.values()))))
        self._is_proved = True

    def _adapters(self, model: nn.Module) -> dict[str, str]:
        """Return the adapter of each role that is published; a role that the bare base plays has none."""
        by_role = {"policy": policy_adapter(model), "reference": reference_adapter(model)}
        return {role: adapter for role, adapter in by_role.items() if role in self.roles and adapter is not None}

    def _check_length(self, longest_row: int) -> None:
        for server in self.pool.up:
            if longest_row > server.base.max_length > 0:
                raise RuntimeError(
                    f"{server} has {server.base.max_length} positions, and a prompt with its completion may have"
                    f" {longest_row} tokens; start it with --max-model-len {longest_row} or more, or lower"
                    " max_completion_length"
                )

    def _try_adapter(self, model: PeftModel, adapter: str) -> None:
        """Load the adapter on every server, so that a rank that is too large shows before training."""
        trial = self._files.write(model, adapter, *TRIAL, self._dtype(model))
        # Unloaded by the first publication, which sees by it whether a server was started again after its proof.
        self._published[TRIAL] = trial
        self._load(trial, model.peft_config[adapter].r)
        # A training that began at the same moment is seen now.
        self._require_alone()

    def _prove_base(self, model: nn.Module) -> None:
        """Compare logprobs of the servers' base with those of the trainer's, adapters off."""
        lengths = [server.base.max_length for server in self.pool.up if server.base.max_length]
        probe = probe_of(model, min(lengths, default=0))
        self._vocab_size = probe.vocab_size
        proofs = on_first_process(lambda: [(str(s), s.base.root, self._probe(s, probe)) for s in self.pool.up])
        for server, root, completed in proofs:
            require_same_base(model, server, root, probe, completed)

    def _probe(self, server: VLLMServer, probe: Probe) -> list[Completed]:
        rows: dict[int, Completed] = {}
        try:
            ServerPool([server], self.policy, self.pool.poll).complete(probe.requests, rows.__setitem__)
        except RuntimeError as error:
            if "out of vocabulary" not in str(error):
                raise
            raise RuntimeError(
                f"{server} serves another base model: it does not know every token of the policy ({error}); it loaded"
                f" {server.base.root}"
            ) from None
        return [rows[i] for i in range(len(probe.prompts))]

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
        self._role, adapters = role_of(active_adapter(model)), self._adapters(model)
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
        """Write the adapter, load it on every server and unload an old one, unless the same is published already."""
        dtype, before = self._dtype(model), self._published.get((role, version))
        if before is not None and (role == "reference" or is_same_adapter(before, model, adapter, dtype)):
            return
        began = time.perf_counter()
        published = self._files.write(model, adapter, role, version, dtype)
        written = time.perf_counter()
        self._load(published, model.peft_config[adapter].r)
        loaded = time.perf_counter()
        listed = self._listed()
        self._require_kept(listed)
        with self._lock:
            for replaced in ((role, version), TRIAL):
                if replaced in self._published:
                    self._retired[self._published.pop(replaced)] = False
            self._published[role, version] = published
            # In the order in which they were published: a second training begins again at version 0.
            policies = [key for key in self._published if key[0] == "policy"]
            for old in policies[: max(0, len(policies) - self.keep_versions)]:
                self._retired[self._published.pop(old)] = False
        self._sweep(listed)
        self.last_sync = {"write_s": written - began, "load_s": loaded - written, "bytes": published.num_bytes}

    def _load(self, published: Published, rank: int) -> None:
        async def load(connection: Connection) -> None:
            await connection.server.load(connection.client, published.name, published.folder)

        try:
            self.pool.on_each(load)
        except RuntimeError as error:
            hints = {
                "No adapter found": f"; it must be able to read {published.folder}: put the folder where both see it",
                "rank": f"; start it with --max-lora-rank {rank} or more",
                "LoRA is not enabled": "; start it with --enable-lora",
            }
            hint = next((hint for word, hint in hints.items() if word in str(error)), "")
            raise RuntimeError(f"{error}{hint}") from None

    def _listed(self) -> dict[VLLMServer, dict[str, str]]:
        """Return the adapters of each server that is up, {name: folder}."""

        async def read(connection: Connection) -> dict[str, str]:
            return (await connection.server.models(connection.client))[1]

        return self.pool.on_each(read)

    def _require_kept(self, listed: dict[VLLMServer, dict[str, str]]) -> None:
        """Lose each server without an adapter that was published before: it may have come back with another base."""
        for server, names in listed.items():
            gone = [kept.name for kept in self._published.values() if kept.name not in names]
            if gone:
                self.pool.lose(server, f"it no longer has the adapter {gone[0]}, so it was started again")

    def _sweep(self, listed: dict[VLLMServer, dict[str, str]]) -> None:
        """Unload what is retired, and delete the files of what was unloaded in an earlier sweep."""
        for old, was_unloaded in list(self._retired.items()):
            if was_unloaded and not any(old.name in names for names in listed.values()):
                self._files.delete(old.folder)
                del self._retired[old]
            else:
                self._retired[old] = True
        retired = {old.name for old in self._retired}

        async def unload(connection: Connection) -> None:
            for name in listed.get(connection.server, {}):
                if name in retired:
                    await connection.server.unload(connection.client, name)

        self.pool.on_each(unload)

    def _dtype(self, model: nn.Module) -> torch.dtype:
        return published_dtype(model, self.adapter_dtype)

    def close(self) -> None:
        """Unload what this process has published, delete its files and release the folder."""
        if not self._is_checked or not is_first_process():
            return
        with self._lock:
            self._retired.update(dict.fromkeys(self._published.values(), True))
            self._published.clear()
        # Nobody waits for a server at the end of a run.
        self.pool.policy = replace(self.policy, timeout_s=min(10.0, self.policy.timeout_s))
        try:
            self._sweep(self._listed())
        except Exception:
            # The files stay: a server that is only out of reach may still have their adapters.
            logger.warning("the servers do not answer, so adapters stay on them and in %s", self._files.path)
            self._files.close(keeps_files=True)
        else:
            self._files.close()
        self.pool.policy = self.policy
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
        require_rows(prompt_ids, keys)
        self._check_length(max(map(len, prompt_ids), default=0) + params.max_completion_length)
        # Processes that share a divided model must get the same tokens.
        rows = once_per_group(lambda: self._complete(adapter, prompt_ids, params, keys))
        return _as_rollout(prompt_ids, rows, version)

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

    def _complete(
        self,
        adapter: Published | None,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
    ) -> list[Completed]:
        name = None if adapter is None else adapter.name
        requests = [
            Request(list(ids), params, derived_seed(*key), name, self._vocab_size)
            for ids, key in zip(prompt_ids, keys, strict=True)
        ]
        rows: dict[int, Completed] = {}
        num_tokens = 0

        def done(index: int, completed: Completed) -> None:
            nonlocal num_tokens
            rows[index] = completed
            num_tokens += len(completed.token_ids)
            if self.progress is not None:
                self.progress(len(rows), len(requests), num_tokens)

        if requests:
            self.pool.complete(requests, done)
        return [rows[index] for index in range(len(requests))]


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
        lengths = [server.base.max_length for server in self.servers.pool.up if server.base.max_length]
        return min(lengths, default=None)

    def sync(self, model: nn.Module, version: int) -> None:
        """Do nothing: the model was published, and does not change."""

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        """Return one completion per prompt (see `VLLMBackend.generate_as`)."""
        return self.servers.generate_as(self.role, self.version, prompt_ids, params, keys)


def _as_rollout(prompt_ids: Sequence[list[int]], rows: Sequence[Completed], version: int) -> Rollout:
    return Rollout(
        prompt_ids=[list(ids) for ids in prompt_ids],
        completion_ids=[row.token_ids for row in rows],
        sampler_logprobs=[torch.tensor(row.logprobs, dtype=torch.float32) for row in rows],
        stopped=[row.stopped for row in rows],
        policy_version=version,
    )


def _remedy(owner: str) -> str:
    if f"process {os.getpid()} " in owner:
        return "that is this process: call close() on the earlier VLLMBackend first"
    return "start a server of its own for this training (onetrunk serve MODEL --port ...), or wait for the other one"
