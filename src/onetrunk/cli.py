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
from pkgutil import resolve_name
from types import ModuleType

from onetrunk.stages.launch import launch as launched
from onetrunk.stages.launch import split_words
from onetrunk.stages.options.help import help_text, help_topic
from onetrunk.stages.options.reading import DRY_RUN, FileFault, UsageError, check_files, read, require_folders, say
from onetrunk.utils.redaction import print_any_text
from onetrunk.utils.startup import freeze_loaded, without_collection
from onetrunk.verbs import VERBS

HELP = """usage: onetrunk VERB --config FILE.yaml [--option value ...]

{verbs}

Options override the file; `onetrunk VERB --help` lists them. FILE.yaml may be the name of a
recipe, such as tiny/ppo.
Several GPUs: onetrunk ppo --config FILE.yaml --num_processes 8 --accelerate_config ddp
ONETRUNK_TRACEBACK=1 shows where an error came from. Exit codes: 0 done, 1 failed,
2 wrong usage, 130 interrupted, 143 terminated."""

_PAIRS = "preferences train a reward model here (reward), and a policy by it (ppo)"
# Verbs of other tools, and what does their work here.
OTHER_VERBS = {
    **dict.fromkeys(("grpo", "rloo", "online_dpo"), "the trainer here is ppo, which takes their settings"),
    **dict.fromkeys(("dpo", "kto", "orpo", "rm"), _PAIRS),
    "train": "one stage is sft, reward or ppo, and a chain of them is run",
    "generate": "talk to a model with chat, measure it with eval, or sample pairs with prefs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage of a verb; return the exit code."""
    print_any_text()
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # The frames of a library's bar would fill a file.
    words = list(sys.argv[1:] if argv is None else argv)
    verb, *rest = words or [""]
    # A stage turns its errors into messages itself; what leaves it is a bug.
    is_light = verb in VERBS and VERBS[verb].is_light
    errors = (ValueError, OSError, RuntimeError) if is_light else (UsageError, FileFault)
    try:
        code = _without_stage(words)
        if code is None:
            launch, rest = split_words(verb, rest)
            if _is_answered(verb, rest):
                code = 0
            else:
                code = launched(verb, launch, rest) if launch else _run_stage(verb, rest)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse, after --help.
        return int(end.code or 0)
    except BrokenPipeError:  # `onetrunk recipes list | head -1` closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:  # Stages answer it themselves.
        return 130
    except errors as error:
        is_usage = isinstance(error, UsageError)
        say(f"error: {error}", *([f"all options: onetrunk {verb} --help"] if is_usage else []))
        return 2 if is_usage else 1


def _without_stage(words: Sequence[str]) -> int | None:
    """Print the help, the version, or that there is no such verb, and return the exit code; None for a verb."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP.format(verbs="\n".join(f"  {verb.name:<10} {verb.text}" for verb in VERBS.values())))
        return 0 if words else 2
    verb = words[0]
    if verb in ("-V", "--version"):
        print(f"onetrunk {sys.modules['onetrunk'].__version__}")
        return 0
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(VERBS)}"
        hint = OTHER_VERBS.get(verb, hint)
        if verb.startswith("-") or verb.endswith((".yaml", ".yml")):
            hint = "the verb comes first: onetrunk ppo --config FILE"
        print(f"error: unknown verb {verb!r}: {hint}", file=sys.stderr)
        return 2
    return None


def _is_answered(verb: str, words: Sequence[str]) -> bool:
    """Print the help of a stage if that is asked for, and return whether it was; raise for a mistake.

    The stage reads the words again, and checks the values too.
    """
    if VERBS[verb].reader:
        require_folders(verb, vars(resolve_name(VERBS[verb].reader)(words)))
    elif VERBS[verb].has_settings:
        topic = help_topic(words)
        if topic is not None:
            print(help_text(verb, topic), flush=True)
            return True
        values = read(verb, words)
        require_folders(verb, values)
        check_files(values, verb)
    return False


def run(verb: str) -> int:
    """Run a verb on the words of this process; return the exit code."""
    return main([verb, *sys.argv[1:]])


def _run_stage(name: str, words: Sequence[str]) -> int:
    """Run the stage of a verb, or print what it would do; return the exit code."""
    verb = VERBS[name]
    is_dry = bool(verb.dry_run) and not set(DRY_RUN).isdisjoint(words)
    module, work = verb.dry_run.split(":") if is_dry else (verb.module, "run")
    work = getattr(_imported(module), work)
    if verb.is_light:
        work(*verb.parser(words))
        return 0
    run_stage = _imported("onetrunk.stages.run_context").run_stage
    return run_stage(name, verb.parser, work, words, is_dry)


def _imported(name: str) -> ModuleType:
    is_new = name not in sys.modules
    with without_collection():
        stage = import_module(name)
    if is_new:  # Frozen at each call, the garbage of earlier stages would stay.
        freeze_loaded()
    return stage


if __name__ == "__main__":
    sys.exit(main())
