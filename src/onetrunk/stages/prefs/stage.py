"""The stage `onetrunk prefs`: prompts -> completions of a model -> pairs -> a judge's verdicts -> preference rows.

With `mode: revise`, critiques and revisions for supervised fine-tuning instead. Everything sampled or judged is kept
at once: after a kill the same command resumes, and ends with the same file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onetrunk.stages.parsing import parse
from onetrunk.stages.running import Terminated, run_stage, say

if TYPE_CHECKING:
    from onetrunk.judges.load import JudgeConfig
    from onetrunk.stages.arguments import ModelArguments
    from onetrunk.stages.prefs.arguments import PrefsArguments
    from onetrunk.stages.prefs.flow import Result


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk prefs` with these arguments; return the exit code."""
    return run_stage("prefs", parse_prefs, run, argv)


def parse_prefs(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return PrefsArguments, JudgeConfig and ModelArguments."""
    from onetrunk.judges.load import JudgeConfig
    from onetrunk.stages.arguments import ModelArguments
    from onetrunk.stages.prefs.arguments import PrefsArguments

    types = (PrefsArguments, JudgeConfig, ModelArguments)
    return parse(argv, types, "prefs", "Make preference data, or revised completions, with a judge or a constitution.")


def run(args: PrefsArguments, judge_settings: JudgeConfig, model_args: ModelArguments) -> None:
    """Make the rows of a run (or merge finished shards), and print a summary.

    Raises:
        ValueError: a launcher has started several processes, each of which would sample every prompt.
    """
    from onetrunk.stages.prefs.flow import merge_shards
    from onetrunk.utils.files import require_output_dir
    from onetrunk.utils.locks import held_folder

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"prefs runs in one process, and a launcher has started {os.environ['WORLD_SIZE']}; start one command per"
            " device, each with its own shard (--shard 0/2, --shard 1/2)"
        )
    folder = require_output_dir(args.output_dir)
    if args.merge_shards is not None:
        print_summary(merge_shards(args, folder))
        return
    with held_folder(folder, args.part.suffix()):
        result = make(args, judge_settings, model_args, folder)
    print_samples(result, args.num_samples_to_print)
    print_summary(result)


def make(args: PrefsArguments, judge_settings: JudgeConfig, model_args: ModelArguments, folder: Path) -> Result:
    """Check the rows, load constitution, judge and model, and make the rows."""
    from onetrunk.judges.constitution import load_constitution
    from onetrunk.judges.load import check_judge, load_judge
    from onetrunk.rewards.resolve import resolve_reward
    from onetrunk.stages.prefs.flow import make_rows
    from onetrunk.stages.prefs.output import claim_folder
    from onetrunk.stages.prefs.prompts import check_rows

    # Everything that can be checked before a large model is loaded is checked first.
    check_rows(args)
    constitution = load_constitution(judge_settings.constitution)
    settings = args.deciding() | {"constitution": f"{constitution.name} {constitution.version}"}
    claim_folder(folder, settings, args.overwrite_output_dir)
    judge = load_judge(judge_settings, resolve_reward) if args.mode == "pairs" else None
    if judge is not None:
        check_judge(judge)
    try:
        return make_rows(args, model_args, constitution, judge, folder)
    except (KeyboardInterrupt, Terminated):
        say("everything sampled and judged is kept; run the same command again to resume", after_bar=True)
        raise


def print_samples(result: Result, count: int) -> None:
    """Print the first rows as a table."""
    from itertools import islice

    from onetrunk.feedback.shards import read_rows
    from onetrunk.stages.prefs.output import sample_table
    from onetrunk.stages.report import show

    rows = list(islice(read_rows(result.path), count))
    if rows:
        show(sample_table(rows))


def print_summary(result: Result) -> None:
    """Print the warnings, the number of rows, and where they are."""
    from onetrunk.stages.prefs.output import warnings_of

    for warning in warnings_of(result.statistics):
        print(f"prefs: {warning}")
    print(f"prefs: {result.num_rows} rows in {result.path}; statistics in {result.report}")
