"""What explains options: `onetrunk VERB --help` and `onetrunk config VERB`."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Sequence

from onetrunk.stages.launch import EXPLAINED
from onetrunk.stages.options.reading import RESUME, Parser, UsageError
from onetrunk.stages.options.table import Option, load_options, shown_options
from onetrunk.verbs import VERBS

WIDTH, INDENT = 100, 34
ALL = "all"


def help_topic(argv: Sequence[str]) -> str | None:
    """Return what `--help` asks about: all, a part of a name, or "" for the overview. None without --help."""
    for index, word in enumerate(argv):
        if word in ("-h", "--help"):
            following = argv[index + 1] if index + 1 < len(argv) else ""
            return "" if following.startswith("-") else following
    return None


def help_text(verb: str, topic: str = "") -> str:
    """Return the help text of a verb: the options that matter most, or those that `topic` names.

    Args:
        topic: all, an option, or a part of the names of options; "": the overview.
    """
    shown = shown_options(verb)
    topic = topic.removeprefix("--").replace("-", "_")
    if topic in ("", ALL):
        first = VERBS[verb].explained.split()
        chosen = [option for option in shown if topic == ALL or not first or option.name in first]
        lines = _introduction(verb, shown)
    else:
        names = [option.name for option in shown]
        chosen = [option for option in shown if (topic == option.name if topic in names else topic in option.name)]
        lines = []
        if not chosen:
            near = difflib.get_close_matches(topic, names, n=1)
            raise UsageError(
                f"--help {topic}: no option has that in its name"
                + (f"; did you mean {near[0]!r}?" if near else f"; onetrunk {verb} --help lists them")
            )
    lines += [line for option in chosen for line in _explained(option)]
    rest = " ".join(option.name for option in shown if option not in chosen)
    if topic == "" and rest:
        lines += ["", f"The other options (`onetrunk config {verb}` prints a YAML file with all of them):"]
        lines += textwrap.wrap(rest, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _introduction(verb: str, shown: Sequence[Option]) -> list[str]:
    lines = [f"usage: onetrunk {verb} --config FILE.yaml [--option value ...]", "", f"{VERBS[verb].text}.", ""]
    lines += _entry("--config FILE", "YAML file with options under the names below; the command line overrides it.")
    if RESUME in load_options(verb):
        lines += _entry(
            "--resume auto",
            "Resume from the last checkpoint in output_dir, if there is one; or true, or a checkpoint folder.",
        )
    if VERBS[verb].dry_run:
        lines += _entry("--dry_run", "Check settings, rows and model, print what a run would do; write nothing.")
    if VERBS[verb].launches:
        lines += [line for name, text in EXPLAINED.items() for line in _entry(f"--{name} VALUE", text)]
    text = f"The options with WORD in their names, such as {shown[0].name}; --help all explains all {len(shown)}."
    return [*lines, *_entry("--help WORD", text), ""]


def _explained(option: Option) -> list[str]:
    text = option.help
    if option.choices and not all(choice in text for choice in option.choices):
        text = f"{text} One of {', '.join(option.choices)}."
    default = "" if option.default is None else f" [{json.dumps(option.default)}]"
    return _entry(f"--{option.name}", text + default)


def _entry(flag: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    head = f"  {flag}"
    if len(head) >= INDENT:
        return [head, *(" " * INDENT + line for line in lines)]
    return [head.ljust(INDENT) + (lines or [""])[0], *(" " * INDENT + line for line in lines[1:])]


def config_text(verb: str) -> str:
    """Return a YAML file with every option of a verb and its default, as comments; what a stage needs is set."""
    lines = [
        f"# onetrunk {verb}: {VERBS[verb].text}.",
        "# Every option with its default. Remove the # in front of a name to set another value.",
    ]
    needed = VERBS[verb].needed
    for option in shown_options(verb):
        lines += ["", *textwrap.wrap(option.help, 116, initial_indent="# ", subsequent_indent="# ")]
        is_needed = option.name in needed
        value = json.dumps(needed[option.name] if is_needed else option.default, ensure_ascii=False)
        lines.append(f"{'' if is_needed else '#'}{option.name}: {value}")
    return "\n".join(lines) + "\n"


def parse_config(argv: Sequence[str]) -> tuple[str]:
    """Return the verb of `onetrunk config VERB`; raises UsageError for a mistake in it."""
    parser = Parser(prog="onetrunk config", description=f"{VERBS['config'].text}.", allow_abbrev=False)
    verbs = [verb.name for verb in VERBS.values() if verb.has_settings]
    parser.add_argument("verb", choices=verbs, help="the stage; onetrunk config ppo > ppo.yaml")
    return (parser.parse_args(list(argv)).verb,)


def run(verb: str) -> None:
    print(config_text(verb), end="")
