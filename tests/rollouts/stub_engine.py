"""A fake package vllm with an engine for this process: a real tiny model, and the mistakes that an engine can make.

It keeps the order of events, and fails where the real engine would read freed memory: while it sleeps.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from onetrunk.rollouts.colocate import CPU_ENVIRONMENT, ENVIRONMENT
from tests.rollouts.stub_vllm import BASE, StubVLLM


class StubWorker:
    """Stands for vLLM's worker on a GPU."""

    def _maybe_get_memory_pool_context(self, tag: str) -> str:
        return f"pool of {tag}"


class StubEngine:
    """Stands for `vllm.LLM` and its `llm_engine`; completes one row per step."""

    # Set by tests before an engine starts.
    fault: str | None = None
    made: list[StubEngine] = []

    def __init__(self, **settings: Any):
        if self.fault == "no_memory":
            raise ValueError("Free memory on device (2.0/80.0 GiB) on startup is less than desired.\nmore lines")
        self.settings = settings
        self.stub = StubVLLM(
            AutoModelForCausalLM.from_pretrained(settings["model"]),
            max_rank=settings.get("max_lora_rank", 0),
            max_length=settings["max_model_len"] or 64,
        )
        self.model_config = SimpleNamespace(model=settings["model"], max_model_len=self.stub.max_length)
        self.llm_engine = self.engine_core = self
        self.events: list[tuple[str, Any]] = []
        self.requests: dict[str, tuple[Any, Any, Any]] = {}
        self.loaded: dict[int, str] = {}
        self.sleeping = False
        self.pools = {tag: StubWorker()._maybe_get_memory_pool_context(tag) for tag in ("weights", "kv_cache")}
        # As vLLM does.
        torch.manual_seed(0)
        StubEngine.made.append(self)

    def add_lora(self, request: Any) -> bool:
        self._require_awake()
        status, answer = self.stub.load({"lora_name": request.lora_name, "lora_path": request.lora_path})
        if status != 200:
            raise ValueError(answer["error"]["message"])
        self.loaded[request.lora_int_id] = request.lora_name
        self.events.append(("load", request.lora_name))
        return True

    def remove_lora(self, number: int) -> bool:
        self._require_awake()
        self.events.append(("remove", self.loaded[number]))
        return self.stub.unload({"lora_name": self.loaded.pop(number)})[0] == 200

    def add_request(self, name: str, prompt: dict[str, Any], params: Any, lora_request: Any = None) -> str:
        self._require_awake()
        self.requests[name] = prompt["prompt_token_ids"], params, lora_request
        return name

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names: list[str]) -> None:
        self.events.append(("abort", len(names)))
        for name in names:
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        self._require_awake()
        name = next(iter(self.requests))
        prompt_ids, params, lora = self.requests.pop(name)
        model = BASE if lora is None else lora.lora_name
        ids, logprobs = self.stub.sampled({"model": model, "prompt": prompt_ids, **vars(params)})
        if self.fault == "other_adapter" and lora is not None:
            lora = SimpleNamespace(lora_name="another")
        places = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, logprobs, strict=False)]
        choice = SimpleNamespace(token_ids=ids, logprobs=places)
        row = {"request_id": name, "finished": True, "prompt_token_ids": prompt_ids, "lora_request": lora}
        return [SimpleNamespace(outputs=[choice], **row)]

    def apply_model(self, function: Any) -> list[Any]:
        self._require_awake()
        return [function(self.stub.base)]

    def is_sleeping(self) -> bool:
        return self.sleeping

    def sleep(self, level: int) -> None:
        self.events.append(("sleep", level))
        self.sleeping = True

    def wake_up(self) -> None:
        self.events.append(("wake", None))
        self.sleeping = False

    def shutdown(self) -> None:
        self.events.append(("shutdown", None))

    def _require_awake(self) -> None:
        if self.sleeping:
            raise AssertionError("the engine sleeps")


def install(monkeypatch: Any) -> type[StubEngine]:
    """Put the fake package in the place of vllm; return its engine's class."""

    def adapter(name: str, number: int, path: str) -> SimpleNamespace:
        return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)

    contents = {
        "vllm": {"LLM": StubEngine, "SamplingParams": SimpleNamespace},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": adapter},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"Worker": StubWorker},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(StubEngine, "fault", None)
    monkeypatch.setattr(StubEngine, "made", [])
    # The backend sets them for its process; tests that come later, and their child processes, must not have them.
    for name, value in (CPU_ENVIRONMENT | ENVIRONMENT).items():
        monkeypatch.setenv(name, value)
    return StubEngine
