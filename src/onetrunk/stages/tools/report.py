"""The stage `onetrunk report`: one page about how a run went, or about several runs or a pipeline.

    onetrunk report runs/tiny/ppo
    onetrunk report runs/a runs/b --output_dir runs/compared

It only reads what runs have written, so it works while a run trains and after it was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onetrunk.report.blocks import MARKDOWN
from onetrunk.report.report import write_report
from onetrunk.stages.options.words import report_words
from onetrunk.stages.run_context import run_stage
from onetrunk.utils.files import require_output_dir


@dataclass(frozen=True)
class ReportArguments:
    """Arguments of `onetrunk report`; `report_words` has their help texts."""

    runs: Sequence[str]
    target: str | None = None
    price: float | None = None


def parse_report(argv: Sequence[str]) -> tuple[ReportArguments]:
    """Return the arguments; raises UsageError for a mistake in them."""
    return (ReportArguments(**report_words(argv)),)


def run(args: ReportArguments) -> None:
    """Write the report and print where it is.

    Raises:
        ValueError: a folder is missing or holds no run.
    """
    for folder in args.runs:
        if not Path(folder).is_dir():
            raise ValueError(f"{folder} is no folder (working folder {Path.cwd()}); give the output_dir of a run")
    target = None if args.target is None else require_output_dir(args.target)
    page = write_report(args.runs, target, args.price)
    print(f"report: wrote {page}, and {MARKDOWN} with its plots next to it")


main = partial(run_stage, "report", parse_report, run)
