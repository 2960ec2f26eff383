"""The options page, `README.md` of this folder: a table per group, from the same texts as `--help`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from onetrunk.stages.options.groups import GROUPS
from onetrunk.stages.options.schema import Option

HEAD = """# Options

Every option of `onetrunk {verbs}`, by group. This page is made of the settings classes by
`python -m onetrunk.stages.options.collect`; edit their help texts, not this file.

- `onetrunk ppo --help` shows the options that matter most, `onetrunk ppo --help all` every one,
  `onetrunk ppo --help rollout` one group.
- `onetrunk config ppo` prints a YAML file with every option, its default and its help text.
- `gradient_checkpointing` is read as `activation_checkpointing` in every stage. Names that other trainers use
  (`base_model`, `lr`, `kl_coef`, ...) are answered with the name here.

How the command line answers before it imports torch: `early.py` reads `options.json`, which is made of the same
classes. It holds the versions of transformers and trl that it was made with; with other versions, only the complete
parser answers.
"""


def page(options: Mapping[str, Sequence[Option]]) -> str:
    """Return the page for the options of each verb."""
    entries: dict[tuple[str, str], dict[str, list[str]]] = {}
    for verb, members in options.items():
        for option in members:
            if option.rejected is None:
                row = f"{_cell(option.help)} | {_default(option)}"
                entries.setdefault((option.group, option.name), {}).setdefault(row, []).append(verb)
    lines = [HEAD.format(verbs="|".join(options))]
    for group, about in GROUPS.items():
        names = [name for of, name in entries if of == group]
        if not names:
            continue
        lines += [f"## {group}: {about}", "", "| option | stages | what it does | default |", "|---|---|---|---|"]
        for name in names:
            for row, stages in entries[group, name].items():
                lines.append(f"| `{name}` | {', '.join(stages)} | {row} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _default(option: Option) -> str:
    return "" if option.default is None else f"`{json.dumps(option.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
