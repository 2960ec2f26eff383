"""Rollouts sampled by a vLLM engine in the training process, on the GPU of the trainer.

As with a server, only the adapter travels: each version is written to a folder of its own and loaded under a new name
and id (`publishing.py` says why). The engine has the base once more. With sleep mode its weights are in the machine's
memory between rollouts and its cache is freed; the adapters' places belong to its weights, so an adapter is loaded
only while it is awake. It cannot sample during an update, so it has one role at a time, that of the last `sync`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import distributed as dist
from torch import nn

from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.publishing import (
    AdapterFolder,
    Published,
    active_adapter,
    check_servable,
    is_same_adapter,
    policy_adapter,
    published_dtype,
    reference_adapter,
    role_of,
    served_rank,
)
from onetrunk.rollouts.same_base import probe_requests, require_same_base
from onetrunk.rollouts.vllm_calls import Completed, Request, as_rollout, checked_completion, requests_of
from onetrunk.servers.errors import CallError
from onetrunk.types import Rollout, RowKey

logger = logging.getLogger(__name__)

# On a CPU: torch.compile of the sampler alone takes minutes on a busy machine.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
# The engine runs in this process, and without telemetry.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
# vLLM plans its memory for so many tokens in a step; its default for offline use is far more than rollouts need.
TOKENS_PER_STEP = 4096
ENGINE = "the vLLM engine in this process"


@dataclass(eq=False, repr=False)
class ColocatedBackend:
    """A `RolloutBackend` on a vLLM engine in this process. The engine starts with the first check of a policy.

    The draws of a row derive from its key, by way of the request's seed; float rounding depends on the rows that the
    engine runs together.

    Args:
        folder: where adapters are written for the engine.
        gpu_memory_utilization: share of the GPU's memory that the engine takes, above 0, below 1; unused on a CPU.
        max_model_length: most tokens of prompt and completion together; None: what the first check of a policy asks
            for, else the model's positions.
        sleeps: put the engine to sleep after each call; needs a GPU.
        max_rows: most rows that it decodes at once; None: vLLM's own number.
        progress: called as `progress(done_rows, total_rows, done_tokens)` whenever a row finishes.
        poll: called before every token; may raise to stop sampling.
    """

    folder: str | Path
    _: KW_ONLY
    gpu_memory_utilization: float = 0.3
    max_model_length: int | None = None
    sleeps: bool = False
    max_rows: int | None = None
    progress: Callable[[int, int, int], None] | None = None
    poll: Callable[[], None] | None = None
    policy_version: int = field(default=0, init=False)
    # vLLM rounds otherwise than the trainer.
    has_own_weights: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._files = AdapterFolder(self.folder)
        self._llm: Any = None
        self._num_calls = self._last_id = 0
        # By role: what the role samples from, and its id in the engine. The bare base has none.
        self._published: dict[str, tuple[Published, int]] = {}
        self._retired: list[tuple[Published, int]] = []
        self._role: str | None = None
        self._has_process_group = False

    # --- checks before training --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what needs no model: vLLM is installed, one process trains, and sleep mode has a GPU.

        Raises:
            ValueError: what is missing, and what to set instead.
        """
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "vllm_mode is 'colocate', and vLLM is not installed here. It asks for another transformers than"
                " onetrunk: src/onetrunk/rollouts/README.md says how it was installed beside it. Or set vllm_mode to"
                " 'server' and start a server in an environment of its own (onetrunk serve MODEL --python ...)"
            )
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if max(world_size, int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ValueError(
                "vllm_mode 'colocate' works with one process; with several, set it to 'server' and start the servers"
                " on GPUs of their own (onetrunk serve)"
            )
        if self.sleeps and not has_gpu():
            raise ValueError("vllm_enable_sleep_mode needs a GPU, and there is none; leave it out")

    def check_policy(self, model: nn.Module, longest_row: int = 0) -> None:
        """Start the engine on the base of `model`, and check that it can sample from it.

        Args:
            model: the policy, unwrapped, with the adapter to train.
            longest_row: most tokens of a prompt and its completion.

        Raises:
            ValueError: an adapter or a base that vLLM does not serve in this process.
            RuntimeError: the engine does not start, has another base, too few positions, or rejects the adapter.
        """
        self.check()
        if self._llm is None:
            adapters = {policy_adapter(model), reference_adapter(model)} - {None}
            for adapter in adapters:
                check_servable(model.peft_config[adapter], f"the adapter {adapter!r}")
            settings = self._engine_settings(model, longest_row, [model.peft_config[a].r for a in adapters])
            with eager_on_cpu(), kept_generators():
                self._start(settings)
            self._prove(model, adapters)
        self._check_length(longest_row)

    def _engine_settings(self, model: nn.Module, longest_row: int, ranks: Sequence[int]) -> dict[str, Any]:
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        name, quantization = base.config.name_or_path, getattr(base.config, "quantization_config", None)
        if not name:
            raise ValueError(
                "the policy was made in memory, and the engine loads its base from a folder or a Hub name; save the"
                " model, and give its folder"
            )
        settings = {
            "model": name,
            # The commit that the policy was loaded from; None for a folder.
            "revision": getattr(base.config, "_commit_hash", None),
            "dtype": str(published_dtype(model)).removeprefix("torch."),
            "max_model_len": self.max_model_length or longest_row or None,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "max_num_batched_tokens": max(TOKENS_PER_STEP, self.max_rows or 0, self.max_model_length or longest_row),
        }
        if quantization is not None:
            if not getattr(quantization, "load_in_4bit", False):
                raise ValueError(
                    "vLLM quantises a base to 4 bits in this process, and not as the policy's; load the policy with"
                    " load_in_4bit or unquantised, or set vllm_mode to 'server'"
                )
            settings["quantization"] = "bitsandbytes"
        if self.max_rows is not None:
            settings["max_num_seqs"] = self.max_rows
        if ranks:
            settings |= {"enable_lora": True, "max_lora_rank": served_rank(max(ranks)), "max_loras": 1}
            settings["max_cpu_loras"] = 2  # The policy and the reference.
        if has_gpu():
            return settings | {
                "gpu_memory_utilization": self.gpu_memory_utilization,
                "enable_sleep_mode": self.sleeps,
            }
        return settings | {"enforce_eager": True}

    def _start(self, settings: dict[str, Any]) -> None:
        os.environ.update(ENVIRONMENT)
        if not has_gpu():
            for name, value in CPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        self._has_process_group = dist.is_available() and dist.is_initialized()
        num_threads = torch.get_num_threads()
        from vllm import LLM

        try:
            self._llm = LLM(**settings)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RuntimeError(
                f"vLLM does not start in this process: {lines[0].rstrip('.')}. Check vllm_gpu_memory_utilization"
                f" ({self.gpu_memory_utilization} of the GPU), or set vllm_mode to 'server'"
            ) from error
        torch.set_num_threads(num_threads)
        atexit.register(self.close)

    def _prove(self, model: nn.Module, adapters: set[str]) -> None:
        """Compare the engine's base with the model's, and load each adapter once."""
        requests, name = probe_requests(model, self._positions), self._llm.llm_engine.model_config.model
        self._vocab_size = requests[0].vocab_size
        with self._awake():
            completed = self._complete(requests, None)
            for adapter in adapters:
                trial = self._files.write(model, adapter, "trial", 0)
                number = self._load(trial)
                self._llm.llm_engine.remove_lora(number)
                self._files.delete(trial.folder)
        require_same_base(model, ENGINE, name, requests, completed)

    @property
    def _positions(self) -> int:
        return int(self._llm.llm_engine.model_config.max_model_len)

    def _check_length(self, longest_row: int) -> None:
        if longest_row > self._positions:
            raise RuntimeError(
                f"{ENGINE} has {self._positions} positions, and a prompt with its completion may have"
                f" {longest_row} tokens; set max_prompt_length, or lower max_completion_length"
            )

    # --- publishing --------------------------------------------------------------------------------------------------

    def sync(self, model: nn.Module, version: int) -> None:
        """Write the active adapter for the engine, which samples from it from now on.

        The same version with the same weights is written once. The engine loads it in the next call, when it is awake.

        Args:
            model: the policy, unwrapped; without an active adapter the engine samples from its base.
            version: number of optimizer steps so far.

        Raises:
            ValueError, RuntimeError: as `check_policy`.
        """
        self.check_policy(model)
        adapter = active_adapter(model)
        self._role, self.policy_version = role_of(adapter), version
        before = self._published.get(self._role)
        if adapter is None:
            self._retire(self._role)
            return
        number = version if self._role == "policy" else 0
        if before is None or before[0].version != number or not is_same_adapter(before[0], model, adapter):
            self._retire(self._role)
            self._published[self._role] = self._files.write(model, adapter, self._role, number), 0

    def _retire(self, role: str) -> None:
        if role in self._published:
            self._retired.append(self._published.pop(role))

    def _load(self, published: Published) -> int:
        """Load an adapter under a new id, which is returned; the engine must be awake."""
        from vllm.lora.request import LoRARequest

        self._last_id += 1
        try:
            is_loaded = self._llm.llm_engine.add_lora(LoRARequest(published.name, self._last_id, published.folder))
        except Exception as error:
            raise RuntimeError(f"{ENGINE} does not load the adapter in {published.folder}: {error}") from error
        if not is_loaded:
            raise RuntimeError(f"{ENGINE} does not load the adapter in {published.folder}")
        return self._last_id

    def _loaded(self) -> Any | None:
        """Return the request for the adapter that samples, loaded; unload and delete the retired ones."""
        from vllm.lora.request import LoRARequest

        for old, number in self._retired:
            if number:
                self._llm.llm_engine.remove_lora(number)
            self._files.delete(old.folder)
        self._retired.clear()
        if self._role not in self._published:
            return None
        published, number = self._published[self._role]
        number = number or self._load(published)
        self._published[self._role] = published, number
        return LoRARequest(published.name, number, published.folder)

    # --- sampling ----------------------------------------------------------------------------------------------------

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        """Return one completion per prompt, from the role and version of the last `sync`.

        Raises:
            ValueError: an empty prompt, or rows without a key.
            RuntimeError: nothing was synced, too few positions, or an answer that breaks a check.
        """
        if self._role is None:
            raise RuntimeError("nothing is published yet; call sync(model, version) first")
        self._check_length(max(map(len, prompt_ids), default=0) + params.max_completion_length)
        with self._awake():
            adapter = self._loaded()
            name = None if adapter is None else adapter.lora_name
            requests = requests_of(prompt_ids, params, keys, name, self._vocab_size)
            rows = self._complete(requests, adapter, self.progress)
        return as_rollout(requests, rows, self.policy_version)

    def _complete(
        self,
        requests: Sequence[Request],
        adapter: Any | None,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> list[Completed]:
        engine, rows, num_tokens = self._llm.llm_engine, {}, 0
        self._num_calls += 1
        names = {f"{self._num_calls}-{index}": index for index in range(len(requests))}
        try:
            for name, index in names.items():
                prompt = {"prompt_token_ids": requests[index].prompt_ids}
                engine.add_request(name, prompt, _sampling_params(requests[index]), lora_request=adapter)
            while engine.has_unfinished_requests():
                if self.poll is not None and self._role is not None:
                    self.poll()
                with eager_on_cpu():
                    outputs = engine.step()
                for output in outputs:
                    if output.finished:
                        index = names[output.request_id]
                        rows[index] = _completed(output, requests[index])
                        num_tokens += len(rows[index].token_ids)
                        if progress is not None:
                            progress(len(rows), len(requests), num_tokens)
        finally:
            unfinished = [name for name, index in names.items() if index not in rows]
            if unfinished:
                engine.abort_request(unfinished)
        return [rows[index] for index in range(len(requests))]

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """Wake the engine for the block, and put it to sleep after it, if it sleeps at all."""
        with kept_generators():
            if not self.sleeps:
                yield
                return
            torch.cuda.empty_cache()  # What the trainer has freed is still reserved.
            if self._llm.llm_engine.is_sleeping():
                self._llm.wake_up()
            try:
                yield
            finally:
                # Level 1 keeps the weights in memory; the base is never sent again, so level 2 would lose it.
                self._llm.sleep(level=1)

    def close(self) -> None:
        """End the engine and delete what was written for it."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()
            if not self._has_process_group and dist.is_initialized():
                from vllm.distributed import cleanup_dist_env_and_memory

                cleanup_dist_env_and_memory()
            atexit.unregister(self.close)
        self._published.clear()
        self._retired.clear()
        self._role = None
        self._files.close()


def has_gpu() -> bool:
    """Return whether the engine runs on a GPU."""
    return torch.cuda.is_available()


def eager_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Return a block in which nothing is compiled on a CPU, where it takes minutes; on a GPU it changes nothing."""
    # vLLM decorates its functions when it is imported, so a stance of torch.compiler at the call would be too late.
    return contextlib.nullcontext() if has_gpu() else torch._dynamo.config.patch(disable=True)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global generators after the block: vLLM uses them."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _sampling_params(request: Request) -> Any:
    from vllm import SamplingParams as EngineParams
    from vllm.sampling_params import RequestOutputKind

    return EngineParams(
        max_tokens=request.params.max_completion_length,
        temperature=request.params.temperature,
        top_p=request.params.top_p,
        top_k=request.params.top_k or -1,
        seed=request.seed,
        stop_token_ids=list(request.params.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completed(output: Any, request: Request) -> Completed:
    """Return a finished row of the engine after the checks that a server's answer passes."""
    (choice,) = output.outputs
    token_ids = list(choice.token_ids)
    logprobs = [places[token].logprob for token, places in zip(token_ids, choice.logprobs or [], strict=False)]
    sampled_by = None if output.lora_request is None else output.lora_request.lora_name
    answer = {
        "model": sampled_by,
        "choices": [
            {
                "prompt_token_ids": list(output.prompt_token_ids),
                "token_ids": token_ids,
                "logprobs": {"token_logprobs": logprobs},
            }
        ],
    }
    try:
        return checked_completion(answer, request, request.model)
    except CallError as error:
        raise RuntimeError(f"{ENGINE}: {error}") from None
