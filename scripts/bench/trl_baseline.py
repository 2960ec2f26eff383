"""One process of TRL 1.12.0's PPOTrainer on the workload: LoRA policy, full value model, full reward model.

    python trl_baseline.py --shape base --mixed

It prints one JSON line. It needs an environment of its own (trl_baseline.txt): TRL dropped this trainer later.
"""

from __future__ import annotations

import os

os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import argparse
import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers
import trl
import trl.experimental.ppo.ppo_trainer as ppo
from datasets import Dataset
from peft import LoraConfig
from transformers import LogitsProcessorList
from workload import LORA, ForceLength, Meter, Workload


def ppo_config(work: Workload, folder: str) -> ppo.PPOConfig:
    """Return TRL's settings: one optimizer step per epoch over the whole rollout, as ours."""
    return ppo.PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work.microbatch,
        gradient_accumulation_steps=work.rollout // work.microbatch,
        num_mini_batches=1,
        num_ppo_epochs=work.epochs,
        response_length=work.completion,
        total_episodes=work.rollout * work.iterations,
        temperature=1.0,
        stop_token="eos",
        missing_eos_penalty=None,
        kl_coef=0.05,
        bf16=work.dtype == "bfloat16",
        use_cpu=work.device == "cpu",
        report_to="none",
        num_sample_generations=0,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )


def wrap(owner: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Replace a function by one that calls `before` and `after` around it."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        result = original(*args, **kwargs)
        after()
        return result

    setattr(owner, name, wrapped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    Workload.add_options(parser)
    work = Workload.from_options(parser.parse_args())
    torch.set_num_threads(1)
    meter = Meter(work.device)
    meter.start()
    policy, value, reward = work.policy(), work.scalar_model(), work.scalar_model(work.small_reward)
    prompts = work.prompts()
    data = Dataset.from_dict({"input_ids": prompts, "attention_mask": [[1] * len(ids) for ids in prompts]})
    generate = policy.generate

    def forced(*args: Any, **kwargs: Any) -> Any:
        lengths = work.completion_lengths(len(meter.iterations) - 1)
        return generate(*args, logits_processor=LogitsProcessorList([ForceLength(lengths, work.completion)]), **kwargs)

    policy.generate = forced
    wrap(ppo, "batch_generation", lambda: meter.enter("generate"), lambda: meter.enter("score"))
    # The first forward with a gradient begins the update.
    wrap(ppo, "forward", lambda: torch.is_grad_enabled() and meter.enter("update"), lambda: None)
    with tempfile.TemporaryDirectory() as folder:
        config, tokenizer = ppo_config(work, folder), work.tokenizer()
        lora = LoraConfig(**LORA)
        trainer = ppo.PPOTrainer(config, tokenizer, policy, None, reward, data, value, peft_config=lora)
        trainer.log = lambda *args, **kwargs: meter.enter("between")
        trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"implementation": f"trl {trl.__version__}", **meter.results(), "trained": trained} | versions))


if __name__ == "__main__":
    main()
