"""The command `onetrunk VERB ...`, which runs a stage.

Help, and mistakes in the names of options and in YAML files, are answered in well under a second. Only then is a stage
imported, and with it torch and transformers.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from onetrunk.stages.options.verbs import MODULES, PLAIN_MODULES, VERBS
from onetrunk.utils.escaping import print_any_text
from onetrunk.utils.startup import freeze_loaded, without_collection

HELP = """usage: onetrunk VERB --config FILE.yaml [--option value ...]

{verbs}

Options override the file; `onetrunk VERB --help` lists them. FILE.yaml may be the name of a
recipe, such as tiny/ppo.
Several GPUs: accelerate launch --config_file accelerate_configs/ddp.yaml scripts/ppo.py --config FILE.yaml
Completion in your shell: eval "$(register-python-argcomplete onetrunk)"
ONETRUNK_TRACEBACK=1 shows where an error came from. Exit codes: 0 done, 1 failed,
2 wrong usage, 130 interrupted, 143 terminated."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage of a verb; return the exit code."""
    if "_ARGCOMPLETE" in os.environ:
        from onetrunk.stages.options.help import complete

        complete()
    print_any_text()
    try:
        code = _answer(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `onetrunk recipes list | head -1` closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _answer(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP.format(verbs="\n".join(f"  {verb:<10} {text}" for verb, text in VERBS.items())))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"onetrunk {sys.modules['onetrunk'].__version__}")
        return 0
    if words[0] not in VERBS:
        near = difflib.get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(VERBS)}"
        print(f"error: unknown verb {words[0]!r}: {hint}", file=sys.stderr)
        return 2
    return _run_plain(*words) if words[0] in PLAIN_MODULES else _run_stage(*words)


def _run_plain(verb: str, *words: str) -> int:
    """Run a verb that does not need torch, and turn what it raises into a message and an exit code."""
    from onetrunk.stages.options.parser import UsageError, say

    try:
        return run(verb, words)
    except SystemExit as end:  # argparse, after --help.
        return int(end.code or 0)
    except UsageError as error:
        say(f"error: {error}", f"all options: onetrunk {verb} --help")
        return 2
    except BrokenPipeError:
        raise
    except (ValueError, OSError, RuntimeError) as error:
        say(f"error: {error}")
        return 1


def _run_stage(verb: str, *words: str) -> int:
    """Print the help of a stage, or what is wrong with the words after it; otherwise run it.

    The stage reads the words again, and checks the values too.
    """
    from onetrunk.stages.options.help import help_text, help_topic
    from onetrunk.stages.options.parser import UsageError, say
    from onetrunk.stages.options.reading import DRY_RUN, read
    from onetrunk.stages.options.words import READERS

    try:
        if verb in READERS:
            READERS[verb](words)
        elif (topic := help_topic(words)) is not None:
            print(help_text(verb, topic), flush=True)
            return 0
        else:
            read(verb, [word for word in words if verb != "ppo" or word not in DRY_RUN])
    except SystemExit as end:  # argparse, after --help.
        return int(end.code or 0)
    except UsageError as error:
        say(f"error: {error}", f"all options: onetrunk {verb} --help")
        return 2
    return run(verb, words)


def run(verb: str, words: Sequence[str] | None = None) -> int:
    """Import the stage of a verb and run it on the words after the verb (None: those of this process)."""
    name = MODULES[verb]
    is_new = name not in sys.modules
    with without_collection():
        stage = import_module(name)
    if is_new:  # Frozen at each call, the garbage of earlier stages would stay.
        freeze_loaded()
    return stage.main(list(sys.argv[1:] if words is None else words))


if __name__ == "__main__":
    sys.exit(main())
