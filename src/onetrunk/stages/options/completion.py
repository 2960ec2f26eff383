"""`onetrunk completion SHELL`: print a script that completes verbs, options and their words.

    source <(onetrunk completion bash)            in ~/.bashrc
    source <(onetrunk completion zsh)             in ~/.zshrc, after compinit
    onetrunk completion fish > ~/.config/fish/completions/onetrunk.fish

The script holds all words, so completing starts no Python.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from onetrunk.stages.options.early import say
from onetrunk.stages.options.plan_words import plan_parser
from onetrunk.stages.options.schema import Option, Parser, UsageError, load_options, verbs
from onetrunk.stages.options.verbs import VERBS

SHELLS = ("bash", "zsh", "fish")
COMMON = ("--config", "--help")
RUN_OPTIONS = ("--from", "--until", "--dry-run", "--overwrite", "--force", "--resume", "--help")
EXTRA = {"ppo": ("--dry_run",), "run": RUN_OPTIONS}

_BASH = """_onetrunk() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}} words=
    if (( COMP_CWORD == 1 )); then
        words={all_verbs}
    else
        case "$verb $before" in
{choices}
        esac
        if [[ -z $words && $word == -* ]]; then
            case "$verb" in
{options}
            esac
        fi
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$word") )
}}
complete -o default -F _onetrunk onetrunk
"""


def main(argv: Sequence[str]) -> int:
    """Print the script of the shell in `argv`; return the exit code."""
    parser = Parser(prog="onetrunk completion", description="Print the completion of a shell.", allow_abbrev=False)
    parser.add_argument("shell", choices=SHELLS, help="bash: put 'source <(onetrunk completion bash)' into ~/.bashrc")
    try:
        shell = parser.parse_args(list(argv)).shell
    except UsageError as error:
        say(f"error: {error}", "all options: onetrunk completion --help")
        return 2
    except SystemExit:
        return 0
    print(script(shell), end="")
    return 0


def script(shell: str) -> str:
    """Return the script of a shell; zsh runs that of bash."""
    shown = {verb: [option for option in load_options(verb) if option.rejected is None] for verb in verbs()}
    if shell == "fish":
        return _fish(VERBS, shown)
    choices, options = [], []
    for verb, members in shown.items():
        for option in members:
            if values_of(option):
                words = " ".join(values_of(option))
                choices.append(f"            {shlex.quote(f'{verb} --{option.name}')}) words={shlex.quote(words)} ;;")
    for verb in VERBS:
        words = " ".join(words_of(verb, shown.get(verb, [])))
        options.append(f"                {verb}) words={shlex.quote(words)} ;;")
    text = _BASH.format(all_verbs=shlex.quote(" ".join(VERBS)), choices="\n".join(choices), options="\n".join(options))
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


def words_of(verb: str, options: Sequence[Option]) -> list[str]:
    """Return the options of a verb as they are written."""
    if verb == "run":
        return list(RUN_OPTIONS)
    if verb == "plan":
        return [flag for action in plan_parser()._actions for flag in action.option_strings if flag.startswith("--")]
    has_checkpoints = any(option.name == "resume_from_checkpoint" for option in options)
    common = [*COMMON, *(["--resume"] if has_checkpoints else [])] if options else ["--help"]
    return [*common, *EXTRA.get(verb, ()), *(f"--{option.name}" for option in options)]


def values_of(option: Option) -> tuple[str, ...]:
    """Return the words that an option may have; empty: any."""
    return option.choices or (("true", "false") if option.type == "bool" else ())


def _fish(all_verbs: dict[str, str], shown: dict[str, list[Option]]) -> str:
    lines = []
    for verb, text in all_verbs.items():
        words = f"complete -c onetrunk -n __fish_use_subcommand -f -a {verb} -d"
        lines.append(f"{words} {shlex.quote(text)}")
        values = {f"--{option.name}": values_of(option) for option in shown.get(verb, [])}
        for word in words_of(verb, shown.get(verb, [])):
            allowed = f" -x -a {shlex.quote(' '.join(values[word]))}" if values.get(word) else ""
            lines.append(f"complete -c onetrunk -n '__fish_seen_subcommand_from {verb}' -l {word[2:]}{allowed}")
    return "\n".join(lines) + "\n"
