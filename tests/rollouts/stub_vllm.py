"""A fake vLLM server with faults: real sockets and HTTP in a thread, and a real tiny model behind them.

It loads adapters from their folders, samples from them with the seed of the request, and returns logprobs after
temperature. Of a loaded adapter it keeps the weights of that moment and the path; a missing folder of a loaded adapter
would kill the engine of vLLM, so `missing` records it.
"""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from tests.servers.stub import FAULTY, Answer, Stub, says

BASE = "base"


def _cut(answer: dict[str, Any], body: Any) -> None:
    choice = answer["choices"][0]
    del choice["token_ids"][-1], choice["logprobs"]["token_logprobs"][-1]
    if len(choice["token_ids"]) == body["max_tokens"]:
        raise AssertionError("a cut completion must be shorter than the limit")


def _unknown_token(answer: dict[str, Any], _body: Any) -> None:
    answer["choices"][0]["token_ids"][0] = 10**6


async def _dead_engine(stub: StubVLLM, writer: asyncio.StreamWriter) -> None:
    """Answer as vLLM 0.32 does once its engine has died."""
    stub.is_well = False
    said = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    await says(*_error(500, said))(stub, writer)


async def _die_and_rise(stub: StubVLLM, _writer: asyncio.StreamWriter) -> None:
    stub.dies_after = None
    await stub.die()
    if stub.down_s is not None:
        await asyncio.sleep(stub.down_s)
        await stub.listen()


class StubVLLM(Stub):
    """A vLLM server for one model.

    Args:
        model: the base; a copy is kept.
        max_rank, max_length: largest rank of an adapter, and positions.
        loads_adapters: False for a server without adapters at run time.
        raw: returns logprobs before temperature.
    """

    faults = FAULTY | {
        "wait_a_day": says(429, {"error": {"message": "the budget is used up"}}, lambda _: {"Retry-After": "86400"}),
        "dead_engine": _dead_engine,
    }
    wrong = {"cut": _cut, "unknown_token": _unknown_token}

    def __init__(
        self,
        model: nn.Module,
        *,
        max_rank: int = 16,
        max_length: int = 128,
        loads_adapters: bool = True,
        raw: bool = False,
        **settings: Any,
    ):
        super().__init__({"/v1/completions": self._complete}, **settings)
        self.free = {
            "/health": lambda _body: (200 if self.is_well else 503, {}),
            "/version": lambda _body: (200, {"version": "0.32.0"}),
            "/v1/models": lambda _body: (200, {"data": self._models()}),
        }
        if loads_adapters:
            self.free |= {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload}
        # Names have a nonce, and which rows are hit should be the same in every run.
        self.drawn_from = lambda body: {**body, "model": None}
        self.base, self.base_folder, self.is_well = copy.deepcopy(model).eval(), "/models/base", True
        self.max_rank, self.max_length, self.raw = max_rank, max_length, raw
        self.adapters: dict[str, tuple[str, PeftModel]] = {}
        # In the order in which they came: ("load" or "unload", name).
        self.events: list[tuple[str, str]] = []
        self.missing: list[str] = []
        # After so many completions of an adapter the server dies, and stays down for `down_s`; None: for good.
        self.dies_after: int | None = None
        self.down_s: float | None = 0.3

    async def die(self) -> None:
        await super().die()
        self.adapters.clear()

    def answer(self, path: str, authorization: str, body: Any) -> Answer:
        self.missing += [name for name, (folder, _) in self.adapters.items() if not Path(folder).is_dir()]
        return super().answer(path, authorization, body)

    def _models(self) -> list[dict[str, Any]]:
        base = {"id": BASE, "root": self.base_folder, "parent": None, "max_model_len": self.max_length}
        return [base, *({"id": n, "root": f, "parent": BASE} for n, (f, _) in self.adapters.items())]

    def load(self, body: Any) -> tuple[int, Any]:
        name, folder = body["lora_name"], body["lora_path"]
        if not name or not folder:
            return _error(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if not (Path(folder) / "adapter_config.json").is_file():
            return _error(404, f"Loading lora {name} failed: No adapter found for {folder}")
        rank = json.loads((Path(folder) / "adapter_config.json").read_text())["r"]
        if rank > self.max_rank:
            return _error(500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}.")
        model = PeftModel.from_pretrained(copy.deepcopy(self.base), folder)
        self.adapters[name] = folder, model.eval()
        self.events.append(("load", name))
        return 200, "Success"

    def unload(self, body: Any) -> tuple[int, Any]:
        if body["lora_name"] not in self.adapters:
            return _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        del self.adapters[body["lora_name"]]
        self.events.append(("unload", body["lora_name"]))
        return 200, "Success"

    def _complete(self, body: Any) -> Answer:
        name = body["model"]
        if name != BASE and name not in self.adapters:
            return 404, {"error": {"message": f"The model `{name}` does not exist."}}
        if max(body["prompt"]) >= self.base.config.vocab_size:
            return _error(400, f"Token id {max(body['prompt'])} is out of vocabulary")
        if name != BASE and self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                return _die_and_rise
        ids, logprobs = self.sampled(body)
        choice = {"index": 0, "text": "", "token_ids": ids, "prompt_token_ids": body["prompt"]}
        choice["logprobs"] = {"token_logprobs": logprobs}
        return 200, {"id": "x", "object": "text_completion", "model": name, "choices": [choice]}

    @torch.no_grad()
    def sampled(self, body: Any) -> tuple[list[int], list[float]]:
        model = self.base if body["model"] == BASE else self.adapters[body["model"]][1]
        generator = torch.Generator().manual_seed(body["seed"])
        ids: list[int] = []
        logprobs: list[float] = []
        # At its last position vLLM ends a completion without an error.
        most = min(body["max_tokens"], self.max_length - len(body["prompt"]))
        while len(ids) < most and (not ids or ids[-1] not in body["stop_token_ids"]):
            logits = model(input_ids=torch.tensor([body["prompt"] + ids])).logits[0, -1].float()
            token, logprob = self._drawn(logits, body, generator)
            ids.append(token)
            logprobs.append(logprob)
        return ids, logprobs

    def _drawn(self, logits: Tensor, body: Any, generator: torch.Generator) -> tuple[int, float]:
        temperature = body["temperature"]
        scores = logits / (temperature or 1.0)
        if temperature and body["top_k"] > 0:
            scores = scores.masked_fill(scores < scores.topk(body["top_k"]).values[-1], -torch.inf)
        if temperature and body["top_p"] < 1:
            probs, order = scores.softmax(-1).sort(descending=True)
            # Those of the tail: more probable tokens have the probability already.
            scores[order[probs.cumsum(-1) - probs >= body["top_p"]]] = -torch.inf
        processed = scores.log_softmax(-1)
        token = int(torch.multinomial(processed.exp(), 1, generator=generator) if temperature else logits.argmax())
        return token, float((logits.log_softmax(-1) if self.raw else processed)[token])


def _error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "code": status}}
