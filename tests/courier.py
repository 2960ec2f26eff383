"""The courier game: a key is told early, the context is compacted, and the last turn asks for the key.

No turn stays in the new context, so the key survives only in what the policy writes into its summaries. A summary,
like any turn, is one of `num` words, so every episode can be added up: J = E[score] - beta * KL is exact for any
policy, and J* is that of the best tables of probabilities. Whoever answers sees the last summary alone: writer and
reader have to agree on a code. The model was taught a little of one, as by a short SFT: to find a code from nothing is
another task, in which a policy may stay at chance for hundreds of rollouts.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2ForCausalLM

from tests.learning import EOS, HEAD_STD, KIND_SIZE, KIND_WEIGHT, make_config, new_trainer, task_config, word_tokenizer

if TYPE_CHECKING:
    from onetrunk.ppo.trainer import PPOTrainer

START, NEXT, ASK, REQUEST, FIRST_KEY = 2, 3, 4, 5, 6
NUM_ROWS = 256
# A turn is a word and EOS.
TURN = 2
# Probability of the right word, for every key, at which teaching stops.
TAUGHT = 0.4


@dataclass(frozen=True)
class Courier:
    """The rules: `num` keys, told after the first turn; `compactions` before the question.

    Before a compaction there are two turns in the first context, and one in each of the others.
    """

    compactions: int = 1
    num: int = 8
    beta: float = 0.05

    @property
    def vocab_size(self) -> int:
        return FIRST_KEY + 2 * self.num

    @property
    def first_word(self) -> int:
        """The id of the first word that the policy may write."""
        return FIRST_KEY + self.num

    @property
    def turns(self) -> int:
        """Turns that the environment answers."""
        return self.compactions + 2

    def words(self) -> dict[str, int]:
        given = {"start": START, "next": NEXT, "ask": ASK, "request": REQUEST}
        keys = {f"k{i}": FIRST_KEY + i for i in range(self.num)}
        return given | keys | {f"a{i}": self.first_word + i for i in range(self.num)}

    def settings(self) -> dict[str, Any]:
        """Return the settings of PPOConfig that play it. A compaction is due after 7 tokens, and never after 4."""
        return {
            "max_turn_length": TURN,
            "max_context_length": 11,
            "max_compactions": self.compactions,
            "kept_turns": 0,
            "compaction_prompt": "request",
            "beta": self.beta,
            "lam": 1.0,
        }


class CourierGame:
    """The game as a Gymnasium text environment; the key is the row's."""

    def __init__(self, courier: Courier):
        self.courier = courier

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.key, self.turn = options["key"], 0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        if self.turn == self.courier.turns:
            return "", float(action.split()[0] == f"a{self.key}"), True, False, {}
        told = {1: f"k{self.key}", self.courier.turns - 1: "ask"}
        return told.get(self.turn, "next"), 0.0, False, False, {}


def courier_model(courier: Courier, seed: int) -> PreTrainedModel:
    """Return a model that writes a word after anything given, and EOS after a word, and that knows a little of a code.

    In a summary it writes the word of the key, or of the summary before, with a probability of about TAUGHT, and so in
    the answer.
    """
    return copy.deepcopy(_taught(courier.num, seed))


@functools.cache
def _taught(num: int, seed: int) -> PreTrainedModel:
    courier = Courier(num=num)
    model, n, words = _random_model(courier, seed), num, courier.first_word
    generator = torch.Generator().manual_seed(seed)
    # Not the first two dimensions of embedding and head, which say what kind of token may follow.
    optimizer = torch.optim.Adam(model.model.layers.parameters(), lr=1e-3)
    right, key = torch.zeros(3, n), torch.arange(n).repeat(4)
    while right.min() < TAUGHT:
        a, b = (words + torch.randint(n, key.shape, generator=generator) for _ in range(2))
        given = {name: torch.full_like(key, i) for name, i in {"eos": EOS, **courier.words()}.items() if i < FIRST_KEY}
        start, eos, word = given["start"], given["eos"], words + key
        rows = [
            [start, a, eos, FIRST_KEY + key, b, eos, given["request"]],
            [start, word, eos, given["next"], a, eos, given["request"]],
            [start, word, eos, given["ask"]],
        ]
        logits = [model(input_ids=torch.stack(row, 1)).logits[:, -1].log_softmax(-1) for row in rows]
        taken = torch.stack([x.gather(1, word[:, None])[:, 0] for x in logits])
        right = taken.detach().exp().view(3, 4, n).mean(1)
        optimizer.zero_grad()
        # What is known well enough waits for the rest.
        (-taken * (right < TAUGHT).repeat(1, 4)).mean().backward()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.grad[:2] = layer.mlp.down_proj.weight.grad[:2] = 0
        optimizer.step()
    return model.eval()


def _random_model(courier: Courier, seed: int) -> PreTrainedModel:
    config = task_config(courier, num_positions=64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        model.set_output_embeddings(nn.Linear(config.hidden_size, courier.vocab_size, bias=False))
        embeddings, head = model.get_input_embeddings().weight, model.lm_head.weight
        head.normal_(std=HEAD_STD)
        embeddings[:, :2] = head[:, :2] = 0
        for kind, (first, last) in enumerate([(START, courier.first_word), (courier.first_word, courier.vocab_size)]):
            embeddings[first:last, kind] = KIND_SIZE
        head[courier.first_word :, 0] = head[EOS, 1] = KIND_WEIGHT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:2] = layer.mlp.down_proj.weight[:2] = 0
    return model.eval()


def make_courier_trainer(courier: Courier, seed: int, folder: str | Path, **settings: Any) -> PPOTrainer:
    """Return a trainer that plays the game; `settings` replace those of the learning tests and of the game."""
    rows = {"prompt": ["start"] * NUM_ROWS, "key": [i % courier.num for i in range(NUM_ROWS)]}
    return new_trainer(
        courier_model(courier, seed),
        None,
        make_config(folder, seed, 64, {**courier.settings(), **settings}),
        Dataset.from_dict(rows),
        processing_class=word_tokenizer(courier.words()),
        environment_factory=lambda: CourierGame(courier),
    )


# --- what is known ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tables:
    """Logprobs of everything that a policy may write, float64.

    Args:
        first: [keys, n, n, n] of the first two turns and the first summary, by the key.
        later: [n, n, n] of a turn and the next summary, by the summary before; the same for every later context.
        answer: [n, n] of the answer, by the last summary.
    """

    first: Tensor
    later: Tensor
    answer: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, courier: Courier) -> Tables:
        """Return the tables of a model."""
        n, words = courier.num, range(courier.first_word, courier.vocab_size)
        keys = range(FIRST_KEY, FIRST_KEY + n)
        first = [[START, a, EOS, k, b, EOS, REQUEST, c] for k, a, b, c in product(keys, words, words, words)]
        later = [[START, c, EOS, NEXT, a, EOS, REQUEST, d] for c, a, d in product(words, repeat=3)]
        answer = [[START, c, EOS, ASK, a] for c, a in product(words, repeat=2)]
        shapes = [((n, n, n, n), (1, 4, 7)), ((n, n, n), (4, 7)), ((n, n), (4,))]
        rows = zip((first, later, answer), shapes, strict=True)
        return cls(*(_logprobs(model, torch.tensor(ids), places).view(shape) for ids, (shape, places) in rows))


def _logprobs(model: nn.Module, ids: Tensor, places: tuple[int, ...]) -> Tensor:
    """Return the summed logprobs [rows] of the tokens at these places."""
    logprobs = torch.cat([model(input_ids=part).logits.double().log_softmax(-1) for part in ids.split(1024)])
    return sum(logprobs[:, at - 1].gather(1, ids[:, at, None])[:, 0] for at in places)


def objective(tables: Tables, reference: Tables, courier: Courier) -> Tensor:
    """Return the exact J of a policy; the keys are equally likely."""
    first, keys = tables.first.exp(), courier.num
    paid = (first * (tables.first - reference.first)).sum() / keys
    written = first.sum((1, 2)) / keys  # [keys, n] the key and the summary that is in the context
    for _ in range(courier.compactions - 1):
        step = tables.later.exp()
        paid = paid + (written.sum(0)[:, None, None] * step * (tables.later - reference.later)).sum()
        written = written @ step.sum(1)
    answer = tables.answer.exp()
    paid = paid + (written.sum(0)[:, None] * answer * (tables.answer - reference.answer)).sum()
    return (written * answer.T).sum() - courier.beta * paid


def optimum(reference: Tables, courier: Courier, starts: int = 4, steps: int = 600) -> float:
    """Return J*: that of the best tables, by ascent on their logits from the taught code and from random ones."""
    best, generator, n = -float("inf"), torch.Generator().manual_seed(0), courier.num
    for start in range(starts):
        code = torch.randperm(n, generator=generator) if start else torch.arange(n)
        logits = [table.clone() for table in (reference.first, reference.later, reference.answer)]
        for key in range(n):
            logits[0][key, :, :, code[key]] += 10
            logits[1][code[key], :, code[key]] += 10
            logits[2][code[key], key] += 10
        logits = [table.requires_grad_() for table in logits]
        adam = torch.optim.Adam(logits, lr=0.05)

        def tables(logits: list[Tensor] = logits) -> Tables:
            return Tables(*(_normalised(x, dims) for x, dims in zip(logits, (3, 2, 1), strict=True)))

        for _ in range(steps):
            loss = -objective(tables(), reference, courier)
            adam.zero_grad()
            loss.backward()
            adam.step()
        best = max(best, -loss.item())
    return best


def _normalised(logits: Tensor, dims: int) -> Tensor:
    """Return log-probabilities over the last `dims` dimensions."""
    return logits - logits.flatten(-dims).logsumexp(-1).reshape(*logits.shape[:-dims], *[1] * dims)
