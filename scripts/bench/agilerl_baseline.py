"""One process of AgileRL 2.58's PPO on the workload: scoring and update by `learn`, with adapters on one base.

    python agilerl_baseline.py --shape base --mixed --adapter_layers top-4

It prints one JSON line. Actor, critic and reference are LoRA adapters on one frozen base, without gradient
checkpointing, and with Liger kernels on a GPU alone. Rows are prompts and random completions of the workload's
lengths, and the score is a given number: neither sampling nor a reward model is timed. It needs an environment of its
own (agilerl_baseline.txt).
"""

from __future__ import annotations

import os

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import argparse
import json
import warnings
from typing import Any

import agilerl.algorithms.core.base as core
import torch
import transformers
from agilerl.algorithms.ppo_llm import PPO
from agilerl.utils.ppo_value_head import AutoModelForCausalLMWithValueHead
from peft import LoraConfig
from torch import Tensor
from workload import EOS, FIRST_WORD, LORA, PAD, Meter, Workload

VERSION = "2.58.0"


def make_agent(work: Workload, adapter_layers: str) -> PPO:
    """Return the agent: one optimizer step per epoch over the whole rollout, as ours."""
    core.HAS_LIGER_KERNEL = work.device != "cpu"  # Its kernels need a GPU.
    total = work.config().num_hidden_layers
    first = 0 if adapter_layers == "all" else total - int(adapter_layers[4:])
    layers = {"layers_to_transform": list(range(first, total))} if first else {}
    return PPO(
        pad_token_id=PAD,
        pad_token="<pad>",
        actor_network=AutoModelForCausalLMWithValueHead(work.policy()),
        lora_config=LoraConfig(**LORA, **layers),
        batch_size=work.rollout,
        mini_batch_size=work.rollout,
        micro_batch_size_per_gpu=work.microbatch,
        update_epochs=work.epochs,
        beta=0.05,
        advantage_granularity="token",
        importance_sampling_level="token",
        max_model_len=work.prompt + work.completion,
        gradient_checkpointing=False,
        use_liger_loss=work.device != "cpu",
        device=work.device,
    )


def rollout_rows(work: Workload, prompts: list[list[int]], iteration: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return token ids [1, tokens] of prompts and random completions, and the masks [1, tokens - 1] of the latter."""
    generator = torch.Generator().manual_seed(200 + iteration)
    ids, masks = [], []
    for prompt, length in zip(prompts, work.completion_lengths(iteration), strict=True):
        completion = torch.randint(FIRST_WORD, work.config().vocab_size, (length,), generator=generator).tolist()
        if length < work.completion:
            completion[-1] = EOS
        ids.append(torch.tensor([prompt + completion]))
        masks.append(torch.tensor([[False] * (len(prompt) - 1) + [True] * length]))
    return ids, masks


def mark_update(agent: PPO, meter: Meter) -> None:
    """Let the update begin where the order of its rows is drawn, after scoring."""
    draw = agent._epoch_orders

    def orders(*args: Any, **kwargs: Any) -> Any:
        meter.enter("update")
        return draw(*args, **kwargs)

    agent._epoch_orders = orders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    Workload.add_options(parser)
    parser.add_argument("--adapter_layers", default="all", help="all, or top-k")
    given = parser.parse_args()
    work = Workload.from_options(given)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meter = Meter(work.device, uncounted="generate")
    meter.start()
    agent, prompts = make_agent(work, given.adapter_layers), work.prompts()
    mark_update(agent, meter)
    for iteration in range(work.iterations):
        meter.enter("generate")
        own = prompts[iteration * work.rollout :][: work.rollout]
        ids, masks = rollout_rows(work, own, iteration)
        rewards = torch.tensor([float(mask.sum() % 7) for mask in masks])
        meter.enter("score")
        agent.learn((ids, masks, rewards))
        meter.enter("between")
    trained = sum(p.numel() for p in agent.actor.parameters() if p.requires_grad)
    versions = {"agilerl": VERSION, "transformers": transformers.__version__, "torch": torch.__version__}
    found = {"implementation": f"agilerl {VERSION}", **meter.results(), "trained": trained}
    print(json.dumps(found | versions))


if __name__ == "__main__":
    main()
