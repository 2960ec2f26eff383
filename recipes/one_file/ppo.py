"""PPO on one frozen base model in one file, without a trainer: the algorithm, to read and to change.

    python recipes/one_file/ppo.py                                                # runs/tiny/sft, made by `make demo`
    python recipes/one_file/ppo.py --model HuggingFaceTB/SmolLM2-135M-Instruct

Three roles share the base: with the LoRA adapter on it is the policy, with the adapter off the reference, and a small
head on the policy's last hidden states is the value. The reward is a function. Tensors are [rows, tokens]; column t
belongs to the t-th token after the first of a row, and a mask is True where a token was sampled.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

EPSILON = 0.2  # Ratios of probabilities are clipped to 1 - EPSILON .. 1 + EPSILON.
# Steps of the value's fit after a rollout, of fewer rows or tokens in proportion; and tokens of a step.
VALUE_STEPS, VALUE_ROWS, VALUE_TOKENS = 40, 128, 512


@dataclass
class Ppo:
    """A policy with its value head and their optimizers.

    Args:
        policy: a PEFT model with a LoRA adapter.
        total_steps: optimizer steps of the whole run; the learning rate falls to 0 over them.
        beta: coefficient of the KL to the reference.
    """

    policy: nn.Module
    total_steps: int
    learning_rate: float = 1e-3
    beta: float = 0.05
    epochs: int = 4
    step: int = 0
    optimizer: torch.optim.Optimizer = field(init=False)
    head: nn.Module = field(init=False)
    head_optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        hidden = self.policy.config.hidden_size
        self.head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 128), nn.GELU(), nn.Linear(128, 1))
        nn.init.zeros_(self.head[-1].weight)
        nn.init.zeros_(self.head[-1].bias)
        self.head_optimizer = torch.optim.Adam(self.head.parameters(), 1e-3)
        adapter = [p for p in self.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(adapter, self.learning_rate, weight_decay=0.0)

    def read(self, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logprob of every token after the first [R, T - 1], and the states that predict them."""
        out = self.policy(input_ids=ids, attention_mask=attention, output_hidden_states=True)
        logprobs = out.logits[:, :-1].float().log_softmax(-1)
        return logprobs.gather(2, ids[:, 1:, None]).squeeze(2), out.hidden_states[-1][:, :-1].float()

    def update(self, ids: Tensor, attention: Tensor, mask: Tensor, scores: Tensor) -> dict[str, float]:
        """Take one rollout's steps of the policy, then those of the value head; return what to print.

        Args:
            ids, attention: [R, T] of prompts and completions, padded on the right.
            mask: [R, T - 1], True where the token after a position was sampled.
            scores: [R], one per completion.
        """
        with torch.no_grad():
            old_logprobs, states = self.read(ids, attention)
            with self.policy.disable_adapter():
                ref_logprobs, _ = self.read(ids, attention)
            values = self.head(states).squeeze(2).masked_fill(~mask, 0.0)
            kl = (old_logprobs - ref_logprobs).masked_fill(~mask, 0.0)
            is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
            rewards = torch.where(is_last, scores[:, None], 0.0) - self.beta * kl
            advantages, returns = gae(rewards, values, mask)
            advantages = (advantages - advantages[mask].mean()) / (advantages[mask].var() + 1e-8).sqrt()
        for _ in range(self.epochs):
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate * (1 - self.step / self.total_steps)
            logprobs, _ = self.read(ids, attention)
            ratio = (logprobs - old_logprobs).exp()
            gains = torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
            self.optimizer.zero_grad()
            (-gains[mask].mean()).backward()
            nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 1.0)
            self.optimizer.step()
            self.step += 1
        explained = 1 - (returns - values)[mask].var() / returns[mask].var().clamp(min=1e-8)
        self.fit_value(states[mask], returns[mask], len(mask))
        return {"score": scores.mean().item(), "kl": kl.sum(1).mean().item(), "explained": explained.item()}

    def fit_value(self, states: Tensor, returns: Tensor, rows: int) -> None:
        """Fit the head to the returns [N] of the tokens whose states [N, H] these are; no forward of the model."""
        steps = math.ceil(VALUE_STEPS * min(1.0, len(states) / VALUE_TOKENS, rows / VALUE_ROWS))
        for drawn in torch.randint(len(states), (steps, VALUE_TOKENS), device=states.device):
            error = self.head(states[drawn]).squeeze(1) - returns[drawn]
            self.head_optimizer.zero_grad()
            error.square().mean().backward()
            self.head_optimizer.step()


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [R, T] by generalised advantage estimation; 0 where the mask is False.

    Source: Schulman et al. 2016, 1506.02438.
    """
    advantages, last, next_value = torch.zeros_like(rewards), torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        is_sampled = mask[:, t]
        now = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * last
        last, next_value = torch.where(is_sampled, now, last), torch.where(is_sampled, values[:, t], next_value)
        advantages[:, t] = torch.where(is_sampled, last, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def batch(prompts: list[list[int]], completions: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids and attention mask [R, T] of the rows, padded on the right, and the mask of sampled tokens."""
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids = torch.full((len(prompts), width), pad_id)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(ids), width - 1, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        attention[row, :end] = 1
        mask[row, len(prompt) - 1 : end - 1] = True
    return ids, attention, mask


@torch.no_grad()
def sample(policy: nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: list[str], length: int) -> list[list[int]]:
    """Return a completion of every prompt, with its end if it has one."""
    tokenizer.padding_side = "left"
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": tokenizer.pad_token_id}
    rows = policy.generate(**encoded, max_new_tokens=length, eos_token_id=tokenizer.eos_token_id, **options)
    rows, end = rows[:, encoded["input_ids"].shape[1] :].tolist(), tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def train(
    ppo: Ppo,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    reward: Callable[[str], float],
    rollouts: int,
    rows: int,
    length: int,
) -> list[dict[str, float]]:
    """Train on rollouts of `rows` completions; return what each said."""
    said = []
    for rollout in range(rollouts):
        chosen = [prompts[i] for i in torch.randint(len(prompts), (rows,)).tolist()]
        ppo.policy.eval()
        completions = sample(ppo.policy, tokenizer, chosen, length)
        scores = torch.tensor([reward(text) for text in tokenizer.batch_decode(completions, skip_special_tokens=True)])
        ids, attention, mask = batch(tokenizer(chosen)["input_ids"], completions, tokenizer.pad_token_id)
        said.append(ppo.update(ids, attention, mask, scores))
        print(f"rollout {rollout + 1}/{rollouts}: " + ", ".join(f"{k} {v:.3f}" for k, v in said[-1].items()))
    return said


def brief(text: str) -> float:
    """Score a reply of at most five words 1, and less for each word more."""
    return min(1.0, 5 / max(1, len(text.split())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="runs/tiny/sft", help="a folder or a name on the Hub")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64, help="completions of a rollout")
    parser.add_argument("--length", type=int, default=32, help="longest completion, tokens")
    given = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32), lora)
    requests = [f"{verb} the {thing}, please." for verb in ("Describe", "Open") for thing in ("door", "garden", "sea")]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in requests]
        requests = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    ppo = Ppo(policy, total_steps=given.rollouts * Ppo.epochs)
    train(ppo, tokenizer, requests, brief, given.rollouts, given.rows, given.length)
    policy.save_pretrained("runs/one_file")


if __name__ == "__main__":
    main()
