"""The words of `onetrunk run`, which has a pipeline file instead of a config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onetrunk.stages.options.schema import Parser

DESCRIPTION = """A whole pipeline: SFT -> preferences -> reward model -> distillation -> PPO -> evaluation, as one
resumable chain."""


def run_words(argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields of RunArguments in the words after the verb.

    Raises:
        UsageError: a word that is no option.
        SystemExit: after --help.
    """
    parser = Parser(prog="onetrunk run", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("pipeline", help="a YAML file with output_dir and stages")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="begin here; earlier stages' output is used")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="end with this stage")
    parser.add_argument("--dry-run", dest="is_dry", action="store_true", help="show what would run, and run nothing")
    text = "let a stage start over if something it depends on has changed; deletes its checkpoints and result"
    parser.add_argument("--overwrite", dest="overwrites", action="store_true", help=text)
    text = "start this stage over, even if it is done"
    parser.add_argument("--force", dest="forced", metavar="STAGE", action="append", default=[], help=text)
    parser.add_argument("--resume", choices=["auto"], help="has no effect: a pipeline always resumes where it stopped")
    words = vars(parser.parse_args(list(argv)))
    words.pop("resume")
    return words
