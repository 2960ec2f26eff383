"""Wall-clock seconds of runs that sample ahead of the update, against runs in turn. EMULATED: the phases sleep.

    python scripts/bench/schedules.py

Sampling and update take `--phase_s` each, as if a server sampled on a machine of its own. `one_step` is compared with
`sync`. It prints one JSON line: seconds of both, their ratio, and the ratio that is possible.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn
from workload import LORA, Workload

from onetrunk import PPOConfig, PPOTrainer
from onetrunk.types import Rollout

ROWS, STEPS = 8, 2
WORK = Workload(shape="tiny", prompt=4, rollout=ROWS)


class SleepingServer:
    """Says the same to every prompt; a call takes `seconds`."""

    def __init__(self, seconds: float):
        self.seconds, self.version = seconds, 0

    def sync(self, model: nn.Module, version: int) -> None:
        self.version = version

    def generate(self, prompt_ids: Sequence[list[int]], params: Any, keys: Sequence[tuple[int, ...]]) -> Rollout:
        return self.generate_as("policy", self.version, prompt_ids, params, keys)

    def generate_as(
        self, role: str, version: int, prompt_ids: Sequence[list[int]], params: Any, keys: Sequence[tuple[int, ...]]
    ) -> Rollout:
        """Sleep, then return one completion per prompt."""
        time.sleep(self.seconds)
        completion = list(range(10, 14))
        logprobs = [torch.zeros(len(completion)) for _ in prompt_ids]
        return Rollout(
            list(prompt_ids), [completion for _ in prompt_ids], logprobs, [False] * len(prompt_ids), version
        )


class SleepingUpdate(PPOTrainer):
    """Takes `seconds` longer for the STEPS optimizer steps of a rollout."""

    seconds = 0.0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Sleep, then do the step."""
        time.sleep(self.seconds / STEPS)
        return super().training_step(*args, **kwargs)


def seconds_of(given: argparse.Namespace, **settings: Any) -> float:
    """Return the wall-clock seconds of a run, without its set-up."""

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    tokenizer = WORK.tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        args = PPOConfig(
            output_dir=folder,
            rollout_batch_size=ROWS,
            num_rollouts=given.rollouts,
            num_ppo_epochs=1,
            num_minibatches=STEPS,
            max_completion_length=8,
            # What the server says is not the policy's.
            alarm_limits={"logprob_gap": None},
            use_cpu=True,
            bf16=False,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        trainer = SleepingUpdate(
            model=WORK.policy(),
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [tokenizer.decode(ids) for ids in WORK.prompts()]}),
            processing_class=tokenizer,
            peft_config=LoraConfig(**LORA),
            rollout_backend=SleepingServer(given.phase_s),
        )
        trainer.seconds = given.phase_s
        began = time.perf_counter()
        trainer.train()
        return time.perf_counter() - began


def sampling_ahead(given: argparse.Namespace) -> dict[str, float]:
    """Compare `one_step` with `sync`: n rollouts take (n + 1) phases against 2 n."""
    seconds = {schedule: seconds_of(given, schedule=schedule) for schedule in ("sync", "one_step")}
    bound = 2 * given.rollouts / (given.rollouts + 1)
    return {**seconds, "ratio": seconds["sync"] / seconds["one_step"], "possible": bound}


def main() -> None:
    """Measure what the options name and print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--phase_s", type=float, default=4.0, help="seconds of sampling a rollout, and of its update")
    parser.add_argument("--rollouts", type=int, default=20)
    given = parser.parse_args()
    if not (0 < given.phase_s < math.inf and given.rollouts >= 1):
        parser.error(
            f"--phase_s is {given.phase_s} and --rollouts is {given.rollouts}; give seconds above 0 and at least 1"
            " rollout"
        )
    print(json.dumps({name: round(value, 3) for name, value in sampling_ahead(given).items()}))


if __name__ == "__main__":
    main()
