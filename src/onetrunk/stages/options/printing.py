"""`onetrunk config VERB`: print a YAML file with every option of a stage, its default and its help text."""

from __future__ import annotations

from collections.abc import Sequence

from onetrunk.stages.options.helping import config_text
from onetrunk.stages.options.parser import Parser, UsageError
from onetrunk.stages.options.table import MODULES
from onetrunk.stages.options.verbs import VERBS
from onetrunk.stages.secrets import say


def main(argv: Sequence[str]) -> int:
    """Print the file of the verb in `argv`; return the exit code."""
    parser = Parser(prog="onetrunk config", description=__doc__.split(": ", 1)[1], allow_abbrev=False)
    parser.add_argument("verb", choices=list(MODULES), help="the stage; onetrunk config ppo > ppo.yaml")
    try:
        verb = parser.parse_args(list(argv)).verb
    except UsageError as error:
        say(f"error: {error}", "all options: onetrunk config --help")
        return 2
    except SystemExit:
        return 0
    print(config_text(verb, VERBS[verb]), end="")
    return 0
