"""Parse the YAML file and the command line into dataclasses; a user's mistake becomes one message and exit code 2.

    onetrunk ppo --config recipes/tiny/ppo.yaml --learning_rate 1e-3

The YAML file sets values, and the command line overrides them. Relative paths in both start at the working folder, not
at the YAML file. `options/reading.py` reads both and checks keys and types; TrlParser makes the dataclasses, which
check themselves. The command line calls `options/early.py` before this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onetrunk.stages.options.collect import StageParser, options_of
from onetrunk.stages.options.helping import help_text, help_topic
from onetrunk.stages.options.reading import check_values, read
from onetrunk.stages.options.schema import UsageError


def parse(
    argv: Sequence[str],
    dataclass_types: Sequence[type],
    verb: str,
    description: str,
    *,
    knows_ppo: bool = False,
    check: Callable[..., None] | None = None,
) -> tuple[Any, ...]:
    """Return one instance of each dataclass, from the YAML file after --config and the options in `argv`.

    Args:
        argv: the words after the verb.
        dataclass_types: their fields are the options.
        verb, description: name of the stage and a sentence about it, for the help text.
        knows_ppo: True explains options of TRL's GRPO and PPO trainers.
        check: raises ValueError if the instances, its arguments, do not fit together.

    Raises:
        UsageError: names the file and line, or the option, and what to write instead; also for a secret in either.
        SystemExit: after --help.
    """
    options = options_of(dataclass_types)
    topic = help_topic(argv)
    if topic is not None:
        print(help_text(verb, description, options, topic))
        raise SystemExit(0)
    reading = read(argv, options, knows_ppo=knows_ppo)
    parser = StageParser(dataclass_types, prog=f"onetrunk {verb}", add_help=False, allow_abbrev=False)
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
