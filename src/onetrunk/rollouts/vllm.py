"""Rollouts sampled by vLLM servers: only the adapter travels, and no sample is of another version.

A publication is a new folder and a new name on every server (`adapters.py`). Calls and their checks are in
`server.py`, restarts and balancing in `pool.py`. This file decides what is published, asked and unloaded, and what
must hold before training: the servers' base is the trainer's, by its logprobs, and nobody else publishes there.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn

from onetrunk.models.adapters import role as in_role
from onetrunk.models.parallel import gathered
from onetrunk.models.tensor_parallel import is_first_process, on_first_process, once_per_group
from onetrunk.rollouts.adapters import (
    DTYPES,
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
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.pool import Connection, ServerPolicy, ServerPool
from onetrunk.rollouts.server import LEAST_VERSION, Completed, Request, VLLMServer
from onetrunk.types import Rollout, RowKey
from onetrunk.utils.calls import CallError
from onetrunk.utils.randomness import derived_seed

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The probe of the weights: prompts of pseudo-random tokens, at a temperature that tells raw logprobs from processed.
PROBE_PROMPTS, PROBE_PROMPT_LENGTH, PROBE_TOKENS = 8, 12, 8
PROBE_TEMPERATURE = 0.5
# Mean difference of a token's logprob at that temperature. bfloat16 against float32 measured .03; two bases differ by
# more than 1. A quantised base is further from the servers' one.
LARGEST_GAP, LARGEST_QUANTISED_GAP = 0.2, 0.8


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
        # Seconds and bytes of the last publication.
        self.last_sync: dict[str, float] = {}

    def _poll(self) -> None:
        # The checks run while the trainer, whose hook this is, is still being made.
        if self.poll is not None and self._is_proved:
            self.poll()

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
        self._on_each(self._check_version)
        self._read_bases()
        self._on_each(self._check_lora)
        self._require_alone()

    def _read_bases(self) -> None:
        async def read(connection: Connection) -> None:
            connection.server.base, _ = await connection.server.models(connection.client)

        self._on_each(read)

    async def _check_version(self, connection: Connection) -> None:
        text = await connection.server.version(connection.client)
        numbers = tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())
        # A build from source calls itself 0.1.dev: what it can do is seen by the probe.
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
        """Unload what a training that is gone has left; RuntimeError if another one is alive."""
        for server, adapters in self._listed().items():
            for name, folder in adapters.items():
                if f"-{self._files.nonce}-" in name:
                    continue
                owner = owner_of(name, folder)
                if owner is None:
                    self._retired |= {left: False for left in self._files.left_by_another(name, folder)}
                else:
                    raise RuntimeError(f"{server} is in use: {owner}; {_remedy(owner)}")
        self._sweep()

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
        for adapter in {policy_adapter(model), reference_adapter(model)} - {None}:
            check_servable(model.peft_config[adapter], f"the adapter {adapter!r}")
        self._prove_base(model)
        adapter = policy_adapter(model)
        if adapter is not None:
            on_first_process(lambda: self._try_adapter(model, adapter))
        self._is_proved = True

    def _check_length(self, longest_row: int) -> None:
        for server in self.pool.servers:
            if server.base is not None and longest_row > server.base.max_length > 0:
                raise RuntimeError(
                    f"{server} has {server.base.max_length} positions, and a prompt with its completion may have"
                    f" {longest_row} tokens; start it with --max-model-len {longest_row} or more, or lower"
                    " max_completion_length"
                )

    def _try_adapter(self, model: PeftModel, adapter: str) -> None:
        """Load the adapter on every server, so that a rank that is too large shows before training."""
        trial = self._files.write(model, adapter, "trial", 0, self._dtype(model))
        self._retired[trial] = False
        self._load(trial, model.peft_config[adapter].r)
        # A training that began at the same moment is seen now.
        self._require_alone()

    def _prove_base(self, model: nn.Module) -> None:
        """Compare logprobs of the servers' base with those of the trainer's, adapters off."""
        vocab_size = model.config.get_text_config().vocab_size
        # vLLM ends a completion at its last position without an error.
        positions = min(server.base.max_length or 2**31 for server in self.pool.servers)
        length = min(PROBE_PROMPT_LENGTH, positions // 2)
        prompts = [[derived_seed(row, place) % vocab_size for place in range(length)] for row in range(PROBE_PROMPTS)]
        params = SamplingParams(min(PROBE_TOKENS, positions - length), PROBE_TEMPERATURE)
        probes = on_first_process(lambda: [self._probe(server, prompts, params) for server in self.pool.servers])
        quantised = getattr(model.config, "quantization_config", None) is not None
        limit = LARGEST_QUANTISED_GAP if quantised else LARGEST_GAP
        for server, completed in zip(self.pool.servers, probes, strict=True):
            ids = torch.tensor([p + c.token_ids for p, c in zip(prompts, completed, strict=True)])
            if ids.max() >= vocab_size:
                raise RuntimeError(
                    f"{server} serves another base model: it sampled the token {ids.max()}, and the policy knows"
                    f" {vocab_size}; it loaded {server.base.root}"
                )
            theirs = torch.tensor([c.logprobs for c in completed])
            processed, raw = (_base_logprobs(model, ids, length, t) for t in (PROBE_TEMPERATURE, 1.0))
            gap, raw_gap = ((ours - theirs).abs().mean().item() for ours in (processed, raw))
            if raw_gap < gap and raw_gap <= limit:
                raise RuntimeError(
                    f"{server} returns logprobs before temperature (they agree with ours to {raw_gap:.3f} per token,"
                    f" and after it to {gap:.3f}); start it with --logprobs-mode processed_logprobs"
                )
            if not gap <= limit:
                raise RuntimeError(
                    f"{server} serves another base model: its logprobs of {theirs.numel()} tokens differ from those of"
                    f" {model.config.name_or_path or 'the policy'!r} by {gap:.2f} per token, and at most {limit} is"
                    f" rounding; it loaded {server.base.root}"
                )
            logger.info("%s: logprobs of the base agree to %.2g per token", server, gap)

    def _probe(self, server: VLLMServer, prompts: Sequence[list[int]], params: SamplingParams) -> list[Completed]:
        requests = [Request(prompt, params, seed) for seed, prompt in enumerate(prompts)]
        rows: dict[int, Completed] = {}
        try:
            ServerPool([server], self.policy, self.pool.poll).complete(requests, None, rows.__setitem__)
        except RuntimeError as error:
            if "out of vocabulary" not in str(error):
                raise
            raise RuntimeError(
                f"{server} serves another base model: it does not know every token of the policy ({error}); it loaded"
                f" {server.base.root}"
            ) from None
        return [rows[i] for i in range(len(requests))]

    def _on_each(self, call: Callable[[Connection], Awaitable[T]]) -> dict[VLLMServer, T]:
        """Return `ServerPool.on_each`; a rejected call is a RuntimeError that names the server."""
        try:
            return self.pool.on_each(lambda connection: _named(connection, call))
        except CallError as error:
            raise RuntimeError(str(error)) from None

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
        self._role = role_of(active_adapter(model))
        wanted = [("reference", 0, reference_adapter(model))]
        if self._role == "policy":
            wanted.append(("policy", version, policy_adapter(model)))

        def publish() -> dict[tuple[str, int], Published]:
            for role, number, adapter in wanted:
                if adapter is not None:
                    self._publish(model, role, number, adapter)
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
        with self._lock:
            if before is not None:
                self._retired[before] = False
            self._published.pop((role, version), None)
            self._published[role, version] = published
            # In the order in which they were published: a second training begins again at version 0.
            policies = [key for key in self._published if key[0] == "policy"]
            for old in policies[: max(0, len(policies) - self.keep_versions)]:
                self._retired[self._published.pop(old)] = False
        self._sweep()
        self.last_sync = {"write_s": written - began, "load_s": loaded - written, "bytes": published.num_bytes}

    def _load(self, published: Published, rank: int) -> None:
        async def load(connection: Connection) -> None:
            await connection.server.load(connection.client, published.name, published.folder)

        try:
            self._on_each(load)
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

        return self._on_each(read)

    def _sweep(self) -> None:
        """Unload what is retired, and delete the files of what was unloaded in an earlier sweep.

        Files stay while any server may still read them: a server that is down is asked first when it is up again.
        """
        listed = self._listed()
        answered = len(listed) == len(self.pool.servers)
        for old, was_unloaded in list(self._retired.items()):
            if was_unloaded and answered and not any(old.name in names for names in listed.values()):
                self._files.delete(old.folder)
                del self._retired[old]
            else:
                self._retired[old] = True
        retired = {old.name for old in self._retired}

        async def unload(connection: Connection) -> None:
            for name in listed.get(connection.server, {}):
                if name in retired:
                    await connection.server.unload(connection.client, name)

        self._on_each(unload)

    def _dtype(self, model: nn.Module) -> torch.dtype:
        if self.adapter_dtype != "auto":
            return DTYPES[self.adapter_dtype]
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        return base.dtype if base.dtype in DTYPES.values() else torch.float32

    def close(self) -> None:
        """Unload what this process has published, delete its files and release the folder."""
        if not self._is_checked or not is_first_process():
            return
        with self._lock:
            self._retired.update(dict.fromkeys(self._published.values(), True))
            self._published.clear()
        # Nobody waits for a server at the end of a run.
        self.pool.policy = replace(
            self.policy, wait_s=1e-3, control_timeout_s=min(10.0, self.policy.control_timeout_s)
        )
        try:
            self._sweep()
        except Exception as error:
            # The files stay: a server that is only out of reach may still have their adapters.
            logger.warning("adapters stay on the servers and in %s: %s", self._files.path, error)
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
            role: "policy"; or "reference", the base or the adapter that the policy started from.
            version: of the policy; published, and not older than `keep_versions`. The reference has none.
            prompt_ids, params, keys: as in `RolloutBackend.generate`.

        Raises:
            ValueError: an empty prompt, rows without a key, or more tokens than the servers have positions.
            RuntimeError: the version is not published, no server is up in time, or a row gets no valid answer.
        """
        adapter = self._adapter_of(role, version)
        _require_rows(prompt_ids, keys)
        self._check_length(max(map(len, prompt_ids), default=0) + params.max_completion_length)
        # Processes that share a divided model must get the same tokens.
        rows = once_per_group(lambda: self._complete(adapter, prompt_ids, params, keys))
        return Rollout(
            prompt_ids=[list(ids) for ids in prompt_ids],
            completion_ids=[row.token_ids for row in rows],
            sampler_logprobs=[torch.tensor(row.logprobs, dtype=torch.float32) for row in rows],
            stopped=[row.stopped for row in rows],
            policy_version=version,
        )

    def _adapter_of(self, role: str, version: int) -> Published | None:
        if role not in ("policy", "reference"):
            raise ValueError(f"role {role!r} is neither 'policy' nor 'reference'")
        if not self._is_checked:
            raise RuntimeError("nothing is published yet; call sync(model, version) first")
        with self._lock:
            adapter = self._published.get((role, version if role == "policy" else 0))
            versions = sorted(v for r, v in self._published if r == "policy")
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
            Request(list(ids), params, derived_seed(*key), name) for ids, key in zip(prompt_ids, keys, strict=True)
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
            self.pool.complete(requests, adapter, done)
        return [rows[index] for index in range(len(requests))]


def _remedy(owner: str) -> str:
    if f"process {os.getpid()} " in owner:
        return "that is this process: call close() on the earlier VLLMBackend first"
    return "start a server of its own for this training (onetrunk serve MODEL --port ...), or wait for the other one"


async def _named(connection: Connection, call: Callable[[Connection], Awaitable[T]]) -> T:
    """Return the result of a call; its error names the server."""
    try:
        return await call(connection)
    except CallError as error:
        raise CallError(f"{connection.server}: {error}", error.kind, timed_out=error.timed_out) from None


def _require_rows(prompt_ids: Sequence[list[int]], keys: Sequence[RowKey]) -> None:
    if len(keys) != len(prompt_ids) or len(set(keys)) < len(keys):
        raise ValueError(f"{len(prompt_ids)} prompts and {len(set(keys))} different keys; give each row its own key")
    if not all(prompt_ids):
        raise ValueError("a prompt has no tokens; give it at least one, such as the beginning-of-sequence token")


def _base_logprobs(model: nn.Module, ids: Tensor, length: int, temperature: float) -> Tensor:
    """Return the float32 logprobs of the tokens after prompts of `length` tokens under the bare base, on the CPU."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    with gathered(model), in_role(model, None), torch.no_grad():
        logits = model(input_ids=ids.to(device), use_cache=False).logits[:, length - 1 : -1]
    model.train(was_training)
    logprobs = (logits.float() / temperature).log_softmax(-1).cpu()
    return logprobs.gather(2, ids[:, length:, None])[:, :, 0]
