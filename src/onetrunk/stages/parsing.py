"""Parse the YAML file and the command line into dataclasses; a user's mistake becomes one message and exit code 2.

    onetrunk ppo --config recipes/tiny/ppo.yaml --learning_rate 1e-3

The YAML file sets values, and the command line overrides them. Relative paths in both start at the working folder, not
at the YAML file. `options/reading.py` reads both and checks keys and types; TrlParser makes the dataclasses, which
check themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trl import TrlParser

from onetrunk.stages.options.helping import help_text, help_topic
from onetrunk.stages.options.parser import Parser, UsageError, mapping_reader
from onetrunk.stages.options.reading import check_values, read
from onetrunk.stages.options.table import load_options
from onetrunk.stages.options.verbs import VERBS


class StageParser(TrlParser, Parser):
    """TrlParser that reads mappings as JSON, and raises UsageError where argparse would print all options and exit."""

    error = Parser.error

    def __init__(self, dataclass_types: Sequence[type], mappings: Sequence[str] = (), **kwargs: Any):
        super().__init__(dataclass_types, **kwargs)
        for action in self._actions:
            if action.dest in mappings:
                action.type = mapping_reader(action.dest)


def parse(
    argv: Sequence[str],
    verb: str,
    dataclass_types: Sequence[type],
    check: Callable[..., None] | None = None,
) -> tuple[Any, ...]:
    """Return one instance of each dataclass, from the YAML file after --config and the options in `argv`.

    Args:
        argv: the words after the verb.
        verb: name of the stage.
        dataclass_types: its settings classes, whose fields are the options.
        check: raises ValueError if the instances, its arguments, do not fit together.

    Raises:
        UsageError: names the file and line, or the option, and what to write instead; also for a secret in either.
        SystemExit: after --help.
    """
    topic = help_topic(argv)
    if topic is not None:
        print(help_text(verb, VERBS[verb], topic))
        raise SystemExit(0)
    reading = read(verb, argv)
    mappings = [option.name for option in load_options(verb).values() if option.is_mapping]
    parser = StageParser(dataclass_types, mappings, prog=f"onetrunk {verb}", add_help=False, allow_abbrev=False)
    try:
        parser.set_defaults_with_config(**reading.values)
        parsed = parser.parse_args_into_dataclasses(reading.words)
        for arguments in parsed:
            check_values(vars(arguments))
        if check is not None:
            check(*parsed)
        return parsed
    except UsageError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error
