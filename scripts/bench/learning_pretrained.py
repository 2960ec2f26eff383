"""Tasks of the study of learning on a pretrained model: SmolLM2-135M-Instruct with adapters on the top 8 of 30 layers.

    python recipes/smollm2-135m-cpu/prepare.py --output_dir runs/learning/smollm2-135m

writes the model and the requests that are read here. Nothing here imports a trainer by itself.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests import learning

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2-135m-cpu"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HELD_OUT = 64


@functools.cache
def rubric() -> ModuleType:
    """Return the recipe's reward functions."""
    spec = importlib.util.spec_from_file_location("rubric", RECIPE / "rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Replies:
    """Answer a request in one sentence that is warm and on the subject, by the rubric of smollm2-135m-cpu, 0 to 1.

    Args:
        folder: what prepare.py of that recipe wrote.
    """

    folder: Path
    name: str = "replies"
    length: int = 32
    beta: float = 0.05
    pad_id: int = 2
    eos_id: int = 2

    settings = {**learning.SETTINGS, "rollout_batch_size": 32, "per_device_train_batch_size": 32, "lam": 1.0}
    lora = {**learning.LORA, "target_modules": PROJECTIONS, "layers_to_transform": list(range(22, 30))}

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer()

    def model(self, seed: int) -> PreTrainedModel:
        """Return the pretrained model in bfloat16, the same for every seed."""
        return AutoModelForCausalLM.from_pretrained(self._part("base"), dtype=torch.bfloat16).eval()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return its tokenizer."""
        return AutoTokenizer.from_pretrained(self._part("base"))

    def prompts(self, seed: int) -> Tensor:
        """Return the requests of the most frequent length, so that no implementation has to pad, [prompts, tokens]."""
        rows = [self._ids(conversation) for conversation in self._conversations("prompts")]
        ((length, _),) = Counter(map(len, rows)).most_common(1)
        return torch.tensor([row for row in rows if len(row) == length])

    def text(self, prompt_ids: list[int]) -> str:
        """Return a request as text, with the tokens of the chat template."""
        return self._tokenizer.decode(prompt_ids)

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the mean of the rubric, of which warmth is half."""
        reply = [[{"content": self._tokenizer.decode(completion_ids, skip_special_tokens=True)}]]
        request = self.text(prompt_ids).rpartition("user\n")[2].partition("<|im_end|>")[0]
        (warm,) = rubric().warm(reply)
        (one,) = rubric().one_sentence(reply, completion_stopped=[completion_ids[-1:] == [self.eos_id]])
        (on,) = rubric().on_subject([[{"content": request}]], reply)
        return (2 * warm + one + on) / 4

    def known(self, seed: int) -> dict[str, float]:
        """Return nothing: what the best policy attains is not known."""
        return {}

    reward = score

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> dict[str, float]:
        """Return the mean score of sampled replies to held-out requests on other subjects."""
        model.eval()
        rows = [self._ids(conversation) for conversation in self._conversations("held_out")[:HELD_OUT]]
        width = max(map(len, rows))
        ids = torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sampled = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.length,
                pad_token_id=self.pad_id,
                eos_token_id=self.eos_id,
            )
        replies = map(self._cut, sampled[:, width:].tolist())
        scores = [self.score(row, reply) for row, reply in zip(rows, replies, strict=True)]
        return {"held_out": round(sum(scores) / len(scores), 5)}

    def _cut(self, reply: list[int]) -> list[int]:
        return reply[: reply.index(self.eos_id) + 1] if self.eos_id in reply else reply

    def _ids(self, conversation: list[dict[str, str]]) -> list[int]:
        return self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]

    def _conversations(self, name: str) -> list[list[dict[str, str]]]:
        lines = self._part(f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    def _part(self, name: str) -> Path:
        if not (self.folder / name).exists():
            command = f"python recipes/smollm2-135m-cpu/prepare.py --output_dir {self.folder}"
            raise FileNotFoundError(f"{self.folder / name} does not exist; make it: {command}")
        return self.folder / name
