"""The stage `onetrunk report`: one page about how a run went, or about several runs or a pipeline.

    onetrunk report runs/tiny/ppo
    onetrunk report runs/a runs/b --output_dir runs/compared

It only reads what runs have written, so it works while a run trains and after it was killed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from onetrunk.report.blocks import MARKDOWN
from onetrunk.report.report import write_report_checked
from onetrunk.stages.options.reading import report_words
from onetrunk.utils.files import require_output_dir


def parse_report(argv: Sequence[str]) -> tuple[Namespace]:
    """Return the arguments; raises UsageError for a mistake in them."""
    return (report_words(argv),)


def run(args: Namespace) -> None:
    target = None if args.target is None else require_output_dir(args.target)
    page = write_report_checked(args.runs, target)
    print(f"report: wrote {page}, and {MARKDOWN} with its plots next to it")
