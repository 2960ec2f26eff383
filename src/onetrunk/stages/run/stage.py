"""A whole pipeline: SFT -> preferences -> reward model -> distillation -> PPO -> evaluation, as one resumable chain.

    onetrunk run recipes/tiny/pipeline.yaml --until reward

Every stage runs in its own process, which frees its memory. A stage is skipped if its inputs have not changed since it
ended. A stage that was interrupted resumes. A stage that depends on something that changed starts over, and so do the
stages that depend on its output. Before a stage deletes anything, the run stops and names it, unless `--overwrite` is
given.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from onetrunk.checkpoints.folders import described
from onetrunk.report.report import write_report_of
from onetrunk.stages.options.parser import UsageError
from onetrunk.stages.options.words import run_words
from onetrunk.stages.run.pipeline import Pipeline, Stage, load_pipeline
from onetrunk.stages.run.state import UNCHANGED, PipelineState, Plan
from onetrunk.stages.run_context import EXIT_INTERRUPTED, EXIT_TERMINATED, Terminated, has_result, run_stage, say_where
from onetrunk.utils.escaping import table_console
from onetrunk.utils.files import require_output_dir
from onetrunk.utils.locks import WriterLock
from onetrunk.utils.redaction import redact

OVERWRITE = ("--overwrite_output_dir", "true")
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

    def may_delete(self, stage: Stage) -> bool:
        return self.overwrites or stage.name in self.forced

    def command(self, forced: Sequence[str]) -> str:
        """Return the command that repeats this run, with the names of the stages that still have to start over."""
        options = (("--from", self.first), ("--until", self.last), *(("--force", name) for name in forced))
        words = [word for option, name in options if name for word in (option, name)]
        return shlex.join(["onetrunk", "run", self.pipeline, *words, *(["--overwrite"] if self.overwrites else [])])


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
        show(state, {}, plans_of(args, state, stages), args)
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
    plans = plans_of(args, state, stages)
    for plan in plans:
        require_may_delete(args, plan)
    for number, (stage, plan) in enumerate(zip(stages, plans, strict=True), 1):
        if has_run:
            # The earlier stages may have changed what this one depends on.
            plan = state.plan(stage, is_forced=stage.name in args.forced)
        if plan.action == "done":
            results[stage.name] = ("skipped", "" if plan.reason == UNCHANGED else plan.reason)
            continue
        words = resume_words(plan, state)
        print(f"\n[{number}/{len(stages)}] {stage.name}: {plan.reason}\n$ {redact(stage.shown(*words))}", flush=True)
        try:
            require_may_delete(args, plan)
            code = execute(plan, state, words)
        except (KeyboardInterrupt, Terminated):
            say_how_to_resume(args, stages[number - 1 :], "was stopped")
            raise
        if code:
            break
        results[stage.name], has_run = ("done", ""), True
    show(state, results, plans_of(args, state, [stage for stage in stages if stage.name not in results]), args)
    say_where(write_report_of(state.pipeline.output_dir), "run")
    if code:
        say_how_to_resume(args, stages[number - 1 :], f"ended with exit code {code}")
        raise SystemExit(code)


def plans_of(args: RunArguments, state: PipelineState, stages: Sequence[Stage]) -> list[Plan]:
    """Return the plan of each stage, as far as it is known before the first of them runs."""
    plans: list[Plan] = []
    for stage in stages:
        waits_for = [plan.stage for plan in plans if plan.action != "done"]
        plans.append(state.plan(stage, waits_for, is_forced=stage.name in args.forced))
    return plans


def require_may_delete(args: RunArguments, plan: Plan) -> None:
    """Raise ValueError for a plan that deletes a stage's earlier output without `--overwrite` or `--force`."""
    if not plan.deletes or args.may_delete(plan.stage):
        return
    deleted = described([str(plan.stage.output / name) for name in plan.deletes])
    to_keep = ""
    if plan.reason.startswith("changed"):
        to_keep = "undo the change (a training can also resume with allow_config_change: true in its config), or "
    raise ValueError(
        f"stage {plan.stage.name} would start over ({plan.reason}) and delete {deleted}; {to_keep}to delete it, run:"
        f" {replace(args, overwrites=True).command(args.forced)}"
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


def resume_words(plan: Plan, state: PipelineState) -> list[str]:
    """Return the options that make a stage resume where it stopped, or delete its output and start over."""
    if plan.action == "resume" and state.resumable(plan.stage):
        return ["--resume_from_checkpoint", "auto"]
    # A training without a checkpoint has left parts of a result at most, or what it was allowed to delete when it
    # began. `prefs` makes its rows from its ledger again, so no answer is paid for twice.
    replaces = plan.action == "resume" and (plan.stage.trains or plan.stage.verb == "prefs")
    return list(OVERWRITE) if plan.deletes or replaces else []


def say_how_to_resume(args: RunArguments, left: Sequence[Stage], event: str) -> None:
    """Print what happened to the first of the stages that are left, and the command to resume there."""
    command = args.command([stage.name for stage in left[1:] if stage.name in args.forced])
    print(f"run: {left[0].name} {event}; `{command}` resumes there", file=sys.stderr, flush=True)


def show(state: PipelineState, results: dict[str, tuple[str, str]], plans: Sequence[Plan], args: RunArguments) -> None:
    """Print a table with the result of every stage that has one, and what would be done with the others."""
    table = Table(title=str(state.pipeline.path))
    for column in ("stage", "status", "why", "seconds", "output"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    for plan in plans:
        needs = "; needs --overwrite" if plan.deletes and not args.may_delete(plan.stage) else ""
        results = {**results, plan.stage.name: (plan.action, f"{plan.reason}{needs}")}
    for stage in state.pipeline.stages:
        record: dict[str, Any] = state.stages.get(stage.name, {})
        status, why = results.get(stage.name, ("left out", ""))
        seconds = f"{record['seconds']:.0f}" if "seconds" in record else ""
        status_text = Text(status, style=COLORS.get(status, "default"))
        table.add_row(stage.name, status_text, why, seconds, ", ".join(map(str, stage.outputs)))
    table_console().print(table)
    for plan in plans if args.is_dry else ():
        if plan.action != "done":
            print(f"$ {redact(plan.stage.shown(*resume_words(plan, state)))}")


main = partial(run_stage, "run", parse_run, run)
