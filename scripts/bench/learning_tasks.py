"""The tasks on which learning is compared, the same for every implementation: model, tokenizer, prompts, score.

`one_token` and `four_tokens` are tasks A and B of tests/learning.py, whose best attainable objectives are known.
`noisy` adds noise to its reward. `chain` is a game of four turns with a reward each, whose best attainable
objective is known too. `early` scores the first four tokens of 128. `sums` is addition of two numbers of two digits by
a small Qwen2, which plain cross-entropy has taught until it is right in 40%; in `sparse` it is right in 5% at the
start. Tasks of a pretrained model are in learning_pretrained.py. Nothing here imports a trainer by itself, because the
environments of other libraries import it too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests import learning

PAD, EOS = 0, 1
WORDS = ["<pad>", "<eos>", *"0123456789", "+", "="]
ID = {word: i for i, word in enumerate(WORDS)}
OPERANDS = range(10, 100)
LONGEST_SUM = 4
HELD_OUT = 600
SPLIT_SEED = 1234
BASE_SEED = 0
TAUGHT_ENOUGH = 0.4
LONGEST_TEACHING = 6000
LONG = 128
NOISE = 0.5


@dataclass
class Episode:
    """What follows a prompt over several turns.

    Args:
        ids: the tokens.
        turns: the turn of each token, -1 where the environment wrote it.
        logprobs: of each token, 0 where the environment wrote it.
    """

    ids: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, ids: list[int], turn: int = -1, logprobs: list[float] | None = None) -> None:
        """Append the tokens of a turn, or of an answer of the environment."""
        self.ids += ids
        self.turns += [turn] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


class FourTokens:
    """Task B: four tokens of 8, the score is the share of good ones; J* is enumerated."""

    name = "four_tokens"
    rules = learning.TASK_B
    length = rules.length
    settings = learning.SETTINGS
    lora = learning.LORA
    pad_id, eos_id = PAD, EOS

    @property
    def beta(self) -> float:
        """The coefficient of the KL."""
        return self.rules.beta

    def model(self, seed: int) -> PreTrainedModel:
        """Return the reference of a seed."""
        return learning.reference_model(self.rules, seed)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer."""
        return learning.task_tokenizer(self.rules)

    def prompts(self, seed: int) -> Tensor:
        """Return the prompts of a seed, [prompts, tokens]."""
        return learning.task_prompts(self.rules, seed)

    def text(self, prompt_ids: list[int]) -> str:
        """Return a prompt as text."""
        return " ".join(f"t{i}" for i in prompt_ids)

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the share of good tokens."""
        return self.rules.score(completion_ids)

    def reward(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return what training sees of the score."""
        return self.score(prompt_ids, completion_ids)

    def known(self, seed: int) -> dict[str, float]:
        """Return what the best policy of a seed attains."""
        best = learning.task_optimum(self.rules, seed)
        return {"score": best.score, "kl": best.kl, "objective": best.objective}

    def held_out(self, model: nn.Module) -> dict[str, float]:
        """Return nothing: what can be attained is known."""
        return {}


class OneToken(FourTokens):
    """Task A: one token of 16, a good one scores 1; J* is enumerated."""

    name = "one_token"
    rules = learning.TASK_A
    length = rules.length


class Noisy(FourTokens):
    """Task B with a reward that is the score and as much noise again as a policy can gain."""

    name = "noisy"

    def reward(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the score with noise from the global generator."""
        return self.score(prompt_ids, completion_ids) + random.gauss(0, NOISE)


class Early(FourTokens):
    """Task B with 124 more tokens, which change no score. The best policy writes them as the reference does."""

    name = "early"
    length = LONG

    def model(self, seed: int) -> PreTrainedModel:
        """Return the reference of a seed, which takes longer rows."""
        model = super().model(seed)
        model.config.max_position_embeddings = 2 * LONG
        return model

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the share of good tokens among the first four."""
        return self.rules.score(completion_ids[: self.rules.length])


class FourTurns(FourTokens):
    """Four turns of an action and EOS, each with its own reward; J* is enumerated."""

    name = "chain"
    chain = learning.FOUR_TURNS
    length = chain.episode_length
    beta = chain.beta

    def model(self, seed: int) -> PreTrainedModel:
        """Return the reference of a seed."""
        return learning.chain_model(self.chain, seed)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer."""
        return learning.task_tokenizer(self.chain)

    def prompts(self, seed: int) -> Tensor:
        """Return the prompts of a seed, [prompts, tokens]."""
        return learning.chain_prompts(self.chain, seed)

    def text(self, prompt_ids: list[int]) -> str:
        """Return a prompt as text."""
        return " ".join(f"o{i - learning.FIRST}" for i in prompt_ids)

    def turn_rewards(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
        """Return the reward of each turn of an episode, whose turns are an action, EOS and an observation."""
        seen = [(i - learning.FIRST) % self.chain.num for i in [prompt_ids[-1], *completion_ids]]
        return [self.chain.rewards(seen[at], [seen[at + 1]]) for at in range(0, len(completion_ids), 3)]

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the share of good actions."""
        return sum(self.turn_rewards(prompt_ids, completion_ids))

    def known(self, seed: int) -> dict[str, float]:
        """Return what the best policy of a seed attains."""
        best = learning.chain_optimum(self.chain, seed)
        return {"score": best.score, "kl": best.kl, "objective": best.objective}

    @torch.no_grad()
    def play(self, model: nn.Module, prompts: Tensor) -> list[Episode]:
        """Sample an episode after every prompt, for trainers that have no text environments."""
        ids, logprobs, start = prompts, [], prompts.shape[1]
        for place in range(self.length):
            if place % 3 == 2:
                observation, action = (ids[:, at] - learning.FIRST for at in (start + place - 3, start + place - 2))
                answer = self.chain.answer(observation % self.chain.num, [action % self.chain.num])
                drawn, taken = learning.FIRST + answer[:, None], torch.zeros(len(ids), 1)
            else:
                scores = model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
                drawn = torch.multinomial(scores.exp(), 1)
                taken = scores.gather(1, drawn)
            ids = torch.cat([ids, drawn], 1)
            logprobs.append(taken)
        turns = [-1 if place % 3 == 2 else place // 3 for place in range(self.length)]
        drawn = zip(ids[:, start:].tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        return [Episode(row, list(turns), taken) for row, taken in drawn]


class OneTurn(FourTurns):
    """The same with one turn, and the same price of KL per turn."""

    name = "chain-1"
    chain = learning.ONE_TURN
    length = chain.episode_length
    beta = chain.beta


class SixteenTurns(FourTurns):
    """The same with sixteen turns, whose 6 ** 16 episodes nobody can add up."""

    name = "chain-16"
    chain = learning.SIXTEEN_TURNS
    length = chain.episode_length
    beta = chain.beta

    def known(self, seed: int) -> dict[str, float]:
        """Return {}: the optimum is not known."""
        return {}


@dataclass
class Sums:
    """`4 7 + 3 8 =`: the score is 1 for the right sum and the end after it, else 0.

    Args:
        base: folder of the taught model, made at the first use and shared by all runs.
        beta: coefficient of the KL.
        hidden_size: width of the model.
        taught_enough: probability of the right answer at which teaching stops.
    """

    base: Path
    beta: float = 0.02
    hidden_size: int = 64
    taught_enough: float = TAUGHT_ENOUGH
    name: str = "sums"
    length: int = LONGEST_SUM
    settings = learning.SETTINGS
    lora = learning.LORA
    pad_id, eos_id = PAD, EOS

    def model(self, seed: int) -> PreTrainedModel:
        """Return the taught model, the same for every seed."""
        if not (self.base / "config.json").is_file():
            self._teach().save_pretrained(self.base)
        return Qwen2ForCausalLM.from_pretrained(self.base).eval()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return a tokenizer of digits, plus and equals, parted by spaces."""
        backend = Tokenizer(models.WordLevel(ID, unk_token="<pad>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")

    def prompts(self, seed: int) -> Tensor:
        """Return all prompts but the held-out ones."""
        return sum_prompts(self._pairs()[HELD_OUT:])

    def text(self, prompt_ids: list[int]) -> str:
        """Return a prompt as text."""
        return " ".join(WORDS[i] for i in prompt_ids)

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return 1 where the completion is the sum and ends, else 0."""
        return float(completion_ids == right_answer(prompt_ids))

    def known(self, seed: int) -> dict[str, float]:
        """Return nothing: what the best policy attains is not known."""
        return {}

    reward = score

    @torch.no_grad()
    def held_out(self, model: nn.Module) -> dict[str, float]:
        """Return the probability of the right answer to held-out prompts: sampled accuracy without sampling."""
        model.eval()
        taken = _answer_logprobs(model, sum_prompts(self._pairs()[:HELD_OUT]))
        return {"held_out": taken.sum(1).exp().mean().item()}

    def _pairs(self) -> Tensor:
        pairs = torch.cartesian_prod(torch.tensor(OPERANDS), torch.tensor(OPERANDS))
        return pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(SPLIT_SEED))]

    def _teach(self) -> PreTrainedModel:
        """Return a model taught by cross-entropy on the answers until it is right with probability `taught_enough`."""
        torch.manual_seed(BASE_SEED)
        model = Qwen2ForCausalLM(self._config())
        prompts = self.prompts(BASE_SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        for step in range(LONGEST_TEACHING):
            rows = prompts[torch.randint(len(prompts), (128,))]
            loss = -_answer_logprobs(model, rows).sum(1).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 49:
                right = self.held_out(model)["held_out"]
                print(f"step {step + 1}: loss {loss.item():.3f}, right {right:.3f}", flush=True)
                if right >= self.taught_enough:
                    return model
        raise RuntimeError(f"{LONGEST_TEACHING} steps did not teach the model to be right {self.taught_enough:.0%}")

    def _config(self) -> Qwen2Config:
        return Qwen2Config(
            vocab_size=len(WORDS),
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
        )


def sum_prompts(pairs: Tensor) -> Tensor:
    """Return prompts [pairs, 6] of pairs of operands."""
    return torch.tensor([[ID[c] for c in f"{a}+{b}="] for a, b in pairs.tolist()])


def right_answer(prompt_ids: list[int]) -> list[int]:
    """Return the digits of the sum and EOS."""
    left, right = "".join(WORDS[i] for i in prompt_ids).rstrip("=").split("+")
    return [ID[c] for c in str(int(left) + int(right))] + [EOS]


def _answer_logprobs(model: nn.Module, prompts: Tensor) -> Tensor:
    """Return the logprobs of the right answers' tokens [prompts, LONGEST_SUM]; 0 after their ends."""
    answers = [right_answer(row) for row in prompts.tolist()]
    ids = torch.tensor([row + [PAD] * (LONGEST_SUM - len(row)) for row in answers])
    logits = model(input_ids=torch.cat([prompts, ids], 1)).logits[:, prompts.shape[1] - 1 : -1]
    logprobs = -F.cross_entropy(logits.transpose(1, 2).float(), ids, reduction="none")
    return logprobs.masked_fill(ids == PAD, 0.0)


TURN_TASKS = ("chain-1", "chain", "chain-16")
TINY_TASKS = ("one_token", "four_tokens", "noisy", *TURN_TASKS, "early", "sums", "sparse")
PRETRAINED_TASKS = ("replies", "rules", "dialogue")
TASKS = (*TINY_TASKS, *PRETRAINED_TASKS)


def make_task(name: str, folder: str | Path) -> Any:
    """Return a task by name; a taught model is kept in `folder`, a pretrained one is read from there."""
    plain = {task.name: task for task in (OneToken, FourTokens, Noisy, OneTurn, FourTurns, SixteenTurns, Early)}
    if name in plain:
        return plain[name]()
    if name in PRETRAINED_TASKS:
        from learning_pretrained import Dialogue, Replies, Rules

        (kind,) = (task for task in (Replies, Rules, Dialogue) if task.name == name)
        return kind(Path(folder) / "smollm2-135m")
    return Sums(Path(folder) / f"base-{name}", name=name, taught_enough=TAUGHT_ENOUGH if name == "sums" else 0.05)
