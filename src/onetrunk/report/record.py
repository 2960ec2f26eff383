"""RunRecord: writes down a training while it runs, so that its report can be made at any time, also after a kill.

The folder `_report` of a run holds `run.json` (settings, versions, digests of the data), `log.jsonl` (one line per log
and per event), and the completions of the held-out prompts before training and at the last evaluation.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import Trainer, TrainerCallback, TrainerState

from onetrunk.judges.hacking_monitor import HackingMonitor
from onetrunk.ppo.evaluation import write_samples
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.report.runs import FOLDER, LOG_FILE, RUN_FILE, SAMPLES, STOP, read_lines
from onetrunk.utils.files import atomic_write_json, atomic_write_text
from onetrunk.utils.redaction import redact, redact_all

logger = get_logger(__name__)

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
# Values of these are worked out when the settings are created, so they always differ from the default.
WORKED_OUT = frozenset(
    "bf16 logging_nan_inf_filter ddp_find_unused_parameters ddp_broadcast_buffers accelerator_config max_staleness"
    " truncated_completions report_to hub_token project dataloader_pin_memory resume_from_checkpoint"
    " model_init_kwargs do_eval".split()
)


class RunRecord(TrainerCallback):
    """Appends every log, alarm and evaluation of a training to `_report` in its output folder.

    Does nothing on other processes than the first. A disk that cannot be written ends the record with a warning, never
    the run.

    Args:
        arguments: the settings classes of the stage, for the report's table of settings.
    """

    def __init__(self, trainer: Trainer, verb: str, arguments: Sequence[Any] = ()):
        self.trainer = trainer
        self.verb = verb
        self.arguments = arguments
        self.folder = Path(trainer.args.output_dir) / FOLDER
        self.is_on = trainer.is_world_process_zero()
        self._has_begun = False
        self._num_alarms = self._num_monitor_alarms = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._safely(self._begin, state)

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # What is logged before the record begins is in the history that it begins with.
        if state.log_history and self._has_begun:
            self._safely(self._append, {**state.log_history[-1], "time": time.time()})

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._safely(self._append_alarms, state)

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._safely(self.write_samples)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._safely(self._append, {"event": "end", "step": state.global_step, "time": time.time()})

    def note_stop(self, signal_name: str) -> None:
        """Record that a signal has stopped the run, with a checkpoint."""
        step = self.trainer.state.global_step
        self._safely(self._append, {"event": STOP, "signal": signal_name, "step": step, "time": time.time()})

    def write_samples(self) -> None:
        """Write the completions of the last evaluations of a PPO run, before training and after."""
        scored = getattr(self.trainer, "held_out_samples", {})
        for role, name in SAMPLES.items():
            if role in scored:
                write_samples(self.folder, Path(name).stem, scored[role], {})

    def _safely(self, work: Any, *arguments: Any) -> None:
        if not self.is_on:
            return
        try:
            work(*arguments)
        except OSError as error:
            self.is_on = False
            logger.warning(f"{self.folder} cannot be written ({error}); the report will lack all that follows")

    def _begin(self, state: TrainerState) -> None:
        """Write run.json. A resumed run keeps the record up to its checkpoint; the rest is repeated."""
        path, step = self.folder / LOG_FILE, state.global_step
        entries = read_lines(path) if step else []
        if not any("event" not in entry for entry in entries):
            entries = [dict(entry) for entry in state.log_history]
        last = max((entry["time"] for entry in entries if "time" in entry), default=None)
        kept = [entry for entry in entries if entry.get("step", 0) <= step]
        if last is not None:
            # Until here the machine was in use, also for steps that are repeated.
            kept.append({"event": "resumed", "step": step, "time": last})
        kept.append({"event": "begin", "step": step, "time": time.time(), **self._machine()})
        atomic_write_json(self.folder / RUN_FILE, self._about(state))
        atomic_write_text(path, "".join(map(_line, kept)))
        self._has_begun = True
        self._num_alarms = self._num_monitor_alarms = 0
        self.write_samples()

    def _append(self, entry: dict[str, Any]) -> None:
        with (self.folder / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(_line(entry))

    def _append_alarms(self, state: TrainerState) -> None:
        if not isinstance(self.trainer, PPOTrainer):
            return
        raised = self.trainer.alarms.raised
        for name, explanation in raised[self._num_alarms :]:
            self._append(_alarm(name, explanation, state))
        self._num_alarms = len(raised)
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, HackingMonitor) and callback.num_alarms > self._num_monitor_alarms:
                # A resumed monitor counts those from before, which the record has already.
                self._num_monitor_alarms = callback.num_alarms
                if callback.explanation and f" to step {state.global_step} " in callback.explanation:
                    self._append(_alarm("monitor", callback.explanation, state))

    def _machine(self) -> dict[str, Any]:
        has_gpu = torch.cuda.is_available() and self.trainer.args.device.type == "cuda"
        processes = self.trainer.args.world_size
        name = torch.cuda.get_device_name() if has_gpu else platform.processor() or platform.machine()
        return {"num_processes": processes, "num_gpus": processes if has_gpu else 0, "device": name}

    def _about(self, state: TrainerState) -> dict[str, Any]:
        args, model = self.trainer.args, self.trainer.accelerator.unwrap_model(self.trainer.model)
        settings = {name: value for part in (args, *self.arguments) for name, value in _values(part).items()}
        changed = {name for part in (args, *self.arguments) for name in changed_settings(part)}
        content = {
            "verb": self.verb,
            "base": getattr(getattr(model, "config", None), "name_or_path", None),
            "planned_steps": state.max_steps,
            "steps_per_rollout": getattr(args, "steps_per_rollout", None),
            "settings": settings,
            "changed": sorted(changed),
            "digests": _digests(self.trainer.settings_of_run() or {}),
            "versions": versions(),
        }
        return redact_all(json.loads(json.dumps(content, default=str)))


def changed_settings(arguments: Any) -> list[str]:
    """Return the names of the settings that differ from their defaults."""
    names = []
    for f in fields(arguments) if is_dataclass(arguments) else ():
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        value = getattr(arguments, f.name)
        if not f.init or f.name in WORKED_OUT or default is MISSING or value in (None, {}, []):
            continue
        if f.name == "max_steps" and getattr(arguments, "num_rollouts", None) is not None:
            continue
        # None stands for False where a switch is worked out.
        if not (default is None and value is False) and _comparable(value) != _comparable(default):
            names.append(f.name)
    return names


def _comparable(value: Any) -> str:
    # Enumerations are set by their value, and a list of one by the one.
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return str(getattr(value, "value", value))


def versions() -> dict[str, str]:
    """Return the versions of Python, onetrunk and the libraries that decide what a run computes."""
    ours = {"python": platform.python_version(), "onetrunk": sys.modules["onetrunk"].__version__}
    return ours | {name: version(name) for name in PACKAGES}


def _values(arguments: Any) -> dict[str, Any]:
    if hasattr(arguments, "to_dict"):
        return arguments.to_dict()
    return {f.name: getattr(arguments, f.name) for f in fields(arguments)} if is_dataclass(arguments) else {}


def _digests(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the settings of a run that are digests, of rows, rewards or weights."""
    digests = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            digests |= _digests(value, f"{prefix}{name}." if name != "steering" else prefix)
        elif isinstance(value, str) and ("sha256" in value or name in ("base", "row_contents")):
            digests[f"{prefix}{name}"] = value
    return digests


def _alarm(name: str, explanation: str, state: TrainerState) -> dict[str, Any]:
    return {"event": "alarm", "name": name, "text": explanation, "step": state.global_step, "time": time.time()}


def _line(entry: dict[str, Any]) -> str:
    return redact(json.dumps(entry, ensure_ascii=False, default=str)) + "\n"
