"""Preference data: prompts -> completions of a model -> pairs -> a judge's verdicts -> rows for a reward model.

With `mode: revise` critiques and revisions instead, for supervised fine-tuning. Whatever is sampled or judged is kept
at once: after a kill the same command goes on, and ends with the same file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onetrunk.stages.parsing import parse
from onetrunk.stages.running import Terminated, run_stage, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk prefs` with these words; return the exit code."""
    return run_stage("prefs", parse_prefs, run, argv)


def parse_prefs(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return PrefsArguments, JudgeSettings and ModelArguments."""
    from onetrunk.judges.load import JudgeSettings
    from onetrunk.stages.arguments import ModelArguments
    from onetrunk.stages.prefs.arguments import PrefsArguments

    types = (PrefsArguments, JudgeSettings, ModelArguments)
    return parse(argv, types, "prefs", "Make preference data, or revised completions, with a judge or a constitution.")


def run(args: Any, judge_settings: Any, model_args: Any) -> None:
    """Check the rows, load constitution, judge and model; sample, label and write."""
    from onetrunk.stages.prefs.flow import merge_shards
    from onetrunk.stages.prefs.parts import check_one_process
    from onetrunk.utils.files import require_output_dir
    from onetrunk.utils.locks import held_folder

    check_one_process()
    folder = require_output_dir(args.output_dir)
    if args.merge_shards is not None:
        say_where(merge_shards(args, folder))
        return
    with held_folder(folder, args.part.suffix()):
        made = make(args, judge_settings, model_args, folder)
    show_samples(args, made)
    say_where(made)


def make(args: Any, judge_settings: Any, model_args: Any, folder: Path) -> Any:
    """Check the rows, load constitution, judge and model, and return what was made.

    Args:
        folder: of the run; nobody else writes this part of it.
    """
    from onetrunk.judges.constitution import load_constitution
    from onetrunk.judges.load import check_judge, load_judge
    from onetrunk.rewards.resolve import resolve_reward
    from onetrunk.stages.prefs.flow import make_rows
    from onetrunk.stages.prefs.output import claim_folder
    from onetrunk.stages.prefs.parts import check_rows

    # What is known before anything large is loaded is checked and compared before it.
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
        say("what was sampled and judged is kept; the same command goes on from there", after_bar=True)
        raise


def show_samples(args: Any, made: Any) -> None:
    """Print the first rows."""
    from itertools import islice

    from onetrunk.feedback.shards import read_rows
    from onetrunk.stages.prefs.output import sample_table
    from onetrunk.stages.report import show

    rows = list(islice(read_rows(made.path), args.num_samples_to_print))
    if rows:
        show(sample_table(rows))


def say_where(made: Any) -> None:
    """Print how many rows lie where, and what is missing."""
    from onetrunk.stages.prefs.output import warnings_of

    for sentence in warnings_of(made.statistics):
        print(f"prefs: {sentence}")
    print(f"prefs: {made.num_rows} rows in {made.path}; what they are like: {made.report}")
