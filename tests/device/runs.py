"""What runs on the pretended device: `found(folder, names)` in a process of its own, in which the device is installed.

Most runs are of PPO, each with its settings in `PPO`; half precision is on where a run does not say otherwise.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from onetrunk.judges.judge import Pair, Principle, Single
from onetrunk.judges.local import CausalJudge
from onetrunk.judges.template import question_messages
from onetrunk.models.build import train_tokenizer
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.trainer import PPOTrainer
from tests.checkpoints import crash_runs
from tests.device import simulated
from tests.fakes import CopyBackend
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.places import CPU, FORKED, found_by_ranks, join_group
from tests.ppo.support import StopAt, base_model, even_share, lora, make_config, make_trainer, prompts, sft_model
from tests.ppo.test_episodes_in_training import words_trainer
from tests.rollouts import pipeline_worker
from tests.tiny import tiny_model, tiny_tokenizer

SHAPE: dict[str, Any] = {
    "use_cpu": False, "num_minibatches": 2, "per_device_train_batch_size": 1, "max_completion_length": 4,
}  # fmt: skip
# A pack of every kind: states that are kept, no padding, a reference.
ALL_ROLES = {"adapter_layers": "top-1", "padding_free": True}
PPO: dict[str, dict[str, Any]] = {
    "defaults": {},
    "float32": {"bf16": False},
    "value pretraining": {"value_pretraining_rollouts": 1, "num_rollouts": 2},
    "top layer": {"adapter_layers": "top-1", "trunk_cache": "device"},
    "top layer, states on the CPU": {"adapter_layers": "top-1", "trunk_cache": "cpu"},
    "top layer, padding free": {"adapter_layers": "top-1", "padding_free": True, "microbatch_tokens": 40},
    "padding free": {"padding_free": True, "per_device_train_batch_size": 2},
    "loss": {"kl_in_loss": True, "kl_estimator": "k3", "entropy_coef": 0.01, "epsilon_high": 0.3, "dual_clip": 3.0},
    "rewards": {"whiten_rewards": True, "normalize_scores": True, "kl_target": 0.05, "score_clip": 1.0},
    "truncated": {"truncated_completions": "bootstrap", "length_adaptive_lam": 0.5},
    "masked": {"truncated_completions": "mask", "target_kl": 1e-4, "num_generations": 2},
    "drawn from a part": {"top_p": 0.8, "top_k": 20, "max_rollout_rows": 2, "temperature": 0.7},
    "checkpointing": {"activation_checkpointing": True, "activation_offloading": True},
    "lengths": {"lam_value": 1.0, "length_penalty": 0.1, "logging_steps": 4, "num_rollouts": 2},
    "saving": {"save_strategy": "steps", "save_steps": 2, "num_rollouts": 2},
}


def ppo(folder: Path, **settings: Any) -> PPOTrainer:
    """Return a trainer that has trained on the device."""
    trainer = make_trainer(folder, **{**SHAPE, **settings})
    trainer.train()
    return trainer


def resumed(folder: Path) -> None:
    settings = {"num_rollouts": 2, "adapter_layers": "top-1", "kl_target": 0.05, "normalize_scores": True}
    ppo(folder, callbacks=[StopAt(2)], **settings)
    trainer = make_trainer(folder, **{**SHAPE, **settings})
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


def evaluated(folder: Path) -> None:
    settings = {"eval_dataset": prompts(3), "eval_strategy": "steps", "eval_steps": 2, "log_completions": True}
    ppo(folder, **settings).final_evaluation()


def ahead(folder: Path, schedule: str) -> None:
    """The sampler has a trunk of its own, on the CPU as a server elsewhere would."""
    backend = CopyBackend(TrunkModel(base_model(), lora()))
    ppo(folder, rollout_backend=backend, schedule=schedule, num_rollouts=3, check_memory=False)


def episodes(folder: Path, **settings: Any) -> None:
    words_trainer(folder, **{**SHAPE, **settings}).train()


def reward_adapter(folder: Path, **settings: Any) -> None:
    base = str(saved_base(folder / "base", num_hidden_layers=2))
    adapter = str(saved_reward_adapter(folder / "judge", base, layers=[1], tokenizer=tiny_tokenizer()))
    trainer = PPOTrainer(base, adapter, make_config(folder, **{**SHAPE, **settings}), prompts(6), peft_config=lora())
    trainer.train()


def reward_model(folder: Path) -> None:
    crash_runs.scorer().save_pretrained(folder / "scorer")
    tiny_tokenizer().save_pretrained(folder / "scorer")
    ppo(folder, reward=[str(folder / "scorer"), even_share])


def trained(kind: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        trainer = crash_runs.KINDS[kind](folder, use_cpu=False, num_train_epochs=1, bf16=True)
        trainer.train()
        if trainer.eval_dataset is not None:
            trainer.evaluate()

    return run


class Careless(PPOTrainer):
    """Multiplies the loss by a tensor that was made without a device."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs)
        return (loss * torch.ones(inputs["experience"].pack.num_rows + 1)).mean()


def judged(folder: Path) -> None:
    principle = Principle("Which completion is kinder?")
    pairs = [Pair("Say hello.", "Hello!", "What."), Pair("p", "a", "b")]
    (message,) = question_messages(pairs[0], principle, "c0ffee")
    tokenizer = train_tokenizer([message["content"]] * 2, 400, ("<system>", "<user>", "<assistant>"))
    model = tiny_model("llama", vocab_size=512, max_position_embeddings=2048).to(simulated.SIM)
    judge = CausalJudge(model, tokenizer, name="tiny", min_label_mass=0.0)
    judge.compare(pairs, principle)
    judge.rate([Single("Say hello.", "Hello!")], principle)


def _stage(rank: int, folder: str) -> dict[str, Any]:
    simulated.install()
    join_group(CPU, folder, rank, world_size=2)
    return pipeline_worker.compare("lora, seeded", simulated.SIM)


def pipelined(folder: Path) -> None:
    """Two processes, each with a device and half of the layers."""
    for stage in found_by_ranks(_stage, folder, 2):
        assert stage["same_tokens"] and stage["logprob_gap"] < 5e-5, stage


def measured(folder: Path, **settings: Any) -> None:
    """Train on 3 rollouts of 16 rows, 12 steps of two packs or more; only the training counts."""
    shape = {"num_rollouts": 3, "rollout_batch_size": 16, "num_ppo_epochs": 2, "num_minibatches": 2}
    settings = {"use_cpu": False, "per_device_train_batch_size": 4, **shape, **settings}
    trainer = make_trainer(folder, dataset=prompts(16), **settings)
    simulated.WAITS.clear()
    trainer.train()


RUNS: dict[str, Callable[[Path], Any]] = {
    **{name: (lambda folder, s=settings: ppo(folder, **s)) for name, settings in PPO.items()},
    "continued adapter": lambda folder: ppo(folder, model=sft_model()),
    "gpt2": lambda folder: ppo(folder, model="gpt2"),
    "gemma2": lambda folder: ppo(folder, model="gemma2"),
    "qwen3": lambda folder: ppo(folder, model="qwen3", padding_free=True),
    "resumed": resumed,
    "evaluation": evaluated,
    "one step ahead": lambda folder: ahead(folder, "one_step"),
    "async": lambda folder: ahead(folder, "async"),
    "pipelined": pipelined,
    "episodes": episodes,
    "turns": lambda folder: episodes(folder, gae_unit="turn", ratio_unit="turn"),
    "reward adapter": reward_adapter,
    "reward adapter, top layer": lambda folder: reward_adapter(folder, adapter_layers="top-1"),
    "reward model": reward_model,
    "sft": trained("sft"),
    "reward training": trained("reward"),
    "distillation": trained("distill"),
    "causal judge": judged,
    "measured": measured,
    "small packs": lambda folder: measured(folder, num_rollouts=1, per_device_train_batch_size=1, **ALL_ROLES),
    "large packs": lambda folder: measured(folder, num_rollouts=1, per_device_train_batch_size=8, **ALL_ROLES),
    "careless": lambda folder: ppo(folder, trainer_class=Careless),
}


def _report(folder: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    simulated.install()
    outcomes = {}
    with open(Path(folder) / "log.txt", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        for number, name in enumerate(names):
            place = Path(folder) / str(number)
            place.mkdir()
            simulated.WAITS.clear()
            error = None
            try:
                RUNS[name](place)
            except Exception:
                error = traceback.format_exc(limit=-6)
            outcomes[name] = {"error": error, "waits": dict(simulated.WAITS)}
    (Path(folder) / "outcomes.json").write_text(json.dumps(outcomes))


def found(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what became of the runs, which one process makes, one after the other: `error` and `waits`."""
    process = FORKED.Process(target=_report, args=(str(folder), list(names)))
    process.start()
    process.join()
    path = folder / "outcomes.json"
    assert path.exists(), f"exit code {process.exitcode}: {(folder / 'log.txt').read_text()[-3000:]}"
    return json.loads(path.read_text())
