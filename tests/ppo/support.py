"""A tiny PPO run for the tests of the trainer: a model of two layers, word prompts, a reward that can be learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import TrainerCallback

from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.utils.versions import RENAMED
from tests.tiny import FAMILIES, WORDS, tiny_model, tiny_tokenizer

EOS = 1
# Weights are linear in the gradient, so that no sign of a rounding error decides.
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
WALL_CLOCK = ("time/", "throughput/", "memory/", "rank/", "train_", "eval_runtime", "eval_samples_", "eval_steps_per")
# Loads the best of the checkpoints, of which there is one after every step.
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
BEST |= {"save_strategy": "steps", "save_steps": 1}
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "rollout_batch_size": 4,
    "num_rollouts": 1,
    "max_completion_length": 6,
    "per_device_train_batch_size": 2,
    "num_ppo_epochs": 1,
    "learning_rate": 1e-2,
    "lam": 0.95,
    "seed": 3,
}


def prompts(count: int = 8, **columns: Any) -> Dataset:
    """Return `count` different prompts of 2 to 5 words."""
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(2 + i % 4)) for i in range(count)]
    return Dataset.from_dict({"prompt": texts, **columns})


def even_share(prompts: list, completions: list, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Score the share of even token ids."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def base_model(family: str = "llama", **overrides: Any) -> Any:
    return tiny_model(family, num_hidden_layers=2, **overrides)


def sft_model(family: str = "llama", seed: int = 0) -> PeftModel:
    """Return a model with an adapter that says something else than its base, as after SFT."""
    model = get_peft_model(base_model(family), lora())
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def make_config(output_dir: str | Path, **settings: Any) -> PPOConfig:
    merged = {**SETTINGS, **settings}
    if "num_train_epochs" in settings or "max_steps" in settings:
        merged.pop("num_rollouts")
    return PPOConfig(output_dir=str(output_dir), **{RENAMED.get(name, name): value for name, value in merged.items()})


def make_trainer(
    output_dir: str | Path,
    *,
    model: Any = "llama",
    reward: Any = even_share,
    dataset: Any = ...,
    eval_dataset: Any = None,
    trainer_class: Callable[..., PPOTrainer] = PPOTrainer,
    callbacks: Sequence[TrainerCallback] = (),
    rollout_backend: Any = None,
    tokenizer: Any = ...,
    peft_config: Any = ...,
    **settings: Any,
) -> PPOTrainer:
    """Return a trainer; `settings` are those of PPOConfig.

    Args:
        model: a family's name, a model, or a folder.
        dataset, tokenizer, peft_config: eight prompts, and what fits the model, where they are left out.
        trainer_class: may be a partial with further arguments of PPOTrainer.
        rollout_backend: a backend, or the setting of that name.
    """
    if isinstance(rollout_backend, str):
        settings["rollout_backend"], rollout_backend = rollout_backend, None
    if peft_config is ...:
        peft_config = None if isinstance(model, PeftModel) else lora()
    return trainer_class(
        base_model(model) if isinstance(model, str) and model in FAMILIES else model,
        reward,
        make_config(output_dir, **settings),
        prompts() if dataset is ... else dataset,
        eval_dataset,
        tiny_tokenizer() if tokenizer is ... else tokenizer,
        callbacks=list(callbacks),
        peft_config=peft_config,
        rollout_backend=rollout_backend,
    )


def trained(output_dir: str | Path, **kwargs: Any) -> PPOTrainer:
    """Return a trainer that has been trained."""
    trainer = make_trainer(output_dir, **kwargs)
    trainer.train()
    return trainer


def trained_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters that train."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def require_refusal(trainer: PPOTrainer, error: type[Exception], match: str) -> None:
    """Require that training ends in an error before the weights change."""
    before = trained_weights(trainer.model)
    with pytest.raises(error, match=match):
        trainer.train()
    assert_same(trained_weights(trainer.model), before)


def logged(trainer: PPOTrainer, name: str) -> list[float]:
    """Return the values of a metric in the order that they were logged."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def without_wall_clock(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the log without times, speeds and memory; the summary at the end is one of those."""
    kept = [{k: v for k, v in entry.items() if not k.startswith(WALL_CLOCK)} for entry in history]
    return [entry for entry in kept if not set(entry) <= {"epoch", "step", "total_flos"}]


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0, rtol: float = 0.0) -> None:
    """Compare tensors by name; bitwise where no tolerance is given."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def differ(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors that are not bitwise equal."""
    return {name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)}


class Recorder(TrainerCallback):
    """Keeps the weights before training, and gradients (after clipping) and weights of every step."""

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.first = trained_weights(model)

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.gradients.append(grads)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.weights.append(trained_weights(model))


class StopAt(TrainerCallback):
    """Saves a checkpoint after a step and stops, as a run that is interrupted."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_save = True
            control.should_training_stop = True


def whole_and_resumed(make: Callable[[str], PPOTrainer], step: int) -> tuple[PPOTrainer, PPOTrainer]:
    """Train a run to its end, and one that stops after a step and is resumed; require the same weights, bit by bit.

    Args:
        make: name of a folder -> a new trainer of the run.
    """
    whole, stopped = make("whole"), make("stopped")
    whole.train()
    stopped.add_callback(StopAt(step))
    stopped.train()
    resumed = make("stopped")
    resumed.train(resume_from_checkpoint=f"{stopped.args.output_dir}/checkpoint-{step}")
    assert_same(trained_weights(resumed.model), trained_weights(whole.model))
    return whole, resumed
