"""The words of `onetrunk report`, which has folders of runs instead of a config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onetrunk.stages.options.schema import Parser, UsageError

DESCRIPTION = "One page about how a run went, or about several runs or a pipeline."


def report_words(argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ReportArguments in the words after the verb.

    Raises:
        UsageError: a word that is no option, or a price below 0.
        SystemExit: after --help.
    """
    parser = Parser(prog="onetrunk report", description=DESCRIPTION, allow_abbrev=False)
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
