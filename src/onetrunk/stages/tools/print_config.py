"""`onetrunk config VERB`: print a YAML file with every option of a stage, its default and its help text."""

from __future__ import annotations

from collections.abc import Sequence

from onetrunk.stages.options.help import config_text
from onetrunk.stages.options.parser import Parser
from onetrunk.stages.options.verbs import SETTINGS_MODULES


def main(argv: Sequence[str]) -> int:
    """Print the file of the verb in `argv`; return the exit code."""
    parser = Parser(prog="onetrunk config", description=__doc__.split(": ", 1)[1], allow_abbrev=False)
    parser.add_argument("verb", choices=list(SETTINGS_MODULES), help="the stage; onetrunk config ppo > ppo.yaml")
    print(config_text(parser.parse_args(list(argv)).verb), end="")
    return 0
