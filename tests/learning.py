"""Two tasks whose best attainable objective is known exactly, so that a trainer cannot pass by luck.

The policy that maximises J = E[score] - beta * KL(policy || reference) has probabilities proportional to
reference * exp(score / beta), and its J is J* = beta * mean over prompts of log E_reference[exp(score / beta)]. So few
completions exist here that all are added up under the real reference, which depends on the prompt and on the history.
The reference is a random Qwen2 of 4 layers; EOS and PAD have bias -30, so every completion has the full length.
The tasks import no trainer, because the environments of other libraries use them.
"""

from __future__ import annotations

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
    from onetrunk.ppo.trainer import PPOTrainer
    from onetrunk.rollouts.base import RolloutBackend

PAD, EOS, FIRST = 0, 1, 2
PROMPT_LENGTH = 4
NUM_PROMPTS = 256
FORBIDDEN_BIAS = -30.0
HEAD_STD = 0.3
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
    "value_head": "shared",
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

    Ids 0 and 1 are PAD and EOS; the next `num_good` are the good tokens, and prompts consist of the tokens after them.

    Args:
        num_tokens: ordinary tokens of the vocabulary.
        num_good: good ones among them.
        length: tokens of a completion.
        beta: coefficient of the KL.
    """

    num_tokens: int
    num_good: int
    length: int
    beta: float

    @property
    def vocab_size(self) -> int:
        return FIRST + self.num_tokens

    def score(self, completion_ids: list[int]) -> float:
        """Return the share of good tokens."""
        return sum(FIRST <= i < FIRST + self.num_good for i in completion_ids) / len(completion_ids)


TASK_A = Task(num_tokens=16, num_good=4, length=1, beta=0.5)
TASK_B = Task(num_tokens=8, num_good=2, length=4, beta=0.1)


@dataclass(frozen=True)
class Optimum:
    """The results of the best policy.

    Args:
        objective: J*.
        score: its mean score.
        kl: its KL to the reference, nats per completion.
        kl_std: standard deviation of logprob - reference logprob over its completions and the prompts.
        start: mean score of the reference, which is the reference's own J.
    """

    objective: float
    score: float
    kl: float
    kl_std: float
    start: float


@dataclass(frozen=True)
class Outcome:
    """The logged results of a run over its last MEASURED_ROLLOUTS rollouts, and its cost."""

    score: float
    kl: float
    objective: float
    wall_s: float
    cpu_s: float


def task_config(task: Task, hidden_size: int = 32, num_layers: int = 4, num_heads: int = 4) -> Qwen2Config:
    """Return the config of a model of a task."""
    return Qwen2Config(
        vocab_size=task.vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )


def reference_model(task: Task, seed: int) -> PreTrainedModel:
    """Return the random model: hidden 32, 4 layers, head of std .3 with a bias that rules out EOS and PAD."""
    config = task_config(task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        model.set_output_embeddings(nn.Linear(config.hidden_size, task.vocab_size, bias=True))
        with torch.no_grad():
            model.lm_head.weight.normal_(std=HEAD_STD)
            model.lm_head.bias.zero_()
            model.lm_head.bias[[PAD, EOS]] = FORBIDDEN_BIAS
    return model.eval()


def task_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words t2, t3, ..., each named after its id."""
    names = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(FIRST, task.vocab_size)}
    backend = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def task_prompts(task: Task, seed: int, count: int = NUM_PROMPTS) -> Tensor:
    """Return prompts [count, PROMPT_LENGTH] of random tokens that are not good."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST + task.num_good, task.vocab_size, (count, PROMPT_LENGTH), generator=generator)


def prompt_dataset(prompts: Tensor) -> Dataset:
    """Return the prompts as text."""
    return Dataset.from_dict({"prompt": [" ".join(f"t{i}" for i in row) for row in prompts.tolist()]})


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


def optimum(ref_logprobs: Tensor, scores: Tensor, beta: float) -> Optimum:
    """Return the results of the best policy against a reference given as logprobs [prompts, outcomes]."""
    log_partition = (ref_logprobs + scores / beta).logsumexp(1)
    log_ratio = scores / beta - log_partition[:, None]
    best = (ref_logprobs + log_ratio).exp()
    kl = (best * log_ratio).sum(1).mean()
    return Optimum(
        objective=beta * log_partition.mean().item(),
        score=(best @ scores).mean().item(),
        kl=kl.item(),
        kl_std=((best * log_ratio**2).sum(1).mean() - kl**2).sqrt().item(),
        start=(ref_logprobs.exp() @ scores).mean().item(),
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


def make_trainer(
    task: Task,
    seed: int,
    folder: str | Path,
    lora: dict[str, Any] | None = None,
    rollout_backend: RolloutBackend | str | None = None,
    **settings: Any,
) -> PPOTrainer:
    """Return a trainer of the task; `lora` and `settings` replace entries of LORA and SETTINGS.

    `rollout_backend` is a backend, or the setting of that name.
    """
    from onetrunk.ppo.config import PPOConfig
    from onetrunk.ppo.trainer import PPOTrainer

    if isinstance(rollout_backend, str):
        settings["rollout_backend"], rollout_backend = rollout_backend, None
    chosen = {**SETTINGS, "beta": task.beta, **settings}
    config = PPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        seed=seed,
        max_completion_length=task.length,
        logging_steps=chosen["num_ppo_epochs"] * chosen["num_minibatches"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **chosen,
    )
    trainer = PPOTrainer(
        reference_model(task, seed),
        share_of_good_tokens(task),
        config,
        prompt_dataset(task_prompts(task, seed)),
        processing_class=task_tokenizer(task),
        peft_config=LoraConfig(**{**LORA, **(lora or {})}),
        rollout_backend=rollout_backend,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


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
