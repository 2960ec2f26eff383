"""The texts that explain options: `onetrunk VERB --help`, and the YAML of `onetrunk config VERB`."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Sequence

from onetrunk.stages.options.groups import FIRST, GROUPS
from onetrunk.stages.options.reading import HELP_WORDS, RESUME
from onetrunk.stages.options.schema import Option, UsageError

WIDTH, INDENT = 100, 34
ALL = "all"
# Values of the options without which a stage does not start, for the YAML of `onetrunk config`.
_NEEDED = {
    "model_name_or_path": "path/or/hub-name",
    "dataset_name": "rows.jsonl",
    "output_dir": "runs/new",
}
NEEDED = {
    "sft": _NEEDED,
    "judge": {"dataset_name": "rows.jsonl", "output_dir": "runs/new", "judge": ["reward:path/of/a/reward-model"]},
    "prefs": {**_NEEDED, "judge": ["rubric"], "constitution": "constitution.yaml"},
    "reward": _NEEDED,
    "distill": {**_NEEDED, "teacher": ["path/of/a/reward-model"]},
    "ppo": {**_NEEDED, "reward_funcs": ["rewards.py:score"]},
    "eval": {**_NEEDED, "reward_funcs": ["rewards.py:score"]},
    "serve": {"model": "path/or/hub-name"},
    "merge": {"adapter": "runs/new", "output_dir": "runs/merged"},
}


def help_topic(argv: Sequence[str]) -> str | None:
    """Return what `--help` asks about: all, a group, an option, or "" for the overview. None without --help."""
    for index, word in enumerate(argv):
        if word in HELP_WORDS:
            following = argv[index + 1] if index + 1 < len(argv) else ""
            return "" if following.startswith("-") else following
    return None


def help_text(verb: str, description: str, options: Sequence[Option], topic: str = "") -> str:
    """Return the help text of a verb: the options that matter most, or those that `topic` names.

    Raises:
        UsageError: `topic` is neither all, nor a group, nor an option.
    """
    shown = [option for option in options if option.rejected is None]
    topic = topic.removeprefix("--").replace("-", "_")
    groups = [group for group in GROUPS if any(option.group == group for option in shown)]
    if topic == ALL:
        chosen = shown
    elif topic in groups:
        chosen = [option for option in shown if option.group == topic]
    elif topic:
        chosen = [option for option in shown if option.name == topic]
        if not chosen:
            names = [*groups, *(option.name for option in shown)]
            near = difflib.get_close_matches(topic, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the groups are {', '.join(groups)}"
            raise UsageError(f"--help {topic}: no such group or option; {hint}")
    else:
        chosen = [option for option in shown if option.name in FIRST[verb].split()]
    lines = [] if topic not in ("", ALL) else _introduction(verb, description, options, len(shown))
    for group in groups:
        members = [option for option in chosen if option.group == group]
        if members:
            lines += ["", f"{group}: {GROUPS[group]}"]
            lines += [line for option in members for line in _explained(option)]
    return "\n".join([*lines, *([] if topic else _names(verb, groups, shown))]).lstrip("\n")


def _introduction(verb: str, description: str, options: Sequence[Option], count: int) -> list[str]:
    lines = [f"usage: onetrunk {verb} --config FILE.yaml [--option value ...]", "", description.rstrip(".") + ".", ""]
    lines += _entry("--config FILE", "YAML file with options under the names below; the command line overrides it.")
    if any(option.name == RESUME for option in options):
        lines += _entry(
            "--resume auto",
            "Resume from the last checkpoint in output_dir, if there is one; or true, or a checkpoint folder.",
        )
    if verb == "ppo":
        lines += _entry("--dry_run", "Check everything, print rows, steps and memory; train and write nothing.")
    lines += _entry(
        "--help TOPIC", f"all: every option ({count}); a group below, such as {FIRST_GROUP[verb]}; or an option."
    )
    return lines


FIRST_GROUP = {
    "sft": "sequences", "judge": "judges", "prefs": "pairs", "reward": "model", "distill": "student",
    "ppo": "rollout", "eval": "judges", "serve": "server", "merge": "hub",
}  # fmt: skip


def _names(verb: str, groups: Sequence[str], shown: Sequence[Option]) -> list[str]:
    lines = ["", f"All options by group; `onetrunk config {verb}` prints them as a YAML file with comments."]
    for group in groups:
        names = " ".join(option.name for option in shown if option.group == group)
        lines += textwrap.wrap(f"{group}: {names}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _explained(option: Option) -> list[str]:
    text = option.help
    if option.choices and not all(choice in text for choice in option.choices):
        text = f"{text} One of {', '.join(option.choices)}."
    return _entry(f"--{option.name}", f"{text} {default_text(option)}".strip())


def default_text(option: Option) -> str:
    """Return the default in brackets, as a YAML value; "" where there is none."""
    return "" if option.default is None else f"[{json.dumps(option.default)}]"


def _entry(flag: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    head = f"  {flag}"
    if len(head) >= INDENT:
        return [head, *(" " * INDENT + line for line in lines)]
    return [head.ljust(INDENT) + (lines or [""])[0], *(" " * INDENT + line for line in lines[1:])]


def config_text(verb: str, description: str, options: Sequence[Option]) -> str:
    """Return a YAML file with every option of a verb and its default, as comments; what a stage needs is set."""
    lines = [
        f"# onetrunk {verb}: {description}.",
        "# Every option with its default. Remove the # in front of a name to set another value.",
    ]
    needed = NEEDED[verb]
    for group, about in GROUPS.items():
        members = [option for option in options if option.group == group and option.rejected is None]
        if members:
            lines += ["", f"# ---- {group}: {about}"]
        for option in members:
            lines += textwrap.wrap(option.help, 116, initial_indent="# ", subsequent_indent="# ")
            is_needed = option.name in needed
            value = json.dumps(needed[option.name] if is_needed else option.default, ensure_ascii=False)
            lines.append(f"{'' if is_needed else '#'}{option.name}: {value}")
    return "\n".join(lines) + "\n"
