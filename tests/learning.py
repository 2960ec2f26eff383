"""Tasks whose best attainable objective is known exactly, so that a trainer cannot pass by luck.

The policy that maximises J = E[score] - beta * KL(policy || reference) has probabilities proportional to
reference * exp(score / beta), and its J is J* = beta * mean over prompts of log E_reference[exp(score / beta)]. So few
completions exist here that all are added up under the real reference, which depends on the prompt and on the history.
The reference is a random Qwen2 of 4 layers; EOS and PAD have bias -30, so every completion has the full length.
In a `Chain` of turns an environment answers. It draws nothing, so an outcome is still what the policy sampled.
The tasks import no trainer, because the environments of other libraries use them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM

if TYPE_CHECKING:
    from onetrunk.ppo.config import PPOConfig
    from onetrunk.ppo.trainer import PPOTrainer
    from onetrunk.rollouts.base import RolloutBackend

PAD, EOS, FIRST = 0, 1, 2
PROMPT_LENGTH = 4
NUM_PROMPTS = 256
FORBIDDEN_BIAS = -30.0
HEAD_STD = 0.3
# Of a chain: the embedding in the dimension of a token's kind, and the head's weight on it.
KIND_SIZE, KIND_WEIGHT = 0.1, 20.0
MEASURED_ROLLOUTS = 10
ROWS_AT_ONCE = 16_384

# The one setting of both tasks and all seeds.
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
SETTINGS: dict[str, Any] = {
    "rollout_batch_size": 128,
    "num_rollouts": 80,
    "num_ppo_epochs": 4,
    "num_minibatches": 1,
    "per_device_train_batch_size": 128,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "epsilon": 0.2,
    "gamma": 1.0,
    "lam": 0.95,
    "kl_estimator": "k1",
    "whiten_advantages": True,
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
}


@dataclass(frozen=True)
class Task:
    """Write `length` tokens; the score of a completion is its share of good tokens.

    Ids 0 and 1 are PAD and EOS; of the `num_tokens` others the first `num_good` are the good tokens, and prompts
    consist of the rest.
    """

    num_tokens: int
    num_good: int
    length: int
    beta: float

    @property
    def vocab_size(self) -> int:
        return FIRST + self.num_tokens

    def score(self, completion_ids: list[int]) -> float:
        return sum(FIRST <= i < FIRST + self.num_good for i in completion_ids) / len(completion_ids)


TASK_A = Task(num_tokens=16, num_good=4, length=1, beta=0.5)
TASK_B = Task(num_tokens=8, num_good=2, length=4, beta=0.1)


@dataclass(frozen=True)
class Chain:
    """Play `turns` turns. A turn is `length` actions and EOS; the answer is an observation that depends on both.

    Observations and the actions of each place in a turn have `num` tokens each. The first observation is the last
    token of the prompt. An action is good if its number added to that of the token before it is below `num_good`
    modulo `num`, and earns 1 / (turns * length), so the score is the share of good actions.
    """

    turns: int
    length: int
    num: int
    num_good: int
    beta: float

    @property
    def vocab_size(self) -> int:
        return FIRST + self.num * (1 + self.length)

    @property
    def episode_length(self) -> int:
        """The tokens of an episode after its prompt: there is no observation after the last turn."""
        return self.turns * (self.length + 2) - 1

    def names(self) -> dict[str, int]:
        """Return the words of observations (o0, o1, ...) and actions (a0, ..., of the second place b0, ...)."""
        kinds = "oab"[: 1 + self.length]
        return {f"{kind}{i}": FIRST + k * self.num + i for k, kind in enumerate(kinds) for i in range(self.num)}

    def rewards(self, observation: Any, actions: Any) -> Any:
        """Return the reward of a turn; ints, or tensors of numbers with the actions in the last dimension."""
        before = [observation, *actions[:-1]]
        return sum((a + b) % self.num < self.num_good for a, b in zip(actions, before, strict=True)) / (
            self.turns * self.length
        )

    def answer(self, observation: Any, actions: Any) -> Any:
        """Return the number of the next observation."""
        return (observation + 3 * sum(actions) + 1) % self.num


TWO_TURNS = Chain(turns=2, length=2, num=4, num_good=1, beta=0.1)
FOUR_TURNS = Chain(turns=4, length=1, num=6, num_good=1, beta=0.1)
# The same price of a nat per turn.
ONE_TURN = Chain(turns=1, length=1, num=6, num_good=1, beta=0.4)
SIXTEEN_TURNS = Chain(turns=16, length=1, num=6, num_good=1, beta=0.025)


class ChainGame:
    """A Gymnasium text environment that plays a Chain from the last token of the prompt.

    It pays each turn's reward at once, or, if `pays` is "end", their sum after the last one.
    """

    def __init__(self, chain: Chain, pays: str = "turns"):
        self.chain, self.pays = chain, pays

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.observation, self.turn, self.earned = int(options["prompt"].split()[-1][1:]), 0, 0.0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        actions = [int(word[1:]) for word in action.split()]
        self.turn += 1
        reward = self.chain.rewards(self.observation, actions)
        self.earned += reward
        self.observation = self.chain.answer(self.observation, actions)
        is_over = self.turn == self.chain.turns
        if self.pays == "end":
            reward = self.earned if is_over else 0.0
        return "" if is_over else f"o{self.observation}", reward, is_over, False, {}


@dataclass(frozen=True)
class Optimum:
    """The results of the best policy: J*, its score and its KL to the reference in nats per completion."""

    objective: float
    score: float
    kl: float
    # Of logprob - reference logprob over its completions and the prompts.
    kl_std: float
    # Mean score of the reference, which is the reference's own J.
    start: float


@dataclass(frozen=True)
class Outcome:
    """The logged results of a run over its last MEASURED_ROLLOUTS rollouts, and its cost."""

    score: float
    kl: float
    objective: float
    wall_s: float
    cpu_s: float


def task_config(
    task: Any, hidden_size: int = 32, num_layers: int = 4, num_heads: int = 4, num_positions: int = 32
) -> Qwen2Config:
    """Return the config of a model of a task with a `vocab_size`."""
    return Qwen2Config(
        vocab_size=task.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=num_positions,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )


def reference_model(task: Task | Chain, seed: int) -> PreTrainedModel:
    """Return the random model: hidden 32, 4 layers, head of std .3 with a bias that rules out EOS and PAD."""
    config = task_config(task, num_positions=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        model.set_output_embeddings(nn.Linear(config.hidden_size, task.vocab_size, bias=True))
        with torch.no_grad():
            model.lm_head.weight.normal_(std=HEAD_STD)
            model.lm_head.bias.zero_()
            model.lm_head.bias[[PAD, EOS]] = FORBIDDEN_BIAS
    return model.eval()


def chain_model(chain: Chain, seed: int) -> PreTrainedModel:
    """Return a random model that writes actions after an observation, and EOS after the last action of a turn.

    Each kind of token has a dimension of the residual stream, which no layer writes to and from which the head reads
    what may follow. The margin is dozens of nats, so EOS costs no logprob and no KL.
    """
    model, kinds = reference_model(chain, seed), 1 + chain.length
    embeddings, head = model.get_input_embeddings().weight, model.lm_head
    with torch.no_grad():
        head.bias.zero_()
        embeddings[:, :kinds] = head.weight[:, :kinds] = 0
        for kind in range(kinds):
            start = FIRST + kind * chain.num
            embeddings[start : start + chain.num, kind] = KIND_SIZE
            follows = slice(start + chain.num, start + 2 * chain.num) if kind < chain.length else EOS
            head.weight[follows, kind] = KIND_WEIGHT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:kinds] = layer.mlp.down_proj.weight[:kinds] = 0
    return model


def task_tokenizer(task: Task | Chain) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words t2, t3, ..., each named after its id, or of the words of a Chain."""
    words = task.names() if isinstance(task, Chain) else {f"t{i}": i for i in range(FIRST, task.vocab_size)}
    return word_tokenizer(words)


def word_tokenizer(words: dict[str, int]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with these ids, with PAD and EOS."""
    names = {"<pad>": PAD, "<eos>": EOS} | words
    backend = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def task_prompts(task: Task, seed: int, count: int = NUM_PROMPTS) -> Tensor:
    """Return prompts [count, PROMPT_LENGTH] of random tokens that are not good."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST + task.num_good, task.vocab_size, (count, PROMPT_LENGTH), generator=generator)


def chain_prompts(chain: Chain, seed: int, count: int = NUM_PROMPTS) -> Tensor:
    """Return prompts [count, PROMPT_LENGTH] of random observations."""
    generator = torch.Generator().manual_seed(seed)
    return FIRST + torch.randint(chain.num, (count, PROMPT_LENGTH), generator=generator)


def prompt_dataset(prompts: Tensor, letter: str = "t", first: int = 0) -> Dataset:
    """Return the prompts as text."""
    return Dataset.from_dict({"prompt": [" ".join(f"{letter}{i - first}" for i in row) for row in prompts.tolist()]})


def all_completions(task: Task) -> Tensor:
    """Return every completion without EOS and PAD, [num_tokens ** length, length], the last token fastest."""
    return torch.tensor(list(product(range(FIRST, task.vocab_size), repeat=task.length)))


@torch.no_grad()
def outcome_logprobs(model: nn.Module, task: Task, prompts: Tensor) -> Tensor:
    """Return the logprob of every completion after every prompt, [prompts, num_tokens ** length], in float64.

    One row per history of length - 1 tokens gives the distributions of all tokens on the way.
    """
    histories = all_completions(task)[:: task.num_tokens, :-1]
    chunk = max(1, ROWS_AT_ONCE // len(histories))
    return torch.cat([_outcome_logprobs(model, task, part, histories) for part in prompts.split(chunk)])


def _outcome_logprobs(model: nn.Module, task: Task, prompts: Tensor, histories: Tensor) -> Tensor:
    rows = [prompts.repeat_interleave(len(histories), 0), histories.repeat(len(prompts), 1)]
    logits = model(input_ids=torch.cat(rows, dim=1)).logits[:, PROMPT_LENGTH - 1 :]
    logprobs = logits.double().log_softmax(-1)
    taken = logprobs[:, :-1].gather(2, rows[1][:, :, None])[:, :, 0].sum(1)
    return (taken[:, None] + logprobs[:, -1, FIRST:]).reshape(len(prompts), -1)


def all_scores(task: Task) -> Tensor:
    """Return the score of every completion in the order of `all_completions`, float64."""
    return torch.tensor([task.score(ids) for ids in all_completions(task).tolist()], dtype=torch.float64)


def chain_episodes(chain: Chain, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Return every episode after every prompt: ids [prompts, outcomes, tokens], last action fastest, and its score."""
    plans = torch.tensor(list(product(range(chain.num), repeat=chain.turns * chain.length)))
    shape = (len(prompts), len(plans))
    observation = (prompts[:, -1:] - FIRST).expand(shape)
    columns, scores = [], torch.zeros(shape, dtype=torch.float64)
    for turn in plans.view(len(plans), chain.turns, chain.length).unbind(1):
        actions = [action.expand(shape) for action in turn.unbind(1)]
        scores += chain.rewards(observation, actions)
        observation = chain.answer(observation, actions)
        columns += [FIRST + (1 + place) * chain.num + action for place, action in enumerate(actions)]
        columns += [torch.full(shape, EOS), FIRST + observation]
    return torch.cat([prompts[:, None].expand(*shape, -1), torch.stack(columns[:-1], 2)], 2), scores


@torch.no_grad()
def chain_outcomes(model: nn.Module, chain: Chain, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprobs and scores of every episode after every prompt, both [prompts, outcomes] in float64."""
    parts = []
    for few in prompts.split(max(1, ROWS_AT_ONCE // chain.num ** (chain.turns * chain.length - 1))):
        ids, scores = chain_episodes(chain, few)
        histories = ids[:, :: chain.num, :-2].flatten(0, 1)
        logprobs = model(input_ids=histories).logits[:, PROMPT_LENGTH - 1 :].double().log_softmax(-1)
        given = torch.arange(1, logprobs.shape[1]) % (chain.length + 2) == 0
        taken = logprobs[:, :-1].gather(2, histories[:, PROMPT_LENGTH:, None])[:, :, 0].masked_fill(given, 0.0)
        last = logprobs[:, -1, -chain.num :]
        parts.append(((taken.sum(1)[:, None] + last).reshape(len(few), -1), scores))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def chain_objective(model: nn.Module, chain: Chain, seed: int) -> float:
    """Return the exact J of a policy that was trained with a seed."""
    prompts = chain_prompts(chain, seed)
    ref_logprobs, scores = chain_outcomes(chain_model(chain, seed), chain, prompts)
    logprobs, _ = chain_outcomes(model, chain, prompts)
    return (logprobs.exp() * (scores - chain.beta * (logprobs - ref_logprobs))).sum(1).mean().item()


def chain_optimum(chain: Chain, seed: int) -> Optimum:
    """Return the optimum of a chain with the model and the prompts of a seed."""
    return optimum(*chain_outcomes(chain_model(chain, seed), chain, chain_prompts(chain, seed)), chain.beta)


def optimum(ref_logprobs: Tensor, scores: Tensor, beta: float) -> Optimum:
    """Return the results of the best policy against a reference given as logprobs [prompts, outcomes].

    `scores` are [outcomes], or [prompts, outcomes] where they depend on the prompt.
    """
    log_partition = (ref_logprobs + scores / beta).logsumexp(1)
    log_ratio = scores / beta - log_partition[:, None]
    best = (ref_logprobs + log_ratio).exp()
    kl = (best * log_ratio).sum(1).mean()
    return Optimum(
        objective=beta * log_partition.mean().item(),
        score=(best * scores).sum(1).mean().item(),
        kl=kl.item(),
        kl_std=((best * log_ratio**2).sum(1).mean() - kl**2).sqrt().item(),
        start=(ref_logprobs.exp() * scores).sum(1).mean().item(),
    )


def task_optimum(task: Task, seed: int) -> Optimum:
    """Return the optimum of a task with the model and the prompts of a seed."""
    ref_logprobs = outcome_logprobs(reference_model(task, seed), task, task_prompts(task, seed))
    return optimum(ref_logprobs, all_scores(task), task.beta)


def exact_kl(logprobs: Tensor, ref_logprobs: Tensor) -> float:
    """Return KL(policy || reference), mean over prompts, of policies given as logprobs [prompts, outcomes]."""
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(1).mean().item()


def share_of_good_tokens(task: Task) -> Callable[..., list[float]]:
    """Return the task's reward function."""

    def good_tokens(prompts: list[str], completions: list[str], completion_ids: Any = None, **_: Any) -> list[float]:
        return [task.score(ids) for ids in completion_ids]

    return good_tokens


def make_config(folder: str | Path, seed: int, length: int, settings: dict[str, Any]) -> PPOConfig:
    """Return the settings of a run; `settings` replace entries of SETTINGS."""
    from onetrunk.ppo.config import PPOConfig

    chosen = {**SETTINGS, **settings}
    return PPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        seed=seed,
        max_completion_length=length,
        save_strategy="no",
        logging_steps=chosen["num_ppo_epochs"] * chosen["num_minibatches"],
        report_to="none",
        disable_tqdm=True,
        **chosen,
    )


def new_trainer(*parts: Any, lora: dict[str, Any] = LORA, **more: Any) -> PPOTrainer:
    """Return a trainer of these arguments with a LoRA adapter; it prints no logs."""
    from onetrunk.ppo.trainer import PPOTrainer

    trainer = PPOTrainer(*parts, peft_config=LoraConfig(**lora), **more)
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_trainer(
    task: Task,
    seed: int,
    folder: str | Path,
    lora: dict[str, Any] | None = None,
    rollout_backend: RolloutBackend | str | None = None,
    reward: Callable[..., list[float]] | None = None,
    **settings: Any,
) -> PPOTrainer:
    """Return a trainer of the task; `lora` and `settings` replace entries of LORA and SETTINGS, `reward` the task's.

    `rollout_backend` is a backend, or the setting of that name.
    """
    if isinstance(rollout_backend, str):
        settings["rollout_backend"], rollout_backend = rollout_backend, None
    return new_trainer(
        reference_model(task, seed),
        reward or share_of_good_tokens(task),
        make_config(folder, seed, task.length, {"beta": task.beta, **settings}),
        prompt_dataset(task_prompts(task, seed)),
        processing_class=task_tokenizer(task),
        lora={**LORA, **(lora or {})},
        rollout_backend=rollout_backend,
    )


def make_chain_trainer(
    chain: Chain, seed: int, folder: str | Path, pays: str = "turns", **settings: Any
) -> PPOTrainer:
    """Return a trainer that plays a chain in ChainGame, whose rewards are the only ones."""
    return new_trainer(
        chain_model(chain, seed),
        None,
        make_config(folder, seed, chain.episode_length, {"beta": chain.beta, **settings}),
        prompt_dataset(chain_prompts(chain, seed), "o", FIRST),
        processing_class=task_tokenizer(chain),
        environment_factory=functools.partial(ChainGame, chain, pays),
    )


def learn(trainer: PPOTrainer) -> Outcome:
    """Train, and return the mean of the last rollouts as they were logged."""
    wall, cpu = time.perf_counter(), time.process_time()
    trainer.train()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    logs = [log for log in trainer.state.log_history if "score/mean" in log]
    if len(logs) != trainer.args.num_rollouts:
        raise RuntimeError(f"{len(logs)} rollouts were logged, expected {trainer.args.num_rollouts}")
    last = logs[-MEASURED_ROLLOUTS:]
    score = math.fsum(log["score/mean"] for log in last) / len(last)
    kl = math.fsum(log["kl/ref"] for log in last) / len(last)
    return Outcome(score, kl, score - trainer.args.beta * kl, wall, cpu)
