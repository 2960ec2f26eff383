"""Runs that are killed: what a process started by `killing` does. Imported by a fork server, so that a run costs no
start of Python.

A run trains one of KINDS to its end, going on from what lies in its folder, and writes `digest.json`: sha256 over
everything that a resumed run has to have in common with one that was never killed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from transformers import BitsAndBytesConfig, PreTrainedModel, TrainerCallback

from onetrunk import cli
from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems
from onetrunk.checkpoints.trl_trainers import ResumableSFTTrainer
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.hacking_monitor import HackingMonitor
from onetrunk.judges.judge import Principle
from onetrunk.models.build import scorer_from_config
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.reward_models.distill import RewardDistillationConfig, RewardDistillationTrainer
from onetrunk.reward_models.training import RewardModelConfig, RewardModelTrainer
from onetrunk.stages.arguments import SFTArguments
from onetrunk.utils.files import held_folder
from tests.judges.fakes import ToldJudge
from tests.ppo.support import lora, make_config, make_trainer, prompts, without_wall_clock
from tests.servers.stub import wait_until
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

torch.set_num_threads(1)
disable_progress_bars()

# 10 rows in batches of 2: 5 a pass, of which two make a step; logged every third step, saved every second.
PLAIN: dict[str, Any] = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "steps", "save_steps": 2,
    "logging_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3,
    "learning_rate": 1e-2, "seed": 3, "save_total_limit": 2, "bf16": False, "max_length": 32,
}  # fmt: skip
# 6 prompts in rollouts of 4, 4 steps a rollout, 12 in all.
SHAPE = {"num_rollouts": 3, "num_ppo_epochs": 2, "num_minibatches": 2, "per_device_train_batch_size": 1}
PPO = {**SHAPE, "logging_steps": 3, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}


def words(i: int, count: int) -> str:
    return " ".join(WORDS[(i * 3 + j) % len(WORDS)] for j in range(count))


def pairs(count: int = 10) -> Dataset:
    rows = [{"prompt": words(i, 3), "chosen": " " + words(i + 1, 4), "rejected": " " + words(i + 2, 3),
             "probability": 0.6 + 0.03 * i} for i in range(count)]  # fmt: skip
    return Dataset.from_list(rows)


def drawing(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Score by length and by numbers drawn from the global generators, as reward functions of users do."""
    return [len(ids) / 6 + random.random() + float(np.random.rand()) + torch.rand(()).item() for ids in completion_ids]


def sft(folder: Path, **settings: Any) -> Any:
    torch.manual_seed(0)
    rows = Dataset.from_list([{"prompt": words(i, 3), "completion": " " + words(i + 2, 4)} for i in range(10)])
    args = SFTArguments(output_dir=str(folder), **{**PLAIN, **settings})
    model = tiny_model("llama", num_hidden_layers=2)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.3, target_modules="all-linear", task_type="CAUSAL_LM")
    parts = {"processing_class": tiny_tokenizer(), "peft_config": config}
    return ResumableSFTTrainer(model=model, args=args, train_dataset=rows, **parts)


def scorer() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return scorer_from_config({"model_type": "llama", "num_key_value_heads": 2, **sizes}, tiny_tokenizer())


def reward(folder: Path, **settings: Any) -> Any:
    args = RewardModelConfig(output_dir=str(folder), **{**PLAIN, **settings})
    return RewardModelTrainer(scorer(), args, pairs(), None, tiny_tokenizer())


def distill(folder: Path, **settings: Any) -> Any:
    rows = pairs().map(lambda row, i: {"chosen_score": 0.1 * i, "rejected_score": -0.05 * i}, with_indices=True)
    args = RewardDistillationConfig(output_dir=str(folder), **{**PLAIN, **settings})
    return RewardDistillationTrainer(scorer(), args, rows, None, tiny_tokenizer())


def ppo(folder: Path, **settings: Any) -> Any:
    return make_trainer(folder, dataset=prompts(6), reward=drawing, **{**PPO, **settings})


def ppo_nf4(folder: Path, **settings: Any) -> PPOTrainer:
    """Train on a base in 4 bit."""
    base = Path(mkdtemp()) / "base"
    tiny_model("llama", num_hidden_layers=2, hidden_size=64).save_pretrained(base)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    parts = {"processing_class": tiny_tokenizer(), "peft_config": lora(), "quantization_config": config}
    return PPOTrainer(str(base), drawing, make_config(folder, **{**PPO, **settings}), prompts(6), **parts)


def ppo_monitor(folder: Path, **settings: Any) -> Any:
    """Evaluate and measure; the monitor's best step is not the last."""
    settings = {"eval_strategy": "steps", "eval_steps": 4, "eval_dataset": prompts(4), **settings}
    trainer = ppo(folder, **settings)
    constitution = Constitution("brief", (Principle("Is the reply brief?", tags=("brief",)),))
    trainer.monitor = HackingMonitor(
        ToldJudge(lambda item, principle: 1 / (1 + len(item.text))), constitution, window=2
    )
    trainer.monitor.attach(trainer)
    return trainer


KINDS: dict[str, Callable[..., Any]] = {
    "ppo": ppo,
    "ppo_adaptive": lambda folder, **s: ppo(
        folder, kl_target=0.05, kl_horizon=40, normalize_scores=True, num_generations=2, value_learning_rate=3e-2, **s
    ),
    "sft_lengths": lambda folder, **s: sft(folder, train_sampling_strategy="group_by_length", **s),
    "ppo_cut": lambda folder, **s: ppo(folder, adapter_layers="top-1", trunk_cache="cpu", **s),
    "ppo_in_loss": lambda folder, **s: ppo(
        folder, kl_in_loss=True, kl_estimator="k3", target_kl=0.02, value_pretraining_rollouts=1, **s
    ),
    # An alarm that begins with the second rollout and lasts; one that ends the run with the third of five.
    "ppo_alarm": lambda folder, **s: ppo(
        folder, alarm_limits={"entropy": 10.0, "length_collapse": 1.0}, alarm_patience=2, **{"num_rollouts": 5, **s}
    ),
    "ppo_stopped": lambda folder, **s: ppo(
        folder, alarm_limits={"entropy": 10.0}, stop_on_alarm=["entropy"], **{"num_rollouts": 5, **s}
    ),
    # The first of the evaluations is the best one: the checkpoint that is loaded at the end is not the last.
    "ppo_best": lambda folder, **s: ppo(
        folder,
        **{"eval_strategy": "steps", "load_best_model_at_end": True, "metric_for_best_model": "score/mean"},
        **{"greater_is_better": True, "eval_steps": 3, "eval_dataset": prompts(4), **s},
    ),
    "ppo_monitor": ppo_monitor,
    "ppo_nf4": ppo_nf4,
    "sft": sft,
    "reward": reward,
    "distill": distill,
}


def digest(trainer: Any) -> dict[str, str]:
    """Return sha256 by part of what a run has become; a run that had nothing left to train has loaded less."""
    parts: dict[str, Any] = {
        "weights": {n: p for n, p in trainer.model.named_parameters() if p.requires_grad},
        "metrics": without_wall_clock(trainer.state.log_history),
        "step": [trainer.state.global_step, trainer.state.epoch],
        "ended": trainer.ended,
        "best": [trainer.state.best_global_step, trainer.state.best_metric],
    }
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, HackingMonitor):
            parts["monitor"] = callback.summary()
    if trainer.optimizer is not None:
        state = trainer.optimizer.state_dict()
        parts |= {
            "optimizer": [[i, sorted(own.items())] for i, own in state["state"].items()],
            "groups": state["param_groups"],
            "scheduler": trainer.lr_scheduler.state_dict(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1],
            "torch": torch.random.get_rng_state(),
        }
    if hasattr(trainer, "_stream"):
        stream = trainer._stream
        parts["kl"] = stream.kl_controller.state_dict()
        parts["scores"] = stream.score_moments.state_dict()
        parts["place"] = repr(stream.state)
        if trainer.optimizer is not None:
            parts["alarms"] = trainer.alarms.state_dict()
    return {name: hashlib.sha256(_text(part)).hexdigest() for name, part in parts.items()}


def _text(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return b"".join(_text(key) + _text(value[key]) for key in sorted(value, key=str))
    if isinstance(value, (list, tuple)):
        return b"".join(_text(part) for part in value)
    return repr(value).encode()


def finish(kind: str, folder: Path, resume: str | None = "auto", **settings: Any) -> None:
    """Train to the end, from what lies in the folder, save, and write down what came of it."""
    trainer = KINDS[kind](folder, **settings)
    trainer.train(resume_from_checkpoint=resume)
    found = digest(trainer)
    trainer.save_model()
    if trainer.eval_dataset is not None:
        final = trainer.final_evaluation() if hasattr(trainer, "final_evaluation") else trainer.evaluate()
        said = {name: value for name, value in final.items() if "_per_" not in name and "time" not in name}
        found["evaluation"] = hashlib.sha256(_text(said)).hexdigest()
    (folder / "digest.json").write_text(json.dumps(found))


class FileEvents:
    """Counts what a run does to files in its folder (opening for writing, fsync, rename, unlink, mkdir, rmdir), and
    kills the process before event number `fatal`; an fsync that is not reached leaves half of its file.

    Args:
        folder: of the run.
        fatal: number of the event, from 1; 0: only count.
    """

    def __init__(self, folder: Path, fatal: int = 0):
        self.folder = str(folder)
        self.fatal = fatal
        self.seen: list[str] = []
        self.is_on = False
        self._fsync = os.fsync
        os.fsync = self.fsync
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR):
            self.happens("open", args[0])
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            self.happens(event, str(args[0]))

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if self.is_on and path.startswith(self.folder):
            self.happens("fsync", path, lost=path)
        self._fsync(descriptor)

    def happens(self, event: str, path: str, lost: str | None = None) -> None:
        # rmtree names files by their folder's descriptor.
        if os.path.isabs(path) and not path.startswith(self.folder):
            return
        self.seen.append(f"{event} {os.path.basename(path)}")
        if len(self.seen) == self.fatal:
            self.is_on = False
            if lost is not None and os.path.isfile(lost):
                os.truncate(lost, os.path.getsize(lost) // 2)
            os.kill(os.getpid(), signal.SIGKILL)


class AtEndOf(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step: int, call: Callable[[], None]):
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


def killed_while_saving(kind: str, folder: Path, step: int, fatal: int) -> None:
    """Go on in `folder`; from the end of `step` on count file events, die at number `fatal`; write them down."""
    events = FileEvents(folder, fatal)
    trainer = KINDS[kind](folder)
    trainer.add_callback(AtEndOf(step, lambda: setattr(events, "is_on", True)))
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model()
    events.is_on = False
    if fatal == 0:
        (folder / "events.json").write_text(json.dumps(events.seen))


def killed_after(kind: str, folder: Path, step: int) -> None:
    """Save at every step, and die before the save after `step`; after the last step, before the result is written."""
    trainer = KINDS[kind](folder)

    class Dies(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            # Not by save_steps, which has to be a multiple of eval_steps where the best checkpoint is loaded.
            control.should_save = trainer.may_save()
            if state.global_step == step + 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_end(self, args, state, control, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_callback(Dies())
    trainer.train()


def signalled(kind: str, folder: Path, place: str, count: int, number: int, resume: str = "auto") -> None:
    """Finish a run that sends itself a signal the `count`-th time it comes to a place."""
    trainer = KINDS[kind](folder)
    left = [count]

    def pass_by(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)
            time.sleep(0)  # The handler runs before the next line of Python.

    class AtStep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            pass_by()

    if place == "update":
        trainer.add_callback(AtStep())
    elif place == "token":
        poll = trainer.sampler.backend.poll
        trainer.sampler.backend.poll = lambda: (pass_by(), poll())[1]
    elif place == "forward":
        torch.nn.modules.module.register_module_forward_hook(pass_by)
    elif place == "evaluation":
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *args, **kwargs: (pass_by(), evaluate(*args, **kwargs))[1]
    trainer.train(resume_from_checkpoint=resume)
    (folder / "digest.json").write_text(json.dumps(digest(trainer)))


def wait_for_mirror(folder: Path, mirror: str | Path) -> None:
    """Wait until every checkpoint of a folder is whole in its mirror."""
    names = [path.name for path in checkpoint_folders(folder)]
    wait_until(lambda: not any(checkpoint_problems(Path(mirror) / name) for name in names))


def finish_mirrored(kind: str, folder: Path, mirror: str, dies_at: int | None = None) -> None:
    """Finish a run whose checkpoints have a second home; the process may die after a step."""
    if dies_at is None:
        finish(kind, folder, checkpoint_mirror=mirror)
        return

    def dies() -> None:
        wait_for_mirror(folder, mirror)
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = KINDS[kind](folder, checkpoint_mirror=mirror)
    trainer.add_callback(AtEndOf(dies_at, dies))
    trainer.train(resume_from_checkpoint="auto")


def finish_limited(kind: str, folder: Path, step: int, most: int) -> None:
    """Go on in `folder`; from the end of `step` on no file may be longer than `most` bytes. Write the error down."""
    trainer = KINDS[kind](folder)
    trainer.add_callback(AtEndOf(step, lambda: limit_files(most)))
    try:
        trainer.train(resume_from_checkpoint="auto")
    except RuntimeError as error:
        limit_files(resource.RLIM_INFINITY)
        (folder / "error.txt").write_text(str(error))


def limit_files(most: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def hold(folder: Path, ready: Any) -> None:
    """Hold a run's folder until the process is killed."""
    with held_folder(folder):
        ready.set()
        signal.pause()


def command_limited(folder: Path, words: list[str]) -> None:
    """Run a command in `folder` that can write no byte to any file; write down what it says."""
    os.chdir(folder)
    sys.stderr = io.StringIO()
    limit_files(0)
    code = cli.main(words)
    limit_files(resource.RLIM_INFINITY)
    (folder / "said.txt").write_text(sys.stderr.getvalue())
    sys.exit(code)


def forked(target: Callable[..., None], *args: Any) -> None:
    """Run `target` in this process, quietly; a Stopped leaves with its exit code."""
    sys.stdout = sys.stderr = open(os.devnull, "w")
    # Where the tests run in the background or under nohup, these are ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    target(*args)
