"""The words of `onetrunk run` and `onetrunk report`, which take files and folders instead of settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onetrunk.stages.options.parser import Parser, UsageError


def run_parser() -> Parser:
    """Return the parser of `onetrunk run`."""
    text = "A whole pipeline, such as SFT, preferences, reward model, PPO and evaluation, as one resumable chain."
    parser = Parser(prog="onetrunk run", description=text, allow_abbrev=False)
    parser.add_argument("pipeline", help="a YAML file with output_dir and stages")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="begin here; earlier stages' output is used")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="end with this stage")
    parser.add_argument("--dry-run", dest="is_dry", action="store_true", help="show what would run, and run nothing")
    text = "let a stage start over if something it depends on has changed; deletes its checkpoints and result"
    parser.add_argument("--overwrite", dest="overwrites", action="store_true", help=text)
    text = "start this stage over, even if it is done"
    parser.add_argument("--force", dest="forced", metavar="STAGE", action="append", default=[], help=text)
    parser.add_argument("--resume", choices=["auto"], help="has no effect: a pipeline always resumes where it stopped")
    return parser


def run_words(argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields of RunArguments in the words after the verb.

    Raises:
        UsageError: a word that is no option.
        SystemExit: after --help.
    """
    words = vars(run_parser().parse_args(list(argv)))
    words.pop("resume")
    return words


def report_words(argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ReportArguments in the words after the verb.

    Raises:
        UsageError: a word that is no option, or a price below 0.
        SystemExit: after --help.
    """
    parser = Parser(
        prog="onetrunk report",
        description="One page about how a run went, or about several runs or a pipeline.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="output_dir of a stage or of a pipeline")
    text = "folder to write to; default: _report in the run's folder, of several runs in the folder around them"
    parser.add_argument("--output_dir", dest="target", metavar="FOLDER", help=text)
    text = "price of one GPU for one hour, in any currency; the page then has the cost of each run"
    parser.add_argument("--price_per_gpu_hour", dest="price", type=float, metavar="PRICE", help=text)
    words = vars(parser.parse_args(list(argv)))
    price = words["price"]
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UsageError(f"--price_per_gpu_hour is {price}; give a price, 0 or more")
    return words


READERS = {"run": run_words, "report": report_words}
