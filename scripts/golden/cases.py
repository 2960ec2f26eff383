"""The cases: commands with few and lasting options. Paths are seen from the folder of the case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """Runs of one command.

    Args:
        verb: the stage.
        settings: its config file, without those that are None; empty for a verb that takes words only.
        runs: further words of each run, one after the other.
        codes: expected exit codes; empty: 0 each.
        layout: a file of accelerate_configs, under which two processes run it; empty: one process.
        sampler: "server" runs a fake vLLM server next to it, "colocated" puts a fake engine into its process.
        dies_at: the call of the reward function in which the first run is killed.
    """

    verb: str
    settings: dict[str, Any] = field(default_factory=dict)
    runs: tuple[str, ...] = ("",)
    codes: tuple[int, ...] = ()
    layout: str = ""
    sampler: str = ""
    dies_at: int = 0

    @property
    def tolerance(self) -> float:
        """The largest difference, relative where numbers are above 1: one process repeats every bit."""
        return 1e-6 if self.layout else 0.0


REWARD = "inputs/rewards.py:short_words"
RUBRIC = {"judge": ["rubric"], "constitution": "inputs/constitution.yaml", "rubric": {"short": REWARD}}
COMMON = {"model_name_or_path": "inputs/base", "output_dir": "out", "seed": 3}
TRAIN = COMMON | {
    "report_to": "none",
    "disable_tqdm": True,
    "dtype": "float32",
    "use_peft": True,
    "lora_r": 4,
    "lora_alpha": 8,
    "learning_rate": 0.01,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 3,
}
# Three rollouts, and two steps on each: the second one is off the policy that sampled.
PPO = TRAIN | {
    "dataset_name": "inputs/prompts.jsonl",
    "reward_funcs": [REWARD],
    "rollout_batch_size": 8,
    "num_rollouts": 3,
    "num_ppo_epochs": 2,
    "lam": 0.95,
    "max_completion_length": 8,
    "save_steps": 6,
}
TEXTS = TRAIN | {"dataset_name": "inputs/texts.jsonl", "max_steps": 3}
PAIRS = TRAIN | {"dataset_name": "inputs/pairs.jsonl", "max_steps": 3}
ALONE = {"use_cpu": True}
# Weights are linear in the gradient: no sign of a rounding error decides.
TOGETHER = {"optim": "sgd", "learning_rate": 0.1}
STAGES = {"pipeline_training": True, "pipeline_stages": 2}
SERVED = ALONE | {"use_vllm": True, "max_completion_length": 6}
STUDENT = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
STUDENT |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
EVALUATED = {"eval_dataset_name": "inputs/held-out.jsonl", "eval_strategy": "steps", "eval_steps": 3}


def ppo(layout: str = "", sampler: str = "", **settings: Any) -> Case:
    """Return a case of PPO."""
    own = SERVED if sampler else TOGETHER if layout else ALONE
    return Case("ppo", PPO | own | settings, layout=layout, sampler=sampler)


CASES = {
    "ppo-top-layer": ppo(adapter_layers="top-1", num_minibatches=2, reward_funcs=[REWARD, "inputs/reward-model"]),
    "ppo-continued": ppo(
        model_name_or_path="inputs/sft-adapter",
        use_peft=None,
        lora_r=None,
        lora_alpha=None,
        reward_funcs=[REWARD, "inputs/reward-adapter"],
        num_generations=2,
        normalize_scores=True,
        missing_eos_penalty=0.5,
        **EVALUATED,
    ),
    "ppo-padding-free": ppo(padding_free=True, temperature=0.8, top_p=0.9),
    "ppo-server": ppo(sampler="server"),
    "ppo-one-step": ppo(sampler="server", schedule="one_step"),
    "ppo-async": ppo(sampler="server", schedule="async", max_staleness=2, num_rollouts=4, save_steps=8),
    "ppo-colocated": ppo(sampler="colocated", vllm_mode="colocate"),
    "ppo-ddp": ppo("ddp", adapter_layers="top-1"),
    "ppo-fsdp2": ppo("fsdp2", reward_funcs=[REWARD, "inputs/reward-adapter"]),
    "ppo-tensor": ppo("tensor_parallel"),
    "ppo-pipelined": ppo("pipelined", rollout_backend="pipelined", reward_funcs=[REWARD, "inputs/reward-model"]),
    "ppo-stages": ppo("pipelined", rollout_backend="pipelined", **STAGES),
    "ppo-resumed": Case(
        "ppo",
        PPO | ALONE | {"num_rollouts": 6, "num_ppo_epochs": 1, "save_steps": 3},
        runs=("", "--resume auto"),
        codes=(-9, 0),
        dies_at=5,
    ),
    "sft": Case("sft", TEXTS | ALONE),
    "sft-whole": Case("sft", TEXTS | ALONE | {"use_peft": False}),
    "sft-tensor": Case("sft", TEXTS | TOGETHER, layout="tensor_parallel"),
    "reward": Case("reward", PAIRS | ALONE | {"eval_size": 4}),
    "distill": Case(
        "distill",
        PAIRS | ALONE | {"model_name_or_path": None, "use_peft": None, "teacher": "inputs/reward-model"}
        | {"student_config": STUDENT, "student_tokenizer": "inputs/base"},
    ),
    "prefs": Case(
        "prefs",
        COMMON | ALONE | RUBRIC
        | {"dataset_name": "inputs/prompts.jsonl", "num_generations": 3, "pairing": "all", "max_completion_length": 8},
    ),
    "eval": Case(
        "eval",
        COMMON | ALONE | RUBRIC
        | {
            "model_name_or_path": "inputs/sft-adapter",
            "dataset_name": "inputs/prompts.jsonl",
            "reward_funcs": [REWARD],
            "max_completion_length": 8,
        },
    ),
    "plan": Case(
        "plan",
        runs=(
            "--model Qwen/Qwen2.5-7B --hardware 8xH100-80GB --json",
            "--model Qwen/Qwen2.5-32B --hardware 2xRTX4090 --nodes 4 --json",
            "--model Qwen/Qwen2.5-7B --hardware 8xH100-80GB+4xL40S --json",
        ),
    ),
}  # fmt: skip
