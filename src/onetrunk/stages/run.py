"""A whole pipeline: SFT -> preferences -> reward model -> distillation -> PPO -> evaluation, as one resumable chain.

    onetrunk run recipes/tiny/pipeline.yaml --until reward

Every stage is a command in a process of its own, so that its memory is given back. A stage whose inputs are as they
were when it ended is skipped; one that was interrupted goes on; one that rests on something that changed starts anew,
and with it all that rest on what it writes. Knows commands and their exit codes; no model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from onetrunk.files import require_output_dir
from onetrunk.locks import WriterLock
from onetrunk.redaction import redact
from onetrunk.stages.parsing import UsageError
from onetrunk.stages.pipeline import RESUMING_VERBS, Pipeline, Stage, load_pipeline
from onetrunk.stages.pipeline_state import PipelineState, Plan
from onetrunk.stages.resuming import has_result, last_finished_checkpoint
from onetrunk.stages.running import EXIT_INTERRUPTED, EXIT_TERMINATED, Terminated, run_stage

COLORS = {"done": "green", "skipped": "dim", "run": "yellow", "resume": "yellow", "failed": "red", "running": "yellow"}


@dataclass(frozen=True)
class RunArguments:
    """What `onetrunk run` is told.

    Args:
        pipeline: the file.
        first: name of the stage to begin at; those before are taken as they are. None: at the first.
        last: name of the stage to end with; None: the last.
        is_dry: show what would be done, and do nothing.
    """

    pipeline: str
    first: str | None = None
    last: str | None = None
    is_dry: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk run` with these words; return the exit code."""
    return run_stage("run", parse_run, run, argv)


def parse_run(argv: Sequence[str]) -> tuple[RunArguments, Pipeline]:
    """Return what was asked for and the pipeline, checked.

    Raises:
        UsageError: the words, the pipeline, or a config in it are wrong.
    """
    parser = _Parser(prog="onetrunk run", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("pipeline", help="a YAML file with output_dir and stages")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="begin here; what earlier stages left is used")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="end with this stage")
    parser.add_argument("--dry-run", dest="is_dry", action="store_true", help="show what would run, and run nothing")
    parser.add_argument("--resume", choices=["auto"], help="what a pipeline always does: it goes on where it stopped")
    words = vars(parser.parse_args(list(argv)))
    words.pop("resume")
    args = RunArguments(**words)
    pipeline = load_pipeline(args.pipeline)
    names = [stage.name for stage in pipeline.stages]
    for option, name in (("--from", args.first), ("--until", args.last)):
        if name is not None and name not in names:
            raise UsageError(f"{option} {name}: {args.pipeline} has no such stage; it has {', '.join(names)}")
    if args.first and args.last and names.index(args.first) > names.index(args.last):
        raise UsageError(f"--from {args.first} comes after --until {args.last}; the order is {', '.join(names)}")
    return args, pipeline


def run(args: RunArguments, pipeline: Pipeline) -> None:
    """Run the stages that need it, and show how all of them stand.

    Raises:
        SystemExit: with the exit code of a stage that failed.
        ValueError: `--from` begins behind a stage that has left nothing.
        RuntimeError: another process runs this pipeline, or its folder cannot be written.
    """
    state = PipelineState(pipeline)
    stages = chosen(pipeline, args)
    if args.is_dry:
        show(pipeline, state, stages, {})
        return
    require_output_dir(pipeline.output_dir)
    lock = WriterLock(state.path)
    try:
        run_stages(args, pipeline, state, stages)
    finally:
        lock.release()


def run_stages(args: RunArguments, pipeline: Pipeline, state: PipelineState, stages: Sequence[Stage]) -> None:
    """Run those of the stages that need it, and show how all of them stand.

    Raises:
        SystemExit: with the exit code of a stage that failed.
    """
    results: dict[str, str] = {}
    code = 0
    for number, stage in enumerate(stages, 1):
        plan = state.plan(stage)
        if plan.action == "done":
            results[stage.name] = "skipped"
            continue
        print(f"\n[{number}/{len(stages)}] {stage.name}: {plan.reason}\n$ {redact(stage.shown())}", flush=True)
        try:
            code = execute(plan, state)
        except (KeyboardInterrupt, Terminated):
            say_how_to_go_on(args, f"{stage.name} was stopped")
            raise
        if code:
            break
        results[stage.name] = "done"
    show(pipeline, state, stages, results)
    if code:
        say_how_to_go_on(args, f"{stage.name} ended with exit code {code}")
        raise SystemExit(code)


def chosen(pipeline: Pipeline, args: RunArguments) -> list[Stage]:
    """Return the stages from `--from` until `--until`.

    Raises:
        ValueError: an earlier stage has not left what it should.
    """
    names = [stage.name for stage in pipeline.stages]
    start = names.index(args.first) if args.first else 0
    end = names.index(args.last) + 1 if args.last else len(names)
    for stage in pipeline.stages[:start]:
        missing = [str(output) for output in stage.outputs if not output.exists()]
        if missing:
            raise ValueError(
                f"--from {args.first} skips {stage.name}, which has not left {', '.join(missing)} yet;"
                f" begin with --from {stage.name}"
            )
    return list(pipeline.stages[start:end])


def execute(plan: Plan, state: PipelineState) -> int:
    """Run one stage in a process of its own, its progress on this terminal; return its exit code."""
    started = time.time()
    words = way_in(plan, state)
    state.note(plan, "running", stale=stale_checkpoints(plan, state))
    status, code = "interrupted", 1
    try:
        code = _wait(subprocess.Popen(plan.stage.command(*words)))
        status = {0: "done", EXIT_INTERRUPTED: "interrupted", EXIT_TERMINATED: "terminated"}.get(code, "failed")
        missing = [str(output) for output in plan.stage.outputs if not output.exists()]
        if code == 0 and plan.stage.verb in RESUMING_VERBS and not has_result(plan.stage.outputs[0]):
            # It was stopped by a signal of its own, and has said how it goes on.
            status, code = "interrupted", EXIT_TERMINATED
        elif code == 0 and missing:
            status, code = "failed", 1
            print(f"run: {plan.stage.name} ended well, but has not left {', '.join(missing)}", file=sys.stderr)
    finally:
        stale = state.stages[plan.stage.name]["stale"]
        state.note(plan, status, exit_code=code, seconds=round(time.time() - started, 1), stale=stale)
    return code


def _wait(process: subprocess.Popen) -> int:
    """Wait for a stage; hand a signal on, and give it the time to end by itself after Ctrl-C, which it gets too."""
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


def way_in(plan: Plan, state: PipelineState) -> list[str]:
    """Return the words that let a stage go on where it stopped, or start anew over what it left."""
    stage = plan.stage
    if stage.verb == "prefs":
        # Its ledger stays, so that nothing is bought twice, whatever has changed.
        return ["--overwrite_output_dir", "true"]
    if stage.verb not in RESUMING_VERBS:
        return []
    checkpoint = last_finished_checkpoint(stage.outputs[0])
    if plan.action == "resume" and checkpoint is not None:
        # What lay there before this run began is of a run that rested on something else.
        if state.stages[stage.name].get("stale", {}).get(checkpoint.name) != checkpoint.stat().st_mtime_ns:
            return ["--resume_from_checkpoint", "auto"]
    return ["--overwrite_output_dir", "true"]


def stale_checkpoints(plan: Plan, state: PipelineState) -> dict[str, int]:
    """Return name and time of the checkpoints that an earlier run than this one left."""
    if plan.action == "resume":
        return state.stages[plan.stage.name].get("stale", {})
    folders = plan.stage.outputs[0].glob("checkpoint-*") if plan.stage.verb in RESUMING_VERBS else ()
    return {folder.name: folder.stat().st_mtime_ns for folder in folders}


def say_how_to_go_on(args: RunArguments, what: str) -> None:
    """Say what happened to a stage, and what to type to go on there."""
    options = (("--from", args.first), ("--until", args.last))
    words = [word for option, name in options if name for word in (option, name)]
    again = " ".join(["onetrunk run", args.pipeline, *words])
    print(f"run: {what}; `{again}` goes on there", file=sys.stderr, flush=True)


def show(pipeline: Pipeline, state: PipelineState, stages: Sequence[Stage], results: dict[str, str]) -> None:
    """Print how every stage stands, or what would be done with it."""
    table = Table(title=str(pipeline.path))
    for column in ("stage", "status", "why", "seconds", "output"):
        table.add_column(column, overflow="fold", justify="right" if column == "seconds" else "left")
    waiting: list[Stage] = []
    for stage in pipeline.stages:
        record: dict[str, Any] = state.stages.get(stage.name, {})
        status, why = results.get(stage.name), ""
        if stage not in stages:
            status, why = "left out", ""
        elif status is None:
            plan = state.plan(stage, waiting)
            status, why = plan.action, plan.reason
            if plan.action != "done":
                waiting.append(stage)
        seconds = f"{record['seconds']:.0f}" if "seconds" in record else ""
        color = COLORS.get(status, "default")
        outputs = ", ".join(str(path) for path in _few(stage.outputs))
        table.add_row(stage.name, f"[{color}]{status}[/]", why, seconds, outputs)
    Console().print(table)


def _few(paths: Sequence[Path]) -> list[Path | str]:
    return [*paths[:2], *(["..."] if len(paths) > 2 else [])]
