"""A whole pipeline: SFT -> preferences -> reward model -> distillation -> PPO -> evaluation, as one resumable chain.

    onetrunk run recipes/tiny/pipeline.yaml --until reward

Every stage runs in its own process, which frees its memory. A stage is skipped if nothing that it depends on has
changed since it ended: its config, its options, and the contents of every file and folder that these name (not the
imports of a Python file). A stage that was interrupted resumes. A stage that depends on something that changed starts
over, and so do the stages that depend on its output. Before a stage deletes anything, the run stops and names it,
unless `--overwrite` is given.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from onetrunk.checkpoints.folders import described
from onetrunk.report.report import write_report_of
from onetrunk.stages.options.reading import UsageError
from onetrunk.stages.options.words import run_words
from onetrunk.stages.results import as_json, shortened
from onetrunk.stages.run.inputs import Digests, is_within, paths_in
from onetrunk.stages.run.pipeline import Pipeline, Stage, load_pipeline
from onetrunk.stages.run_context import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    Terminated,
    has_result,
    last_finished_checkpoint,
    run_stage,
    say_where,
)
from onetrunk.utils.files import atomic_write_json, read_json, require_output_dir
from onetrunk.utils.locks import WriterLock
from onetrunk.utils.redaction import redact, redact_all, table_console

STATE_FILE = "pipeline.json"
UNCHANGED = "nothing has changed"
# The length of a training. If it grows, the training resumes.
LENGTHS = ("num_rollouts", "max_steps", "num_train_epochs")
COLORS = {"done": "green", "skipped": "dim", "run": "yellow", "resume": "yellow"}


@dataclass(frozen=True)
class RunArguments:
    """Arguments of `onetrunk run`; `run_parser` has their help texts. Stages are given by their names."""

    pipeline: str
    first: str | None = None
    last: str | None = None
    is_dry: bool = False
    overwrites: bool = False
    forced: Sequence[str] = ()


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
        RuntimeError: the record is damaged.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.path = pipeline.output_dir / STATE_FILE
        record = read_json(self.path) if self.path.exists() else {}
        if not isinstance(record, dict) or not all(isinstance(record.get(k, {}), dict) for k in ("stages", "digests")):
            raise RuntimeError(
                f"{self.path} is not the record of a pipeline; delete it, and every stage runs again (with --overwrite"
                " if it has left a run)"
            )
        self.stages: dict[str, dict[str, Any]] = record.get("stages", {})
        self.digests = Digests(record.get("digests", {}))

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
            why = f"only free settings have changed: {', '.join(settings)}" if settings else UNCHANGED
            return Plan(stage, "done", why, inputs)
        return Plan(stage, "resume", reason, inputs) if may_resume else Plan(stage, "run", reason, inputs, left)

    def plans(self, args: RunArguments, stages: Sequence[Stage]) -> list[Plan]:
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
        # A training without a checkpoint has left parts of a result at most, or what it was allowed to delete when it
        # began. `prefs` makes its rows from its ledger again, so no answer is paid for twice.
        replaces = resumes and (stage.trains or stage.verb == "prefs")
        return ["--overwrite_output_dir", "true"] if plan.deletes or replaces else []

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
        digests = {name: entry for name, entry in self.digests.known.items() if Path(name).exists()}
        record = {"pipeline": str(self.pipeline.path), "stages": self.stages, "digests": digests}
        atomic_write_json(self.path, record)

    def _started(self, stage: Stage) -> float:
        return self.stages.get(stage.name, {}).get("started", 0.0)

    def _inputs(self, stage: Stage, waits_for: Iterable[Stage]) -> dict[str, str | None]:
        pending = [output for other in waits_for for output in other.outputs]
        inputs = {str(stage.path): self.digests[stage.path]} if stage.verb is None else {}
        for path in paths_in({name: value for name, value in stage.settings.items() if name not in stage.free}):
            if any(is_within(path, output) for output in stage.outputs):
                continue
            if any(is_within(path, output) or is_within(output, path) for output in pending):
                inputs[str(path)] = None
            elif path.exists():
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


def parse_run(argv: Sequence[str]) -> tuple[RunArguments, Pipeline]:
    """Parse and check the arguments, the pipeline and the configs in it; raises UsageError for a mistake in any."""
    args = RunArguments(**run_words(argv))
    pipeline = load_pipeline(args.pipeline)
    names = [stage.name for stage in pipeline.stages]
    options = [("--from", args.first), ("--until", args.last), *(("--force", name) for name in args.forced)]
    for option, name in options:
        if name is not None and name not in names:
            raise UsageError(f"{option} {name}: {args.pipeline} has no such stage; it has {', '.join(names)}")
    chosen = [stage.name for stage in selected(pipeline, args)]
    if not chosen:
        raise UsageError(f"--from {args.first} comes after --until {args.last}; the order is {', '.join(names)}")
    for name in args.forced:
        if name not in chosen:
            raise UsageError(f"--force {name}: --from and --until leave that stage out; change one of them")
    return args, pipeline


def selected(pipeline: Pipeline, args: RunArguments) -> list[Stage]:
    names = [stage.name for stage in pipeline.stages]
    start = names.index(args.first) if args.first else 0
    end = names.index(args.last) + 1 if args.last else len(names)
    return list(pipeline.stages[start:end])


def run(args: RunArguments, pipeline: Pipeline) -> None:
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
        show(state, {}, plans, args)
        for plan in plans:
            if plan.action != "done":
                print(f"$ {redact(plan.stage.shown(*state.words(plan)))}")
        return
    require_output_dir(pipeline.output_dir)
    lock = WriterLock(state.path)
    try:
        run_stages(args, state, stages)
    finally:
        lock.release()


def run_stages(args: RunArguments, state: PipelineState, stages: Sequence[Stage]) -> None:
    """Run those of `stages` that need it, and print the status of all stages; raises what `run` raises."""
    results: dict[str, tuple[str, str]] = {}
    code, has_run = 0, False
    plans = state.plans(args, stages)
    for plan in plans:
        require_may_delete(args, plan)
    for number, (stage, plan) in enumerate(zip(stages, plans, strict=True), 1):
        if has_run:
            # The earlier stages may have changed what this one depends on.
            plan = state.plan(stage, is_forced=stage.name in args.forced)
        if plan.action == "done":
            results[stage.name] = ("skipped", "" if plan.reason == UNCHANGED else plan.reason)
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
        results[stage.name], has_run = ("done", ""), True
    show(state, results, state.plans(args, [stage for stage in stages if stage.name not in results]), args)
    say_where(write_report_of(state.pipeline.output_dir), "run")
    if code:
        say_how_to_resume(args, stage, f"ended with exit code {code}")
        raise SystemExit(code)


def may_delete(args: RunArguments, plan: Plan) -> bool:
    return not plan.deletes or args.overwrites or plan.stage.name in args.forced


def require_may_delete(args: RunArguments, plan: Plan) -> None:
    """Raise ValueError for a plan that deletes a stage's earlier output without `--overwrite` or `--force`."""
    if may_delete(args, plan):
        return
    deleted = described([str(plan.stage.output / name) for name in plan.deletes])
    to_keep = ""
    if plan.reason.startswith("changed"):
        to_keep = "undo the change (a training can also resume with allow_config_change: true in its config), or "
    raise ValueError(
        f"stage {plan.stage.name} would start over ({plan.reason}) and delete {deleted}; {to_keep}add --overwrite to"
        " delete it"
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


def say_how_to_resume(args: RunArguments, stage: Stage, event: str) -> None:
    """Print what happened to a stage, and how to resume there."""
    forced = " without --force" if args.forced else ""
    print(f"run: {stage.name} {event}; the same command{forced} resumes there", file=sys.stderr, flush=True)


def show(state: PipelineState, results: dict[str, tuple[str, str]], plans: Sequence[Plan], args: RunArguments) -> None:
    """Print a table with the result of every stage that has one, and what would be done with the others."""
    table = Table(title=str(state.pipeline.path))
    for column in ("stage", "status", "why", "seconds", "output"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for plan in plans:
        needs = "" if may_delete(args, plan) else "; needs --overwrite"
        results = {**results, plan.stage.name: (plan.action, f"{plan.reason}{needs}")}
    for stage in state.pipeline.stages:
        record = state.stages.get(stage.name, {})
        status, why = results.get(stage.name, ("left out", ""))
        seconds = f"{record['seconds']:.0f}" if "seconds" in record else ""
        status_text = Text(status, style=COLORS.get(status, "default"))
        table.add_row(stage.name, status_text, why, seconds, ", ".join(map(str, stage.outputs)))
    table_console().print(table)


main = partial(run_stage, "run", parse_run, run)
