"""AgileRL 2.58's PPO for language models on the study of learning: actor, critic and reference adapters on one base.

    python scripts/bench/learning_agilerl.py --task four_tokens

Needs the environment of agilerl_baseline.txt, and the repository's root and src in PYTHONPATH for the tasks. Its
advantages are those of tokens, and `beta` is to weigh the KL against the score as it does in ours:

- A turn's reward goes to every token of it, so the first of n tokens would earn n times the score. Here every token is
  a turn of its own and the last one has the score.
- Policy loss and KL are both means over tokens, so without whitened advantages `beta` is that of score - beta * KL;
  with them it would be multiplied by their standard deviation. Whitening is off; Adam does not mind the scale.
- Arm `agilerl` leaves the KL to AgileRL's loss: k3 of the sampled tokens. On policy its gradient is that of
  KL(reference || policy), token by token and without the KL of later tokens, so the best policy is another one than
  that of score - beta * KL(policy || reference), whatever `beta` is.
- Arm `agilerl-kl-reward` pays the KL as rewards of the tokens, with `beta` 0 in the loss and whitened advantages: the
  same objective, and the same optimum, as ours.

The critic learns at the actor's rate: ten times as much was no better on the preliminary seed.

On `chain` the KL is paid as a reward by all arms. `agilerl-turns` and `agilerl-turn-means` have a turn as the action,
whose value is that before its last token (AgileRL's default, which has seen the action here) or the mean over its
tokens. In `agilerl-tokens` a token is an action; AgileRL's estimate then ends at every observation, which
`agilerl-tokens-sum` shows, where everything is paid at the end.
"""

from __future__ import annotations

import os

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import time
import warnings
from typing import Any

import agilerl.algorithms.core.base as core
import torch
from agilerl.algorithms.ppo_llm import PPO
from agilerl.utils.ppo_value_head import AutoModelForCausalLMWithValueHead
from learning_study import FOUR_RATES, Arm, Curve, Rule, parse, study
from learning_tasks import TINY_TASKS, TURN_TASKS, FourTurns
from peft import LoraConfig
from torch import Tensor
from transformers import set_seed

RATES = {task: [{"learning_rate": rate} for rate in FOUR_RATES] for task in TINY_TASKS}
CHAIN = {FourTurns.name: [{"learning_rate": rate} for rate in (1e-3, 2e-3, 4e-3)]}
for task in TURN_TASKS:
    del RATES[task]
PRETRAINED = {
    "replies": [{"learning_rate": rate} for rate in (5e-4, 1e-3, 2e-3)],
    "rules": [{"learning_rate": rate} for rate in (2.5e-4, 5e-4)],
}
ARMS = [
    Arm("agilerl", {"pays_kl": False}, RATES),
    Arm("agilerl-kl-reward", {"pays_kl": True}, {**RATES, **PRETRAINED}),
    Arm("agilerl-turns", {"pays_kl": True, "unit": "turn"}, CHAIN),
    Arm("agilerl-turn-means", {"pays_kl": True, "unit": "turn", "turn_value": "mean"}, CHAIN),
    Arm("agilerl-tokens", {"pays_kl": True}, CHAIN),
    Arm("agilerl-tokens-sum", {"pays_kl": True, "pays": "end"}, CHAIN),
]


def make_agent(task: Any, settings: dict[str, Any], seed: int) -> PPO:
    """Return AgileRL's agent of a task, with the settings of the learning tests under AgileRL's names."""
    given, rate, pays_kl = task.settings, settings["learning_rate"], settings["pays_kl"]
    # AgileRL takes the first padding for the end of a completion: it expects both to be the same token. It does not
    # sample the episodes of a chain, in which EOS also ends a turn, and whose rows are all of one length.
    pad = task.pad_id if isinstance(task, FourTurns) else task.eos_id
    core.HAS_LIGER_KERNEL = False  # Its kernels need a GPU.
    set_seed(seed)
    model = task.model(seed)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = pad, task.eos_id
    agent = PPO(
        pad_token_id=pad,
        pad_token=task.tokenizer().convert_ids_to_tokens(pad),
        actor_network=AutoModelForCausalLMWithValueHead(model),
        lora_config=LoraConfig(**task.lora, task_type="CAUSAL_LM"),
        batch_size=given["rollout_batch_size"],
        beta=0.0 if pays_kl else task.beta,
        kl_clamp=None,
        clip_coef=given["epsilon"],
        gamma=given["gamma"],
        gae_lambda=given["lam"],
        whiten_advantages=pays_kl,
        advantage_granularity=settings.get("unit", "token"),
        importance_sampling_level="auto" if "unit" in settings else "token",
        turn_value_reduction=settings.get("turn_value", "final_value"),
        lr_actor=rate,
        lr_critic=rate,
        max_grad_norm=given["max_grad_norm"],
        update_epochs=given["num_ppo_epochs"],
        top_k=0,
        max_output_tokens=task.length,
        gradient_checkpointing=False,
        use_liger_loss=False,
        device="cpu",
        seed=seed,
    )
    for group in agent.optimizer.param_groups:
        group["weight_decay"] = given["weight_decay"]
    return agent


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the rewards [rows, tokens] of completions of which each token is a turn, and the turn of each position.

    Args:
        scores: of the completions.
        mask: of their tokens, [rows, positions].
        kl: logprob - reference logprob of every position.
        beta: weight of the KL, 0 where the loss has it.
    """
    turns = torch.where(mask, mask.cumsum(1) - 1, -1)
    rewards = torch.zeros(len(mask), int(mask.sum(1).max()))
    rows, _ = mask.nonzero(as_tuple=True)
    rewards[rows, turns[mask]] = -beta * kl[mask]
    rewards[torch.arange(len(mask)), mask.sum(1) - 1] += scores
    return rewards, turns


def train_once(agent: PPO, rule: Rule, prompts: Tensor, beta: float) -> float:
    """Sample a completion of every prompt, score and learn; return the mean KL of a completion."""
    sampled = agent.get_action([{"input_ids": prompts}])
    ids, mask = sampled[0][0], sampled[1][0]
    completions = [row[1:][kept].tolist() for row, kept in zip(ids, mask, strict=True)]
    texts = [rule.task.text(row) for row in prompts.tolist()]
    scores = torch.tensor(rule.function()(texts, None, completions))
    # What learn begins with; it is given the same result again.
    scored = agent._fused_forward_no_grad(ids, batch_size=len(ids))
    agent._fused_forward_no_grad = lambda *args, **kwargs: scored
    kl = (scored[1] - scored[0]).float().masked_fill(~mask, 0.0)
    rewards, turns = token_rewards(scores, mask, kl, beta)
    agent.learn(([ids], [mask], rewards), turn_ids=turns)
    del agent._fused_forward_no_grad
    return kl.sum(1).mean().item()


def play_once(agent: PPO, rule: Rule, prompts: Tensor, beta: float, settings: dict[str, Any]) -> float:
    """Play an episode after every prompt and learn; return the mean KL of an episode."""
    with agent.select_adapter("actor"):
        episodes = rule.task.play(agent.actor.pretrained_model, prompts)
    completions = [episode.ids for episode in episodes]
    ids = torch.cat([prompts, torch.tensor(completions)], 1)
    rule.function()([rule.task.text(row) for row in prompts.tolist()], None, completions)
    rewards = torch.tensor(list(map(rule.task.turn_rewards, prompts.tolist(), completions)))
    if settings.get("pays") == "end":
        rewards[:, -1], rewards[:, :-1] = rewards.sum(1), 0.0
    turns = torch.tensor([episode.turns for episode in episodes])
    turns = torch.cat([torch.full((len(ids), prompts.shape[1] - 1), -1), turns], 1)
    mask = turns >= 0
    scored = agent._fused_forward_no_grad(ids, batch_size=len(ids))
    kl = (scored[1] - scored[0]).float().masked_fill(~mask, 0.0)
    # A turn is an action and EOS.
    kl_rewards = -beta * kl[mask].view(len(ids), -1, 2)
    if settings.get("unit") == "turn":
        rewards = rewards + kl_rewards.sum(2)
    else:
        kl_rewards[:, :, 1] += rewards
        rewards, turns = kl_rewards.flatten(1), torch.where(mask, mask.cumsum(1) - 1, -1)
    agent.learn(([ids], [mask], rewards), turn_ids=turns)
    return kl.sum(1).mean().item()


def run(task: Any, settings: dict[str, Any], seed: int, rollouts: int) -> tuple[Curve, dict[str, Any]]:
    """Train once, with a learning rate that falls linearly to 0."""
    warnings.simplefilter("ignore")
    agent, rule, curve = make_agent(task, settings, seed), Rule(task, task.tokenizer()), Curve()
    prompts, peaks = task.prompts(seed), (agent.lr, agent.lr_critic)
    size, generator = task.settings["rollout_batch_size"], torch.Generator().manual_seed(seed)
    order: list[int] = []
    start = time.process_time()
    for rollout in range(rollouts):
        if len(order) < size:
            order = torch.randperm(len(prompts), generator=generator).tolist()
        chosen, order = order[:size], order[size:]
        agent.lr, agent.lr_critic = (peak * (1 - rollout / rollouts) for peak in peaks)
        agent.apply_lr()
        beta = task.beta if settings["pays_kl"] else 0.0
        if isinstance(task, FourTurns):
            kl = play_once(agent, rule, prompts[chosen], beta, settings)
        else:
            kl = train_once(agent, rule, prompts[chosen], beta)
        curve.add(rule.taken(), kl, time.process_time() - start)
    with agent.select_adapter("actor"):
        held_out = task.held_out(agent.actor.pretrained_model)
    trained = sum(p.numel() for p in agent.actor.parameters() if p.requires_grad)
    return curve, {"trained": trained, **held_out}


def main(arguments: list[str] | None = None) -> None:
    study(parse(__doc__.split("\n\n")[0], ARMS, arguments), ARMS, run)


if __name__ == "__main__":
    main()
