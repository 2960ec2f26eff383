"""The stage `onetrunk run`: SFT, preferences, reward model, distillation, PPO and evaluation as one resumable chain.

    onetrunk run recipes/tiny/pipeline.yaml --until reward

    output_dir: runs/tiny/pipeline
    stages:
      data: {script: recipes/tiny/make_data.py, outputs: [runs/tiny/base, runs/tiny/sft.jsonl]}
      sft: {config: recipes/tiny/sft.yaml}
      ppo: {config: recipes/tiny/ppo.yaml, options: {num_rollouts: 8}, launcher: accelerate launch}

A stage is a verb of the command line (its name, unless `verb` says another) or a script of the user. All configs are
checked before a stage runs. Every stage runs in its own process, which frees its memory. A stage is skipped if nothing
that it depends on has changed since it ended: its settings, and the contents of every file and folder that these name
(not the imports of a Python file), or that a script lists as `inputs`. A stage that was interrupted resumes. If
something has changed, the stage starts over, and so do the stages that depend on its output; it deletes what it wrote
before only with `--overwrite`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from glob import glob
from pathlib import Path
from typing import Any

from rich.table import Table

from onetrunk.checkpoints.folders import left_by_a_run
from onetrunk.checkpoints.resume_settings import is_free
from onetrunk.data.files import BUILDERS
from onetrunk.feedback.costs import CostConfig
from onetrunk.ppo.stream_state import FREE_IN_PPO
from onetrunk.rewards.specs import PROCESS_MODEL
from onetrunk.stages.arguments import PushArguments
from onetrunk.stages.options.reading import RESUME, UsageError, read_mapping, run_words, secret_in_words
from onetrunk.stages.results import as_json, shortened
from onetrunk.stages.run_context import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    Terminated,
    has_result,
    last_finished_checkpoint,
    say_how,
)
from onetrunk.utils.files import (
    atomic_write_json,
    read_json,
    reading_content,
    require_name,
    require_output_dir,
    write_lock,
)
from onetrunk.utils.import_path import is_dotted_path
from onetrunk.utils.redaction import redact, redact_all, table_console
from onetrunk.utils.shipped import find_config, with_shipped_files
from onetrunk.verbs import VERBS

# A trainer may ignore these names, because it compares what they lead to (the base model, the rows, the folder). A
# pipeline only sees the names.
COMPARED_BY_TRAINER = frozenset(("model_init_kwargs", "eos_token", "pad_token", "output_dir"))
# Settings that a resumed training may change, but which choose the checkpoint that becomes its result.
CHOOSES_RESULT = frozenset(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"))
KEYS = {"output_dir": str, "stages": dict}
STAGE_KEYS = {"verb": str, "config": str, "script": str, "options": dict, "launcher": str}
STAGE_KEYS |= {"inputs": list, "outputs": list}  # Of a script.
STATE_FILE = "pipeline.json"
# What decides the length of a training. If that grows, the training resumes.
LENGTHS = ("num_rollouts", "max_steps", "num_train_epochs", "continue_ended_run")
# What a verb that does not train writes last. Each shard of preferences has statistics of its own.
LAST_WRITTEN = ("metrics.json", "statistics*.json")
# Settings whose texts are not paths, even if a file has that name.
NO_PATHS = {
    "stop_tokens", "dataset_split", "eval_dataset_split", "dataset_config", "dataset_columns", "compaction_prompt",
}  # fmt: skip
# Files of a run that no later stage reads.
IGNORED = ("checkpoint-*", "runs", "__pycache__", ".*", "events.out.tfevents.*", "_report")


# --- the file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline, under a name of its own."""

    name: str
    verb: str | None  # None: a script.
    path: Path  # The config, or the script.
    options: dict[str, Any]  # Override the config, or are passed to the script.
    launcher: tuple[str, ...]  # Words before the command, such as `accelerate launch`.
    outputs: tuple[Path, ...]  # Files and folders that it writes; of a verb its output folder.
    settings: dict[str, Any]  # The config with the options applied; for a script the options.
    free: frozenset[str] = frozenset()  # Settings that may change without changing what the stage produces.
    inputs: tuple[str, ...] = ()  # Files and folders that a script reads and no option names.

    @property
    def output(self) -> Path:
        return self.outputs[0]

    @property
    def trains(self) -> bool:
        """Whether the stage is a training, which can resume from a checkpoint."""
        return self.verb is not None and bool(VERBS[self.verb].trains)

    @property
    def remakes(self) -> str:
        """The folder in its output that the stage replaces if the settings that decide it change; "": none."""
        return "" if self.verb is None else VERBS[self.verb].remakes

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
        """Return whether the output exists, was written to its end and, of a training, is undamaged."""
        if self.missing():
            return False
        if self.trains:
            return has_result(self.output)
        is_whole = self.verb is None or any(any(self.output.glob(name)) for name in LAST_WRITTEN)
        return is_whole and bool(self.left() or not self.remakes)

    def left(self) -> list[str]:
        """Return the names in the output folder that the stage deletes if it starts over."""
        if self.trains:
            return left_by_a_run(self.output)
        return [self.remakes] if self.remakes and any((self.output / self.remakes).glob("*")) else []


@dataclass(frozen=True)
class Pipeline:
    """One or more stages in their order; `output_dir` is the folder of their state."""

    path: Path
    output_dir: Path
    stages: tuple[Stage, ...]


def load_pipeline(path: str | Path) -> Pipeline:
    """Read and check a pipeline file and the configs that it names."""
    path = find_config(str(path))
    spec = with_shipped_files(read_mapping(path)[0])
    if "stages" not in spec and len(spec) > 1:
        raise UsageError(f"{path} has no stages; settings of one stage are run by its verb, such as onetrunk ppo")
    _check_keys(spec, KEYS, str(path))
    for key in KEYS:
        if not spec.get(key):
            raise UsageError(f"{path}: {key} is not set; a pipeline has an output_dir and at least one stage")
    stages = tuple(_stage(str(name), entry, f"{path}: stage {name}") for name, entry in spec["stages"].items())
    owners: dict[Path, str] = {}
    for stage in stages:
        for name in stage.inputs:
            if not any(found.exists() or overlaps(found, owners) for found in paths_in(name)):
                raise UsageError(
                    f"{path}: stage {stage.name}: input {name} does not exist, and no earlier stage writes it"
                )
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
    others = {"config", "verb"} if "script" in entry else {"inputs", "outputs"}
    if not all(entry.get(key) for key in keys) or others & entry.keys():
        raise UsageError(
            f"{place}: give config, the YAML file of a verb; or script, any inputs and its outputs, and no verb"
        )
    empty = [option for option, value in options.items() if value is None]
    if empty:
        raise UsageError(f"{place}: {empty[0]} is empty, which does not unset it; change it in the config")
    path = Path(entry["script"]) if "script" in entry else find_config(entry["config"])
    if not path.is_file():
        raise UsageError(f"{place}: {path} does not exist (working folder {Path.cwd()})")
    if "script" in entry:
        outputs = tuple(Path(str(output)) for output in entry["outputs"])
        inputs = tuple(map(str, entry.get("inputs", ())))
        return Stage(name, None, path, options, launcher, outputs, dict(options), inputs=inputs)
    verb = entry.get("verb", name)
    verbs = [known.name for known in VERBS.values() if known.dry_run]
    if verb not in verbs:
        raise UsageError(f"{place}: {verb!r} is not a verb; set verb to one of {', '.join(verbs)}")
    options = {_setting(verb, option): value for option, value in options.items()}
    settings = {**with_shipped_files(read_mapping(path)[0]), **options}
    if not settings.get("output_dir"):
        raise UsageError(f"{place}: {path} does not set output_dir; name the folder that the stage writes to")
    stage = Stage(name, verb, path, options, launcher, (Path(str(settings["output_dir"])),), settings)
    return replace(stage, free=free_settings(verb, _parse_as_the_stage_will(stage, place)))


def _setting(verb: str, option: str) -> str:
    """Return the name of the setting of an option, which may be written as on the command line."""
    name = option.replace("-", "_")
    return RESUME if name == "resume" and VERBS[verb].trains else name


def free_settings(verb: str, parsed: tuple[Any, ...]) -> frozenset[str]:
    """Return the names of a stage's settings that may change without changing what it produces.

    These are what a judge may cost, where a result is uploaded, and the settings that the trainer of a training calls
    free.
    """
    free = {f.name for f in (*fields(CostConfig), *fields(PushArguments))}
    for args in parsed:
        if hasattr(args, "resume_from_checkpoint"):
            free |= {f.name for f in fields(args) if is_free(f.name) or (verb == "ppo" and f.name in FREE_IN_PPO)}
    return frozenset(free - COMPARED_BY_TRAINER - CHOOSES_RESULT)


def _parse_as_the_stage_will(stage: Stage, place: str) -> tuple[Any, ...]:
    try:
        return VERBS[stage.verb].parser(stage.words())
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error


def _words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [word for entry in value for word in _words(entry)]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


# --- what a stage reads ----------------------------------------------------------------------------------------------


def paths_in(value: Any) -> Iterator[Path]:
    """Yield each text in nested settings that may be a path, such as "model", "rewards.py:score" or "reward:model".

    The name of a function ("rewards.score") stands for the file of its module.
    """
    if isinstance(value, (dict, list)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from paths_in(entry)
    if not isinstance(value, str) or "://" in value:
        return
    text = value.removeprefix("reward:").removeprefix(PROCESS_MODEL).partition("#separator=")[0]
    before, colon, _ = text.rpartition(":")
    for candidate in (text, before) if colon else (text,):
        if not candidate or len(candidate) >= 1000 or "\n" in candidate:
            continue
        yield Path(os.path.expanduser(candidate))
        if "*" in candidate and Path(candidate).suffix in BUILDERS:  # Rows that are streamed.
            yield from map(Path, sorted(glob(os.path.expanduser(candidate), recursive=True)))
    if is_dotted_path(text):
        module = Path(*text.split(".")[:-1]).with_suffix(".py")
        # Python finds it in the first of these; in the working folder it stays as short as the user knows it.
        places = (module, *(Path(place) / module for place in sys.path))
        yield next((path for path in places if path.is_file()), module)


def is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def overlaps(path: Path, outputs: Iterable[Path]) -> bool:
    """Return whether a path is one of the outputs, a part of one, or a folder that has one."""
    return any(is_within(path, output) or is_within(output, path) for output in outputs)


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that a later stage may read, sorted; links to folders are not followed."""

    def is_read(file: Path) -> bool:
        parts = file.relative_to(folder).parts
        return file.is_file() and not any(fnmatch(part, pattern) for part in parts for pattern in IGNORED)

    return sorted(filter(is_read, folder.rglob("*")))


class Digests:
    """Digests of files and folders. A file is read again only if its size or its time of change is another.

    `known` maps a path to the size, the time and the digest.
    """

    def __init__(self, known: dict[str, list[Any]]):
        self.known = known

    def __getitem__(self, path: Path) -> str:
        if path.is_file():
            return self._of_file(path)
        names = [f"{file.relative_to(path).as_posix()} {self._of_file(file)}\n" for file in files_of(path)]
        return hashlib.sha256("".join(names).encode()).hexdigest()

    def _of_file(self, path: Path) -> str:
        status = path.stat()
        stamp = [status.st_size, status.st_mtime_ns]
        entry = self.known.get(str(path))
        if entry is None or entry[:2] != stamp:
            with path.open("rb") as file:
                entry = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
            self.known[str(path)] = entry
        return entry[2]


# --- what a stage has to do ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a stage has to do."""

    stage: Stage
    action: str  # "done" (nothing), "run" (for the first time, or again because something changed), or "resume".
    reason: str
    inputs: dict[str, str | None]  # Path -> digest; None while an earlier stage has yet to write it.
    deletes: tuple[str, ...] = ()  # Names in its output folder that it would delete, for which it needs `--overwrite`.


class PipelineState:
    """The record of a pipeline's stages, in `pipeline.json` of its output folder, and what each has to do.

    Raises:
        RuntimeError: the record is not JSON.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.path = pipeline.output_dir / STATE_FILE
        record = read_json(self.path) if self.path.exists() else {"stages": {}, "digests": {}}
        with reading_content(self.path):
            self.stages: dict[str, dict[str, Any]] = {name: dict(stage) for name, stage in record["stages"].items()}
            self.digests = Digests(dict(record["digests"]))

    def plan(self, stage: Stage, waits_for: Iterable[Stage] = (), is_forced: bool = False) -> Plan:
        """Return what a stage has to do.

        `waits_for` are earlier stages that have yet to run; `is_forced` starts a stage over even if it is done.
        """
        inputs, left = self._inputs(stage, waits_for), tuple(stage.left())
        record = self.stages.get(stage.name)
        if is_forced or record is None:
            return Plan(stage, "run", "forced" if is_forced else "never ran", inputs, left)
        settings = _changed_settings(stage, record)
        changed = [change for name, change in settings.items() if name not in stage.free]
        changed += _changed_inputs(inputs, record)
        pending = [name for name in inputs if inputs[name] is None]
        lengths = [settings[name] for name in LENGTHS if name in settings and name in stage.free]
        if changed:
            reason, may_resume = f"changed: {'; '.join(changed)}", False
            if stage.settings.get("allow_config_change") is True and self.resumable(stage):
                reason, may_resume = f"{reason} (allow_config_change is set)", True
        elif pending:
            return Plan(stage, "run", f"waits for {', '.join(pending)}", inputs)
        elif record.get("status") != "done":
            reason, may_resume = f"was {record.get('status')}", True
        elif not (is_complete := stage.is_complete()) or lengths:
            reason = f"another length: {', '.join(lengths)}" if is_complete else "its output is incomplete or damaged"
            may_resume = self.resumable(stage) or not stage.trains
        else:
            return Plan(stage, "done", "nothing that it depends on has changed", inputs)
        return Plan(stage, "resume", reason, inputs) if may_resume else Plan(stage, "run", reason, inputs, left)

    def plans(self, args: Namespace, stages: Sequence[Stage]) -> list[Plan]:
        """Return the plan of each stage, as far as it is known before the first of them runs."""
        plans: list[Plan] = []
        for stage in stages:
            waits_for = [plan.stage for plan in plans if plan.action != "done"]
            plans.append(self.plan(stage, waits_for, is_forced=stage.name in args.forced))
        return plans

    def resumable(self, stage: Stage) -> bool:
        """Return whether a stage that trains has left a checkpoint since it last started over.

        Earlier checkpoints are of another run, with other inputs.
        """
        checkpoint = last_finished_checkpoint(stage.output) if stage.trains else None
        return checkpoint is not None and checkpoint.stat().st_mtime >= self._started(stage)

    def words(self, plan: Plan) -> list[str]:
        """Return the options that make a stage resume where it stopped, or delete its output and start over."""
        stage, resumes = plan.stage, plan.action == "resume"
        if resumes and self.resumable(stage):
            return ["--resume_from_checkpoint", "auto"]
        if resumes and stage.trains and stage.settings.get("checkpoint_mirror") and not stage.left():
            return ["--resume_from_checkpoint", "auto"]  # Its disk is gone: what there is lies in the mirror.
        # A training without a checkpoint has left parts of a result at most, or what it was allowed to delete when it
        # began. `prefs` makes its rows from its ledger again, so no answer is paid for twice.
        replaces = resumes and (stage.trains or stage.remakes)
        if not plan.deletes and not replaces:
            return []
        continues = stage.trains and stage.settings.get("resume_from_checkpoint")
        return ["--overwrite_output_dir", "true", *(["--resume_from_checkpoint", "false"] if continues else [])]

    def note(self, plan: Plan, status: str, **more: Any) -> None:
        """Record the status of a stage: "running", "failed", "interrupted", "terminated" or "done"."""
        stage = plan.stage
        starts_over = status == "running" and plan.action == "run"
        self.stages[stage.name] = {
            "status": status,
            "command": redact(stage.shown()),
            "inputs": plan.inputs,
            "settings": _compared(stage),
            "started": time.time() if starts_over else self._started(stage),
            **more,
        }
        record = {"pipeline": str(self.pipeline.path), "stages": self.stages, "digests": self.digests.known}
        atomic_write_json(self.path, record)

    def _started(self, stage: Stage) -> float:
        return self.stages.get(stage.name, {}).get("started", 0.0)

    def _inputs(self, stage: Stage, waits_for: Iterable[Stage]) -> dict[str, str | None]:
        pending = [output for other in waits_for for output in other.outputs]
        inputs = {str(stage.path): self.digests[stage.path]} if stage.verb is None else {}
        named = {name: value for name, value in stage.settings.items() if name not in stage.free | NO_PATHS}
        for path in paths_in([named, *stage.inputs]):
            # A text such as "." or "/" names no input: it would be everything that lies there.
            if is_within(Path.cwd(), path) or any(is_within(path, output) for output in stage.outputs):
                continue
            if overlaps(path, pending):
                inputs[str(path)] = None
            elif os.path.exists(path):  # False also for a text that is too long for a name.
                inputs[str(path)] = self.digests[path]
        return dict(sorted(inputs.items()))


def _changed_inputs(inputs: dict[str, str | None], record: dict[str, Any]) -> list[str]:
    """Return which files and folders differ, without those that an earlier stage has yet to write."""
    before = record.get("inputs", {})
    other = {name for name, digest in inputs.items() if digest is not None and digest != before.get(name)}
    return sorted((before.keys() - inputs.keys()) | other)


def _changed_settings(stage: Stage, record: dict[str, Any]) -> dict[str, str]:
    then, now = record.get("settings", {}), _compared(stage)
    names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    return {name: f"{name}: {_shown(then.get(name))} -> {_shown(now.get(name))}" for name in names}


def _compared(stage: Stage) -> dict[str, Any]:
    about = {"verb": stage.verb} if stage.verb else {"outputs": [str(output) for output in stage.outputs]}
    return json.loads(json.dumps(redact_all({**about, **stage.settings}), default=str))


def _shown(value: Any) -> str:
    return "not set" if value is None else shortened(value, 80) if isinstance(value, str) else as_json(value)


# --- running it ------------------------------------------------------------------------------------------------------


def parse_run(argv: Sequence[str]) -> tuple[Namespace, Pipeline]:
    """Parse and check the arguments, the pipeline and the configs in it; raises UsageError for a mistake in any."""
    args = run_words(argv)
    pipeline = load_pipeline(args.pipeline)
    names = [stage.name for stage in pipeline.stages]
    options = [("--from", args.first), ("--until", args.last), *(("--force", name) for name in args.forced)]
    for option, name in options:
        if name is not None and name not in names:
            raise UsageError(f"{option} {name}: {args.pipeline} has no such stage; it has {', '.join(names)}")
    chosen = [stage.name for stage in selected(pipeline, args)]
    if not chosen:
        raise UsageError(f"--from {args.first} comes after --until {args.last}; the order is {', '.join(names)}")
    left_out = [name for name in args.forced if name not in chosen]
    if left_out:
        raise UsageError(
            f"--force {left_out[0]}: --from and --until leave it out, and run {', '.join(chosen)}; force one of these"
        )
    return args, pipeline


def selected(pipeline: Pipeline, args: Namespace) -> list[Stage]:
    names = [stage.name for stage in pipeline.stages]
    start = names.index(args.first) if args.first else 0
    end = names.index(args.last) + 1 if args.last else len(names)
    return list(pipeline.stages[start:end])


def run(args: Namespace, pipeline: Pipeline) -> None:
    """Run the stages that need it, and print the status of all stages.

    Raises:
        SystemExit: with the exit code of a stage that failed.
        ValueError: `--from` skips a stage that has no output yet, or a stage would delete its earlier output.
        RuntimeError: another process runs this pipeline, or its folder cannot be written.
    """
    state = PipelineState(pipeline)
    stages = selected(pipeline, args)
    for stage in pipeline.stages[: pipeline.stages.index(stages[0])]:
        if stage.missing():
            raise ValueError(
                f"--from {args.first} skips {stage.name}, which has not written {', '.join(stage.missing())} yet;"
                f" begin with --from {stage.name}"
            )
    if args.is_dry:
        plans = state.plans(args, stages)
        show(state, {plan.stage.name: (plan.action, plan.reason) for plan in plans})
        for plan in plans:
            if plan.action != "done":
                print(f"$ {redact(plan.stage.shown(*state.words(plan)))}")
        return
    require_output_dir(pipeline.output_dir)
    with write_lock(state.path):
        run_stages(args, state, stages)


def run_stages(args: Namespace, state: PipelineState, stages: Sequence[Stage]) -> None:
    """Run the stages that need it, and print the status of all; raises what `run` raises."""
    for plan in state.plans(args, stages):
        require_may_delete(args, plan)
    results: dict[str, tuple[str, str]] = {}
    code = 0
    for number, stage in enumerate(stages, 1):
        # The earlier stages may have changed what this one depends on.
        plan = state.plan(stage, is_forced=stage.name in args.forced)
        if plan.action == "done":
            results[stage.name] = ("skipped", "")
            continue
        words = state.words(plan)
        print(f"\n[{number}/{len(stages)}] {stage.name}: {plan.reason}\n$ {redact(stage.shown(*words))}", flush=True)
        try:
            require_may_delete(args, plan)
            code = execute(plan, state, words)
        except (KeyboardInterrupt, Terminated):
            say_how_to_resume(args, stage, "was stopped")
            raise
        if code:
            break
        results[stage.name] = ("done", "")
    rest = state.plans(args, [stage for stage in stages if stage.name not in results])
    show(state, results | {plan.stage.name: (plan.action, plan.reason) for plan in rest})
    say_how(state.pipeline.output_dir, "run")
    if code:
        say_how_to_resume(args, stage, f"ended with exit code {code}")
        raise SystemExit(code)


def require_may_delete(args: Namespace, plan: Plan) -> None:
    """Raise ValueError for a plan that deletes a stage's earlier output without `--overwrite` or `--force`."""
    if plan.deletes and not args.overwrites and plan.stage.name not in args.forced:
        raise ValueError(
            f"stage {plan.stage.name} would start over ({plan.reason}) and delete {', '.join(plan.deletes)} in"
            f" {plan.stage.output}; undo the change, or add --overwrite to delete it (a training can also resume with"
            " allow_config_change: true in its config)"
        )


def execute(plan: Plan, state: PipelineState, words: Sequence[str]) -> int:
    """Run one stage in its own process, with its progress on this terminal; return its exit code."""
    started = time.time()
    state.note(plan, "running")
    status, code = "interrupted", 1
    try:
        code = _wait(subprocess.Popen(plan.stage.command(*words)))
        status = {0: "done", EXIT_INTERRUPTED: "interrupted", EXIT_TERMINATED: "terminated"}.get(code, "failed")
        missing = plan.stage.missing()
        if code == 0 and plan.stage.trains and not has_result(plan.stage.output):
            # A signal stopped only the stage, which has printed how to resume.
            status, code = "interrupted", EXIT_TERMINATED
        elif code == 0 and missing:
            status, code = "failed", 1
            print(f"run: {plan.stage.name} succeeded, but has not written {', '.join(missing)}", file=sys.stderr)
    finally:
        state.note(plan, status, exit_code=code, seconds=round(time.time() - started, 1))
    return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a stage and return its exit code. Forwards signals; Ctrl-C reaches the stage by itself."""
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    except Terminated as stop:
        process.send_signal(stop.number)
        process.wait()
        raise
    return code if code >= 0 else 128 - code


def say_how_to_resume(args: Namespace, stage: Stage, event: str) -> None:
    """Print what happened to a stage, and how to resume there."""
    forced = " without --force" if args.forced else ""
    print(f"run: {stage.name} {event}; the same command{forced} resumes there", file=sys.stderr, flush=True)


def show(state: PipelineState, results: dict[str, tuple[str, str]]) -> None:
    """Print a table of all stages; `results` has the status of each and why."""
    table = Table(title=str(state.pipeline.path))
    for column in ("stage", "status", "why", "seconds", "output"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for stage in state.pipeline.stages:
        record = state.stages.get(stage.name, {})
        status, why = results.get(stage.name, ("left out", ""))
        seconds = f"{record['seconds']:.0f}" if "seconds" in record else ""
        table.add_row(stage.name, status, why, seconds, ", ".join(map(str, stage.outputs)))
    table_console().print(table)
