"""Rollouts sampled by a vLLM engine in the training process, on the GPU of the trainer.

As with a server, only the adapter travels: each version is written to a folder of its own and loaded under a new name
and id (`publishing.py` says why). The trainer reads the base where the engine has it (`share_base`): what
transformers calls `q_proj`, `k_proj` and so on are blocks of rows of what vLLM keeps as one matrix. Only a quantised
base, or one that vLLM keeps in another layout, is there twice. With sleep mode the engine's cache is freed
between rollouts. An adapter is loaded only while it is awake. It cannot sample during an update, so it has one adapter
at a time, from the last `sync`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch import distributed as dist

from onetrunk.models.loading import REVISION
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.decoding import Completion, rollout_of
from onetrunk.rollouts.episodes.rows import Answers, Progress, play_in_waves
from onetrunk.rollouts.publishing import (
    AdapterFolder,
    Published,
    active_adapter,
    is_same_adapter,
    published_dtype,
    role_of,
    servable_adapters,
    served_rank,
)
from onetrunk.rollouts.vllm_requests import Request, checked_completion, probe_requests, requests_of, require_same_base
from onetrunk.servers.errors import CallError
from onetrunk.types import Rollout, RowKey

logger = logging.getLogger(__name__)

GIB = 2**30
# On a CPU: torch.compile of the sampler alone takes minutes on a busy machine.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
# vLLM 0.32 on a CPU ends when it splits the prompt of a request with a seed over two steps.
CPU_SETTINGS = {"enforce_eager": True, "enable_chunked_prefill": False}
# The engine runs in this process, and without telemetry.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
# vLLM plans its memory for this many tokens in a step; its default for offline use is far more than rollouts need.
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
        sleeps: put the engine to sleep after each call, of episodes after their last turns; needs a GPU.
        max_rows: most rows that it decodes at once; None: vLLM's own number.
        progress: called as `progress(done_rows, total_rows, done_tokens)` whenever a row finishes.
        poll: called before every token; may raise to stop sampling.
    """

    folder: str | Path
    _: KW_ONLY
    gpu_memory_utilization: float = 0.3
    sleeps: bool = False
    max_rows: int | None = None
    progress: Progress | None = None
    poll: Callable[[], None] | None = None
    policy_version: int = field(default=0, init=False)
    # vLLM rounds otherwise than the trainer.
    has_own_weights: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._files = AdapterFolder(self.folder)
        self._llm: Any = None
        self._num_calls = self._num_loads = 0
        self._is_synced = self._has_process_group = self._is_awake = False
        # What samples (None: the bare base), and what the engine has loaded under the id `_num_loads`.
        self._published: Published | None = None
        self._loaded: Published | None = None

    def check(self) -> None:
        """Check what needs no model: vLLM is installed, one process trains, and sleep mode has a GPU."""
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "vllm_mode is 'colocate', and vLLM is not installed here; pip install 'onetrunk[vllm]', or set"
                " vllm_mode to 'server' and start a server in an environment of its own (onetrunk serve MODEL"
                " --python ...)"
            )
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "vllm_mode 'colocate' works with one process; with several, set it to 'server' and start the servers"
                " on GPUs of their own (onetrunk serve)"
            )
        if self.sleeps and not has_gpu():
            raise ValueError("vllm_enable_sleep_mode needs a GPU, and there is none; leave it out")

    def check_policy(self, model: nn.Module, longest_row: int = 0) -> None:
        """Start the engine on the base of `model`, and check that it can sample from it."""
        self.check()
        if self._llm is None:
            ranks = [model.peft_config[adapter].r for adapter in servable_adapters(model).values()]
            settings = self._engine_settings(model, longest_row, ranks)
            with eager_on_cpu(), kept_generators():
                self._start(settings)
            self._share(model, is_quantised="quantization" in settings)
            requests = probe_requests(model, self._positions)
            self._vocab_size = requests[0].vocab_size
            with self._awake(), kept_generators():
                completed = self._complete(requests, None)
            require_same_base(model, ENGINE, settings["model"], requests, completed)
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
            "revision": vars(base).get(REVISION),
            "dtype": str(published_dtype(model)).removeprefix("torch."),
            "max_model_len": longest_row or None,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "max_num_batched_tokens": max(TOKENS_PER_STEP, self.max_rows or 0, longest_row),
        }
        if quantization is not None:
            if not getattr(quantization, "load_in_4bit", False):
                raise ValueError(
                    "in this process vLLM quantises a base to 4 bits only, not as this policy's; load the policy with"
                    " load_in_4bit or unquantised, or set vllm_mode to 'server'"
                )
            settings["quantization"] = "bitsandbytes"
        if self.max_rows is not None:
            settings["max_num_seqs"] = self.max_rows
        if ranks and has_gpu() and settings["dtype"] == "float32":
            raise ValueError(
                "vLLM computes adapters on a GPU in 16 bits only, and the base is float32; set dtype to bfloat16"
            )
        if ranks:
            settings |= {"enable_lora": True, "max_lora_rank": served_rank(max(ranks)), "max_loras": 1}
        if has_gpu():
            memory = self.gpu_memory_utilization
            return settings | {"gpu_memory_utilization": memory, "enable_sleep_mode": self.sleeps}
        return settings | CPU_SETTINGS

    def _start(self, settings: dict[str, Any]) -> None:
        os.environ.update(ENVIRONMENT)
        if not has_gpu():
            for name, value in CPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        self._has_process_group = dist.is_initialized()
        num_threads = torch.get_num_threads()
        from vllm import LLM

        try:
            with weights_that_stay() if self.sleeps and "quantization" not in settings else contextlib.nullcontext():
                self._llm = LLM(**settings)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RuntimeError(
                f"vLLM does not start in this process: {lines[0].rstrip('.')}. Check vllm_gpu_memory_utilization"
                f" ({self.gpu_memory_utilization} of the GPU), or set vllm_mode to 'server'"
            ) from error
        torch.set_num_threads(num_threads)
        atexit.register(self.close)

    def _share(self, model: nn.Module, is_quantised: bool) -> None:
        """Let the trainer read the base where the engine has it, and say what both hold."""
        if is_quantised:
            shared, apart = 0, sum(weight.nbytes for weight in model.parameters())
        else:
            ((shared, apart),) = self._llm.apply_model(partial(share_base, model))
        logger.info("%s and the trainer share %.2f GiB of the base", ENGINE, shared / GIB)
        if apart:
            logger.warning(
                "%s holds %.2f GiB of the base a second time: %s",
                ENGINE,
                apart / GIB,
                "a quantised base is not shared" if is_quantised else "it keeps these weights in another layout",
            )

    @property
    def _positions(self) -> int:
        return int(self._llm.llm_engine.model_config.max_model_len)

    def _check_length(self, longest_row: int) -> None:
        if longest_row > self._positions:
            raise RuntimeError(
                f"{ENGINE} has {self._positions} positions, and a prompt with its completion may have"
                f" {longest_row} tokens; set max_prompt_length, or lower max_completion_length"
            )

    def sync(self, model: nn.Module, version: int) -> None:
        """Write the active adapter for the engine, which samples from it from now on.

        Without an active adapter the engine samples from its base. The same version with the same weights is written
        once. The engine loads it in the next call, when it is awake. Raises as `check_policy`.
        """
        self.check_policy(model)
        adapter, before = active_adapter(model), self._published
        self._is_synced, self.policy_version = True, version
        if adapter is None:
            self._published = None
            return
        role = role_of(adapter)
        is_same = before is not None and (before.role, before.version) == (role, version)
        if not is_same or not is_same_adapter(before, model, adapter):
            self._published = self._files.write(model, adapter, role, version)

    def _load(self) -> Any | None:
        """Load what samples, under a new id, unless it is loaded; return it as vLLM is asked for it."""
        from vllm.lora.request import LoRARequest

        engine = self._llm.llm_engine
        if self._loaded not in (None, self._published):
            engine.remove_lora(self._num_loads)
            shutil.rmtree(self._loaded.folder, ignore_errors=True)
            self._loaded = None
        if self._published is None:
            return None
        is_new = self._loaded is None
        self._num_loads += is_new
        request = LoRARequest(self._published.name, self._num_loads, self._published.folder)
        if is_new:
            engine.add_lora(request)
            self._loaded = self._published
        return request

    def generate(self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey]) -> Rollout:
        """Return one completion per prompt, from the role and version of the last `sync`."""
        limits = [params.max_completion_length] * len(prompt_ids)
        return self._generate(prompt_ids, params, keys, limits, self.progress)

    def generate_turns(
        self, prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey], answers: Answers
    ) -> Rollout:
        """Return one episode per prompt. The engine is awake until all are over: asleep it would lose its cache."""
        with self._awake():
            return play_in_waves(self._generate, prompt_ids, params, keys, answers, self.progress, has_row_limits=True)

    def _generate(
        self,
        prompt_ids: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[RowKey],
        limits: Sequence[int],
        progress: Progress | None = None,
    ) -> Rollout:
        """`generate` with the most tokens of each row."""
        if not self._is_synced:
            raise RuntimeError("nothing is published yet; call sync(model, version) first")
        self._check_length(max((len(ids) + n for ids, n in zip(prompt_ids, limits, strict=True)), default=0))
        with self._awake(), kept_generators():
            adapter = self._load()
            name = None if adapter is None else adapter.lora_name
            requests = [
                replace(request, params=replace(params, max_completion_length=n))
                for request, n in zip(
                    requests_of(prompt_ids, params, keys, name, self._vocab_size), limits, strict=True
                )
            ]
            rows = self._complete(requests, adapter, progress)
        return rollout_of(prompt_ids, rows, self.policy_version)

    def _complete(
        self, requests: Sequence[Request], adapter: Any | None, progress: Progress | None = None
    ) -> list[Completion]:
        engine, rows, num_tokens = self._llm.llm_engine, {}, 0
        self._num_calls += 1
        names = {f"{self._num_calls}-{index}": index for index in range(len(requests))}
        try:
            for name, index in names.items():
                prompt = {"prompt_token_ids": requests[index].prompt_ids}
                engine.add_request(name, prompt, _sampling_params(requests[index]), lora_request=adapter)
            while engine.has_unfinished_requests():
                if self.poll is not None and self._is_synced:
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
        """Wake the engine for the block, and put it to sleep after it, if it sleeps at all; blocks may be nested."""
        if not self.sleeps or self._is_awake:
            yield
            return
        torch.cuda.empty_cache()  # What the trainer has freed is still reserved.
        if self._llm.llm_engine.is_sleeping():
            self._llm.wake_up()
        self._is_awake = True
        try:
            yield
        finally:
            self._is_awake = False
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
        self._published = self._loaded = None
        self._is_synced = False
        self._files.delete()


def has_gpu() -> bool:
    """Return whether the engine runs on a GPU."""
    return torch.cuda.is_available()


@contextlib.contextmanager
def weights_that_stay() -> Iterator[None]:
    """Start an engine in the block whose weights stay on the GPU while it sleeps, because the trainer reads them.

    Sleep frees the memory pools of the engine; so the weights are loaded outside of its pools.
    """
    from vllm.v1.worker.gpu_worker import Worker

    pool_of = Worker._maybe_get_memory_pool_context

    def pool_without_weights(worker: Any, tag: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if tag == "weights" else pool_of(worker, tag)

    Worker._maybe_get_memory_pool_context = pool_without_weights
    try:
        yield
    finally:
        Worker._maybe_get_memory_pool_context = pool_of


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


def _completed(output: Any, request: Request) -> Completion:
    """Return a finished row of the engine after the checks that a server's answer passes."""
    (choice,) = output.outputs
    token_ids = list(choice.token_ids)
    logprobs = [places[token].logprob for token, places in zip(token_ids, choice.logprobs or [], strict=False)]
    row = {"prompt_token_ids": list(output.prompt_token_ids), "token_ids": token_ids}
    row["logprobs"] = {"token_logprobs": logprobs}
    sampled_by = None if output.lora_request is None else output.lora_request.lora_name
    try:
        return checked_completion({"model": sampled_by, "choices": [row]}, request, request.model)
    except CallError as error:
        raise RuntimeError(f"{ENGINE}: {error}") from None


@torch.no_grad()
def share_base(model: nn.Module, engine: nn.Module) -> tuple[int, int]:
    """Replace the storage of frozen weights of `model` by the engine's; return the bytes shared and not shared.

    A weight is shared if the engine has the same numbers, of the same dtype, in rows of a parameter of this name, or
    of the one that its `packed_modules_mapping` names. Others keep their storage: two copies. All other tensors of
    `model` move to the engine's device.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    ours, theirs = _base_weights(base), _base_weights(engine)
    packed = {}
    for whole, parts in getattr(engine, "packed_modules_mapping", {}).items():
        packed |= {part: (whole, parts[: parts.index(part)]) for part in parts}
    shared = apart = 0
    for name, weight in ours.items():
        block = _rows_of(name, ours, theirs, packed)
        # A cast or a layout of the engine's own makes other numbers.
        if block is not None and block.dtype == weight.dtype and torch.equal(block, weight.to(block.device)):
            weight.data = block
            shared += weight.nbytes
        else:
            apart += weight.nbytes
    model.to(next(iter(theirs.values())).device)
    return shared, apart


def _base_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights outside of adapters under their names without adapters; tied ones once."""
    names = ((name.replace(".base_layer.", "."), weight) for name, weight in model.named_parameters())
    return {name: weight for name, weight in names if "lora_" not in name}


def _rows_of(
    name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], packed: dict[str, tuple[str, list[str]]]
) -> Tensor | None:
    """Return the rows of the engine's parameter that belong to our weight `name`; None if it has none of this name."""
    first, (*path, module, leaf) = 0, ["", *name.split(".")]
    whole = theirs.get(name)
    if whole is None and module in packed:
        fused, before = packed[module]
        sizes = [ours.get(".".join([*path[1:], part, leaf])) for part in before]
        if any(size is None for size in sizes):
            return None
        whole, first = theirs.get(".".join([*path[1:], fused, leaf])), sum(len(size) for size in sizes)
    # The engine may have more rows than the vocabulary.
    return None if whole is None or whole.ndim != ours[name].ndim else whole.data[first : first + len(ours[name])]
