"""The stage `onetrunk report`: one page about how a run went, or about several runs or a pipeline.

    onetrunk report runs/tiny/ppo
    onetrunk report runs/a runs/b --output_dir runs/compared

It only reads what runs have written, so it works while a run trains and after it was killed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from onetrunk.report.report import MARKDOWN, write_report
from onetrunk.stages.parsing import UsageError
from onetrunk.stages.running import run_stage
from onetrunk.utils.files import require_output_dir


@dataclass(frozen=True)
class ReportArguments:
    """Arguments of `onetrunk report`; `parse_report` has their help texts."""

    runs: Sequence[str]
    target: str | None = None
    price: float | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_report(argv: Sequence[str]) -> tuple[ReportArguments]:
    """Parse and check the arguments; raises UsageError."""
    parser = _Parser(prog="onetrunk report", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="output_dir of a stage or of a pipeline")
    text = "folder to write to; default: _report in the run's folder, of several runs in the folder around them"
    parser.add_argument("--output_dir", dest="target", metavar="FOLDER", help=text)
    text = "price of one GPU for one hour, in any currency; the page then has the cost of each run"
    parser.add_argument("--price_per_gpu_hour", dest="price", type=float, metavar="PRICE", help=text)
    args = ReportArguments(**vars(parser.parse_args(list(argv))))
    if args.price is not None and not (math.isfinite(args.price) and args.price >= 0):
        raise UsageError(f"--price_per_gpu_hour is {args.price}; give a price, 0 or more")
    return (args,)


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
