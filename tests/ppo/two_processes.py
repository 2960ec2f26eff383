"""What the processes of test_two_processes run: `python two_processes.py FOLDER [CASE ...]`, alone or launched.

Every case is trained and written down as tensors and JSON, so that one launch serves all comparisons. It runs on CPUs
if ACCELERATE_USE_CPU is true, otherwise on GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from onetrunk.parallel.sharding import local_bytes
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.utils.startup import freeze_loaded
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.ppo import support
from tests.ppo.support import SGD, StopAt, logged, make_trainer, trained_weights, without_wall_clock

SHAPE = {"num_rollouts": 2, "num_ppo_epochs": 2, "rollout_batch_size": 8, "lr_scheduler_type": "constant"}
# On GPUs in float32 too: two processes are compared with one.
PLACE = {} if os.environ.get("ACCELERATE_USE_CPU") == "true" else {"use_cpu": False, "bf16": False}
KEPT = {"adapter_layers": "top-1", "trunk_cache": "cpu"}
PACKED = {"padding_free": True, "microbatch_tokens": 23, "per_device_train_batch_size": 8}
PACKED["activation_checkpointing"] = True
CASES = {
    "shared": {},
    "pretrained": {"value_pretraining_rollouts": 1, "kl_target": 0.1, "normalize_scores": True},
    "kept": KEPT,
    "judged": KEPT,
    "packed": {**KEPT, **PACKED},
    "stopped": {"target_kl": 1e-9, "num_ppo_epochs": 3},
    "dealt": {"num_minibatches": 4, "per_device_train_batch_size": 8, "value_pretraining_rollouts": 1},
}

RESUMED = {**SHAPE, **PLACE, "num_minibatches": 2}


def judge_folder(folder: Path) -> Path:
    """Return where this process has its copy of a base and of a reward adapter on it."""
    return folder / f"judge-of-{os.environ.get('RANK', '0')}"


class Modes(PPOTrainer):
    """Keeps in which mode the model is in every forward of the update: layers recompute in training mode alone."""

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.modes.add(self.model.training)
        return super().compute_loss(model, *args, **kwargs)


def run(name: str, folder: Path) -> None:
    seen: list[tuple[str, list[int]]] = []

    def keeping(prompts, completions, completion_ids, log_metric, **kwargs):
        if trainer.is_in_train:
            seen.extend(zip(prompts, completion_ids, strict=True))
        log_metric("mine/rows", len(prompts))
        return support.even_share(prompts, completions, completion_ids)

    parts = {"reward": keeping}
    if name == "judged":
        # A reward adapter on the trunk beside the function.
        place = judge_folder(folder)
        base = AutoModelForCausalLM.from_pretrained(place / "base")
        parts = {"reward": [keeping, str(place / "judge")], "model": base}
    if name == "continued":
        torch.manual_seed(0)  # The adapter's start is random, and must be the same on every process.
        parts["model"] = support.sft_model()
    settings = {**SHAPE, **SGD, **PLACE, **CASES[name]}
    trainer = make_trainer(folder / "out" / name, trainer_class=Modes, **parts, **settings)
    trainer.modes = set()
    before = trained_weights(trainer.model)
    trainer.train()
    metrics = trainer.evaluate(support.prompts(3))
    state = trainer.accelerator.state
    rank = state.process_index
    facts = {
        "world_size": state.num_processes,
        "distributed_type": state.distributed_type.value,
        "device": trainer.accelerator.device.type,
        "is_wrapped": type(trainer.model_wrapped).__name__,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "kinds": sorted(
            {(type(p).__name__, p.requires_grad) for n, p in trainer.model.named_parameters() if "value_head" not in n}
        ),
        "local_bytes": local_bytes(trainer.model),
        "kept_bytes": sum(
            p.nbytes for n, p in trainer.model.named_parameters() if p.requires_grad or "value_head" in n
        ),
        "modes": sorted(trainer.modes),
        "completions": seen,
        "history": without_wall_clock(trainer.state.log_history),
        "mine": logged(trainer, "mine/rows"),
        "ranks": sorted({k for entry in trainer.state.log_history for k in entry if k.startswith("rank/")}),
        "evaluation": {k: v for k, v in metrics.items() if k != "eval_runtime"},
        "beta": trainer._stream.kl_controller.value,
        "moments": trainer._stream.score_moments.state_dict(),
    }
    (folder / f"{name}-{rank}.json").write_text(json.dumps(facts))
    save_file(trained_weights(trainer.model), folder / f"{name}-{rank}.safetensors")
    save_file(before, folder / f"{name}-{rank}-before.safetensors")


def resume(folder: Path, **settings: Any) -> PPOTrainer:
    """Keep the weights of a whole run, and of one that stops in the middle of the second rollout and is resumed."""
    whole = make_trainer(folder / "whole", **{**RESUMED, **settings})
    whole.train()
    make_trainer(folder / "stopped", callbacks=[StopAt(6)], **{**RESUMED, **settings}).train()
    save_file(trained_weights(whole.model), folder / f"whole-{whole.accelerator.process_index}.safetensors")
    return go_on(folder, folder / "stopped", **settings)


def go_on(folder: Path, stopped: Path, **settings: Any) -> PPOTrainer:
    """Resume a stopped run in a new trainer, in this layout or in another one, and keep weights and log."""
    resumed = make_trainer(folder / "resumed", **{**RESUMED, **settings})
    resumed.accelerator.wait_for_everyone()
    resumed.train(resume_from_checkpoint=str(stopped / "checkpoint-6"))
    rank = resumed.accelerator.process_index
    save_file(trained_weights(resumed.model), folder / f"resumed-{rank}.safetensors")
    (folder / f"resumed-{rank}.json").write_text(json.dumps(without_wall_clock(resumed.state.log_history)))
    return resumed


def main(folder: Path, names: list[str]) -> None:
    # Once there is a process group, transformers saves models on the first process alone.
    place = judge_folder(folder)
    saved_reward_adapter(place / "judge", saved_base(place / "base", num_hidden_layers=2), layers=[1])
    for name in names or [*CASES, "resumed"]:
        if name == "resumed":
            resume(folder).accelerator.end_training()
        else:
            run(name, folder)


if __name__ == "__main__":
    freeze_loaded()
    main(Path(sys.argv[1]), sys.argv[2:])
