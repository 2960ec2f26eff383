"""Completion of verbs, options and their words in a shell, by argcomplete.

eval "$(register-python-argcomplete onetrunk)" in ~/.bashrc or ~/.zshrc turns it on.
"""

from __future__ import annotations

import argparse
import os

import argcomplete

from onetrunk.stages.options.parser import TRUE_OR_FALSE, make_parser
from onetrunk.stages.options.plan_words import plan_parser
from onetrunk.stages.options.table import MODULES, shown_options
from onetrunk.stages.options.verbs import VERBS
from onetrunk.stages.options.words import run_parser


def complete() -> None:
    """Print the completions that the shell asks for, and exit; does nothing if no shell asks."""
    line = os.environ.get("COMP_LINE", "").split()
    verb = line[1] if len(line) > 1 else ""
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()
    for name, text in VERBS.items():
        parents = [_parser_of(name)] if name == verb else []
        verbs.add_parser(name, parents=parents, add_help=False, help=text)
    argcomplete.autocomplete(parser, always_complete_options="long")


def _parser_of(verb: str) -> argparse.ArgumentParser:
    if verb in ("run", "plan"):
        return run_parser() if verb == "run" else plan_parser()
    parser = make_parser(shown_options(verb) if verb in MODULES else ())
    for action in parser._actions:
        action.choices = action.choices or (TRUE_OR_FALSE if action.const is True else None)
    for flag in ("--config", "--resume") if verb in MODULES else ():
        parser.add_argument(flag)
    return parser
