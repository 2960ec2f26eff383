"""Read a pipeline file: its stages, their order and their configs. All of it is checked before a stage runs.

    output_dir: runs/tiny/pipeline
    stages:
      data: {script: recipes/tiny/make_data.py, outputs: [runs/tiny/base, runs/tiny/sft.jsonl]}
      sft: {config: recipes/tiny/sft.yaml}
      ppo: {config: recipes/tiny/ppo.yaml, options: {num_rollouts: 8}, launcher: accelerate launch}

A stage is a verb of the command line (its name, unless `verb` says another) or a script of the user. Relative paths
start at the working folder.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.folders import left_by_a_run
from onetrunk.checkpoints.resume_settings import is_free
from onetrunk.feedback.costs import CostConfig
from onetrunk.ppo.stream_state import FREE_IN_PPO
from onetrunk.stages.arguments import PushArguments
from onetrunk.stages.options.reading import UsageError, read_mapping, secret_in_words
from onetrunk.stages.options.table import SETTINGS_MODULES
from onetrunk.stages.run_context import has_result
from onetrunk.utils.files import require_name
from onetrunk.utils.shipped import find_config, with_shipped_files

# In the order in which a model goes through them.
STAGE_VERBS = ("sft", "judge", "prefs", "reward", "distill", "ppo", "eval")
# A trainer may ignore these names, because it compares what they lead to (the base model, the rows, the folder). A
# pipeline only sees the names.
COMPARED_BY_TRAINER = frozenset(("model_init_kwargs", "value_head_init", "eos_token", "pad_token", "output_dir"))
KEYS = {"output_dir": str, "stages": dict}
STAGE_KEYS = {"verb": str, "config": str, "script": str, "options": dict, "launcher": str, "outputs": list}
# Where `prefs` writes its rows, which it replaces if the settings that decide them change.
ROWS = "data"


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, under a name of its own."""

    name: str
    verb: str | None  # None: a script.
    path: Path  # The config, or the script.
    options: dict[str, Any]  # Override the config, or are passed to the script.
    launcher: tuple[str, ...]  # Words before the command, such as those of `accelerate launch`.
    outputs: tuple[Path, ...]  # Files and folders that it writes; of a verb its output folder.
    settings: dict[str, Any]  # The config with the options applied; for a script the options.
    free: frozenset[str] = frozenset()  # Settings that may change without changing what the stage produces.

    @property
    def output(self) -> Path:
        """The output folder of a verb."""
        return self.outputs[0]

    @property
    def trains(self) -> bool:
        """Whether the stage is a training, which can resume from a checkpoint."""
        return self.verb in ("sft", "reward", "distill", "ppo")

    def words(self) -> list[str]:
        options = [word for name, value in self.options.items() for word in (f"--{name}", *_words(value))]
        return options if self.verb is None else ["--config", str(self.path), *options]

    def command(self, *more: str) -> list[str]:
        """Return the command that runs the stage, followed by `more` words."""
        program = [str(self.path)] if self.verb is None else ["-m", "onetrunk.cli", self.verb]
        return [*(self.launcher or (sys.executable,)), *program, *self.words(), *more]

    def shown(self, *more: str) -> str:
        """Return the command as a person would type it, followed by `more` words."""
        if self.launcher:
            return shlex.join(self.command(*more))
        program = ["python", str(self.path)] if self.verb is None else ["onetrunk", self.verb]
        return shlex.join([*program, *self.words(), *more])

    def missing(self) -> list[str]:
        return [str(output) for output in self.outputs if not output.exists()]

    def is_complete(self) -> bool:
        """Return whether the output is there; that of a training also as it was written."""
        return not self.missing() and (not self.trains or has_result(self.output))

    def left(self) -> list[str]:
        """Return the names in the output folder that the stage deletes if it starts over."""
        if self.trains:
            return left_by_a_run(self.output)
        return [ROWS] if self.verb == "prefs" and any((self.output / ROWS).glob("*")) else []


@dataclass(frozen=True)
class Pipeline:
    """One or more stages in their order; `output_dir` is the folder of their state."""

    path: Path
    output_dir: Path
    stages: tuple[Stage, ...]


def load_pipeline(path: str | Path) -> Pipeline:
    """Read and check a pipeline file and the configs that it names.

    Raises:
        UsageError: names the file, the stage and the key, and says what to write instead.
    """
    path = find_config(str(path))
    if not path.is_file():
        raise UsageError(f"the pipeline {path} does not exist (working folder {Path.cwd()}); give a YAML file")
    spec = with_shipped_files(read_mapping(path)[0])
    _check_keys(spec, KEYS, str(path))
    for key in KEYS:
        if not spec.get(key):
            raise UsageError(f"{path}: {key} is not set; a pipeline has an output_dir and at least one of stages")
    stages = tuple(_stage(str(name), entry, f"{path}: stage {name}") for name, entry in spec["stages"].items())
    owners: dict[Path, str] = {}
    for stage in stages:
        for output in stage.outputs:
            owner = owners.setdefault(output.resolve(), stage.name)
            if owner != stage.name:
                raise UsageError(
                    f"{path}: stages {owner} and {stage.name} both write {output}; give each its own output"
                )
    return Pipeline(path, Path(spec["output_dir"]), stages)


def _check_keys(entry: Any, known: Mapping[str, type], place: str) -> None:
    if not isinstance(entry, dict):
        raise UsageError(f"{place} is {entry!r}; expected a mapping with {', '.join(known)}")
    for key, value in entry.items():
        if key not in known:
            raise UsageError(f"{place}: unknown key {key!r}; the keys are {', '.join(known)}")
        if not isinstance(value, known[key]):
            raise UsageError(f"{place}: {key} is {value!r}; expected {known[key].__name__}")


def _stage(name: str, entry: Any, place: str) -> Stage:
    try:
        require_name(name, f"{place}: its name")
    except ValueError as error:
        raise UsageError(str(error)) from None
    _check_keys(entry, STAGE_KEYS, place)
    options, launcher = entry.get("options", {}), tuple(with_shipped_files(shlex.split(entry.get("launcher", ""))))
    reason = secret_in_words(launcher) or secret_in_words([f"--{option}" for option in options])
    if reason:
        raise UsageError(f"{place}: {reason}")
    # A verb writes to the output_dir of its config; a script has no verb.
    keys = {"script", "outputs"} if "script" in entry else {"config"}
    others = {"config", "verb"} if "script" in entry else {"outputs"}
    if not all(entry.get(key) for key in keys) or others & entry.keys():
        raise UsageError(f"{place}: give config, the YAML file of a verb; or script and its outputs, and no verb")
    path = Path(entry["script"]) if "script" in entry else find_config(entry["config"])
    if not path.is_file():
        raise UsageError(f"{place}: {path} does not exist (working folder {Path.cwd()})")
    if "script" in entry:
        outputs = tuple(Path(str(output)) for output in entry["outputs"])
        return Stage(name, None, path, options, launcher, outputs, dict(options))
    verb = entry.get("verb", name)
    if verb not in STAGE_VERBS:
        raise UsageError(f"{place}: {verb!r} is no verb; set verb to one of {', '.join(STAGE_VERBS)}")
    settings = {**with_shipped_files(read_mapping(path)[0]), **options}
    if not settings.get("output_dir"):
        raise UsageError(f"{place}: {path} does not set output_dir; name the folder that the stage writes to")
    stage = Stage(name, verb, path, options, launcher, (Path(str(settings["output_dir"])),), settings)
    return replace(stage, free=free_settings(verb, _parse_as_the_stage_will(stage, place)))


def free_settings(verb: str, parsed: tuple[Any, ...]) -> frozenset[str]:
    """Return the names of a stage's settings that may change without changing what it produces.

    These are what a judge may cost, where a result is uploaded, and the settings that the trainer of a training calls
    free.
    """
    free = {f.name for f in (*fields(CostConfig), *fields(PushArguments))}
    for args in parsed:
        if hasattr(args, "resume_from_checkpoint"):
            free |= {f.name for f in fields(args) if is_free(f.name) or (verb == "ppo" and f.name in FREE_IN_PPO)}
    return frozenset(free - COMPARED_BY_TRAINER)


def _parse_as_the_stage_will(stage: Stage, place: str) -> tuple[Any, ...]:
    module = import_module(SETTINGS_MODULES[stage.verb])
    environment = dict(os.environ)
    try:
        return getattr(module, f"parse_{stage.verb}")(stage.words())
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error
    finally:
        # The env block of a config is only for its stage.
        os.environ.clear()
        os.environ.update(environment)


def _words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [word for entry in value for word in _words(entry)]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]
