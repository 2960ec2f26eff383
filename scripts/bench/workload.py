"""The workload on which PPO iterations are compared: shapes, tokenizer, prompts, forced lengths, seconds and memory.

Everything is built from a config with fixed seeds, so that two implementations do the same work on the same weights.
Completion lengths are forced (EOS at a given position), because a random model does not stop by itself. Knows torch
and transformers; neither of the implementations that it compares, whose environments differ.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import threading
import time
from dataclasses import dataclass, fields
from typing import Any

import psutil
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

PAD, EOS, BOS, UNK = range(4)
FIRST_WORD = 4
PHASES = ("generate", "score", "update")
FORBIDDEN = -1e4
LORA: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def _shape(vocab: int, hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int = 2) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


# The output head is 14% of the parameters of `base` and 37% of `big_vocab`; of real models some 27% (0.5B) to 7% (7B).
# `smollm2` is SmolLM2-135M with the biases of a Qwen2.
SHAPES = {
    "tiny": _shape(96, 32, 4, 64, 4),
    "base": _shape(16_000, 512, 16, 1536, 8),
    "big_vocab": _shape(32_000, 384, 12, 1152, 6),
    "smollm2": _shape(49_152, 576, 30, 1536, 9, 3),
    "0.5b": _shape(151_936, 896, 24, 4864, 14),
    "7b": _shape(152_064, 3584, 28, 18_944, 28, 4),
}


@dataclass(frozen=True)
class Workload:
    """One PPO run to be timed; every field is an option of the processes that run it.

    Args:
        shape: of the policy, a key of SHAPES.
        mixed: prompts and completions of mixed lengths; False: all are as long as can be.
        small_reward: a distilled reward model of 4 layers; False: one of the policy's shape.
        prompt: longest prompt, tokens.
        completion: longest completion, tokens.
        rollout: completions of a rollout.
        epochs: PPO epochs, each one optimizer step over the whole rollout.
        microbatch: rows of full length in one forward of the update.
        iterations: rollouts that are run; the first one is not counted.
        vocab_size: in place of the shape's; 0: the shape's.
        layers: in place of the shape's; 0: the shape's.
        device: cpu or cuda.
        dtype: of the weights.
    """

    shape: str = "base"
    mixed: bool = False
    small_reward: bool = False
    prompt: int = 64
    completion: int = 64
    rollout: int = 16
    epochs: int = 4
    microbatch: int = 4
    iterations: int = 3
    vocab_size: int = 0
    layers: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Give the parser one option per field."""
        for field in fields(cls):
            name, default = f"--{field.name}", field.default
            if isinstance(default, bool):
                parser.add_argument(name, action="store_true")
            else:
                choices = list(SHAPES) if field.name == "shape" else None
                parser.add_argument(name, type=type(default), default=default, choices=choices)

    @classmethod
    def from_options(cls, given: argparse.Namespace) -> Workload:
        """Return the workload that the options describe."""
        return cls(**{field.name: getattr(given, field.name) for field in fields(cls)})

    def config(self, **changes: Any) -> Qwen2Config:
        """Return the config of the policy, some fields changed."""
        settings = {
            **SHAPES[self.shape],
            "max_position_embeddings": 8192,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "bos_token_id": BOS,
            "tie_word_embeddings": self.shape != "7b",
        }
        settings |= {"vocab_size": self.vocab_size} if self.vocab_size else {}
        settings |= {"num_hidden_layers": self.layers} if self.layers else {}
        return Qwen2Config(**{**settings, **changes})

    def policy(self) -> PreTrainedModel:
        """Return the causal language model."""
        return self._place(AutoModelForCausalLM, self.config(), seed=0)

    def scalar_config(self, small: bool = False) -> Qwen2Config:
        """Return the config of a model that scores texts; `small` is a distilled one."""
        narrow = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 768}
        narrow |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        return self.config(num_labels=1, **(narrow if small and self.shape != "tiny" else {}))

    def scalar_model(self, small: bool = False) -> PreTrainedModel:
        """Return a sequence-classification model with one label: the reward model, or TRL's value model."""
        return self._place(AutoModelForSequenceClassification, self.scalar_config(small), seed=1)

    def _place(self, kind: Any, config: Qwen2Config, seed: int) -> PreTrainedModel:
        torch.manual_seed(seed)
        with torch.device(self.device):
            return kind.from_config(config, attn_implementation="sdpa", dtype=getattr(torch, self.dtype))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer whose token i is the word w<i>; decoding joins words by spaces."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocab = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS, "<unk>": UNK}
        vocab |= {f"w{i}": i for i in range(FIRST_WORD, self.config().vocab_size)}
        words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
        return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **names)

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Return token ids for one rollout more than is run: all of the longest length, or from a quarter of it on."""
        generator = torch.Generator().manual_seed(seed)
        vocab = self.config().vocab_size
        prompts = []
        for _ in range(self.rollout * (self.iterations + 1)):
            length = self.prompt
            if self.mixed:
                length = int(torch.randint(self.prompt // 4, self.prompt + 1, (1,), generator=generator))
            prompts.append(torch.randint(FIRST_WORD, vocab, (length,), generator=generator).tolist())
        return prompts

    def completion_lengths(self, iteration: int) -> list[int]:
        """Return the forced lengths of a rollout.

        All are the longest; where they are mixed, log-normal with median 0.35 of it, at least 4, long-tailed like
        real rollouts.
        """
        if not self.mixed:
            return [self.completion] * self.rollout
        generator = torch.Generator().manual_seed(100 + iteration)
        median = torch.log(torch.tensor(self.completion * 0.35))
        lengths = torch.exp(torch.randn(self.rollout, generator=generator) * 0.7 + median)
        return lengths.clamp(4, self.completion).long().tolist()


class ForceLength(LogitsProcessor):
    """Lets the rows of one rollout end at given lengths and nowhere else.

    Args:
        lengths: of the rows' completions, the end token included.
        longest: completions of this length need no end token.
    """

    def __init__(self, lengths: list[int], longest: int):
        self.lengths = torch.tensor(lengths)
        self.longest = longest
        self.t = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.t += 1
        scores[:, EOS] = FORBIDDEN
        # On the CPU, so that a GPU is not waited for at every token.
        ends = ((self.lengths == self.t) & (self.lengths < self.longest)).nonzero()[:, 0]
        if len(ends):
            ends = ends.to(scores.device)
            scores[ends] = FORBIDDEN
            scores[ends, EOS] = 0.0
        return scores


class Meter(threading.Thread):
    """Seconds and peak memory of each phase of each iteration.

    On a CPU: CPU seconds of this process (wall time is not stable on a shared machine) and resident memory, sampled
    every 4 ms. On CUDA: wall seconds, the device waited for, and the memory that torch allocated. The seconds of the
    phase `uncounted` are 0.
    """

    def __init__(self, device: str = "cpu", interval_s: float = 0.004, uncounted: str = ""):
        super().__init__(daemon=True)
        self.device = device
        self.uncounted = uncounted
        self.interval_s = interval_s
        self.iterations: list[dict[str, float]] = []
        self.peaks: dict[str, int] = {}
        self.phase = "init"
        self._start = 0.0
        self._process = psutil.Process()

    def run(self) -> None:
        while self.device == "cpu":
            self._note_memory(self._process.memory_info().rss)
            time.sleep(self.interval_s)

    def now(self) -> float:
        """Return the seconds of the clock that counts."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def enter(self, phase: str) -> None:
        """End the phase in progress and begin another; "generate" begins a new iteration."""
        if phase == self.phase:
            return
        now = self.now()
        if self.phase in PHASES:
            counted, weight = self.iterations[-1], self.phase != self.uncounted
            counted[self.phase] = counted.get(self.phase, 0.0) + weight * (now - self._start)
        if self.device != "cpu":
            self._note_memory(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        if phase == "generate":
            self.iterations.append({})
        self.phase, self._start = phase, now

    def _note_memory(self, num_bytes: int) -> None:
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), num_bytes)

    def results(self) -> dict[str, Any]:
        """Return medians over all iterations but the first, and peaks in MB."""
        kept = self.iterations[1:]
        kept = [{**row, "total": sum(row[phase] for phase in PHASES)} for row in kept]
        unit = 1024 if sys.platform == "linux" else 1
        whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        # On CUDA the peak of building the models does not count: a quantised base is made from a larger one.
        peak = whole if self.device == "cpu" else max(self.peaks[phase] for phase in PHASES)
        return {
            "seconds": {name: round(statistics.median(row[name] for row in kept), 3) for name in kept[0]},
            "iterations": [{name: round(s, 3) for name, s in row.items()} for row in kept],
            "peak_mb": round(peak / 1e6),
            "phase_peak_mb": {phase: round(value / 1e6) for phase, value in self.peaks.items()},
        }
