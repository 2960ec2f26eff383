"""Read a command line, its YAML file and the heads of files that it names: every mistake becomes one message.

The command line calls this before it imports torch; `stages/arguments.py` then makes the dataclasses. Of files only
what every reader of a stage would reject is an error here; the stage itself checks the rest. `run`,
`report` and `plan` take more than settings (`report_words` and the like).
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from onetrunk.judges.constitution import load_constitution
from onetrunk.plan.hardware import MARKETS
from onetrunk.plan.job import DTYPES, SCHEDULES, SPREAD
from onetrunk.plan.search import OBJECTIVES
from onetrunk.plan.timing import ENGINES
from onetrunk.ppo.foreign_names import explain_key
from onetrunk.stages.options.table import Option, load_options, shown_options
from onetrunk.utils.files import looks_like_path, parse_json, read_yaml
from onetrunk.utils.redaction import SECRET_KEYWORDS, add_stored_token, is_secret_name, shown
from onetrunk.utils.shipped import find_config, missing_config_hint, with_shipped_files
from onetrunk.utils.versions import RENAMED
from onetrunk.verbs import VERBS

AUTO = "auto"
RESUME = "resume_from_checkpoint"
# Of the stages; not an option, because a YAML file cannot have it.
DRY_RUN = ("--dry_run", "--dry-run")
# A larger file of rows is left to the stage.
MOST_BYTES = 2**23
TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


class UsageError(ValueError):
    """A mistake on the command line or in the YAML file."""


def say(*lines: str, after_bar: bool = False) -> None:
    """Print lines to stderr, without secrets and control characters.

    `after_bar` first ends a line that may hold a progress bar.
    """
    add_stored_token()
    print(shown("\n".join(["", *lines] if after_bar else lines)), file=sys.stderr, flush=True)


class FileFault(ValueError):
    """A mistake in a file that a setting names."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse would print all options and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser(options: Iterable[Option]) -> Parser:
    """Return a parser for the words of these options; options that are not given have no value."""
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in options:
        extra: dict[str, Any] = {}
        if "list" in option.kinds:
            extra["nargs"] = "+"
        elif "bool" in option.kinds:
            extra = {"nargs": "?", "const": True}
        names = [option.name, *(old for old, new in RENAMED.items() if new == option.name)]
        words = [word for name in names for word in flags(name)]
        parser.add_argument(*words, dest=option.name, type=_reader(option), choices=option.choices, **extra)
        if option.default is True and "bool" in option.kinds:
            parser.add_argument(*flags(f"no_{option.name}"), dest=option.name, action="store_false")
    return parser


def flags(name: str) -> list[str]:
    """Return the ways to write an option on the command line."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def _reader(option: Option) -> Callable[[str], Any]:
    """Return the function that reads the text of a value, or of an entry of a list."""
    kinds = {option.entries} if "list" in option.kinds else option.kinds - {"NoneType"}
    if option.is_mapping:
        return _read_mapping_text
    if "str" in kinds or "Any" in kinds:
        return _one_text if "list" in option.kinds and option.name != "stop_tokens" else str
    if kinds == {"bool"}:
        return read_bool
    number = float if "float" in kinds else int

    def read(text: str) -> Any:
        text = _one_text(text) if "list" in option.kinds else text
        return None if "NoneType" in option.kinds and text.lower() in ("none", "null") else number(text)

    read.__name__ = number.__name__  # argparse names it in its messages.
    return read


def _one_text(text: str) -> str:
    """Return an entry of a list; several in one text are a mistake."""
    parts = [part.strip(" '\"") for part in text.strip("[]").split(",")]
    if len(parts) > 1 and "://" not in text:
        several = f"{' '.join(parts)} on the command line, [{', '.join(parts)}] in YAML"
        raise argparse.ArgumentTypeError(f"{text!r} is one text; write several as {several}")
    return text


def read_bool(text: str) -> bool:
    if text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false; write one of them")


def _read_mapping_text(text: str) -> dict[str, Any]:
    value, reason = None, ""
    try:
        value = parse_json(text)
    except ValueError as error:
        reason = f" ({error})"
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r:.200} is not a mapping{reason}; expected a mapping as JSON, such as '{{\"name\": 1}}'"
        )
    return value


def read(verb: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the options that a user set, in the YAML file or the words after `verb`."""
    options, argv = load_options(verb), [with_variables(word) for word in argv]
    explain = partial(_explained, verb=verb)
    reason = secret_in_words(argv)
    if reason:
        raise UsageError(reason)
    parser = make_parser(option for name, option in options.items() if name not in RENAMED)
    parser.add_argument("--config")
    parser.add_argument("--resume", **({"dest": RESUME} if RESUME in options else {"choices": [AUTO]}))
    if VERBS[verb].dry_run:
        parser.add_argument(*DRY_RUN, action="store_true")
    written, unknown = parser.parse_known_args(_with_first_word(verb, argv))
    words = {name: value for name, value in vars(written).items() if name in options}
    for name, value in words.items():
        reason = secret_in_setting(name, value)
        if reason:
            raise UsageError(f"{name} {reason}")
    values, faults = _read_file(written.config, options, explain) if "config" in written else ({}, [])
    faults += _unknown_words(unknown, options, explain)
    if faults:
        raise UsageError("\n".join(faults))
    return values | words


def require_folders(verb: str, values: Mapping[str, Any]) -> None:
    """Raise UsageError where the first word of a command, or a run of a report, is a folder that is not there."""
    source = values.get(VERBS[verb].first_word)
    on_hub = source and "/" in source and not source.startswith("runs/") and not looks_like_path(source)
    for name in [*values.get("runs", ()), *([source] if source and not on_hub else [])]:
        if not Path(name).exists():
            hint = "" if verb == "report" else ", or a name on the Hub, OWNER/NAME"
            where = f"(working folder {Path.cwd()})"
            raise UsageError(f"{name} does not exist {where}; give the output_dir of a run{hint}")


def _explained(key: str, verb: str) -> str:
    known = [option.name for option in shown_options(verb)]
    others = [other.name for other in VERBS.values() if other.has_settings and key in load_options(other.name)]
    return explain_key(key, known, others)


def _with_first_word(verb: str, argv: Sequence[str]) -> list[str]:
    name = VERBS[verb].first_word
    return [f"--{name}", *argv] if name and argv and not argv[0].startswith("-") else list(argv)


def _unknown_words(unknown: Sequence[str], options: Mapping[str, Option], explain: Callable[[str], str]) -> list[str]:
    # `-lr 3` and `lr=3` are written too; a negative number is a value.
    written = [word for word in unknown if re.match(r"--|-[A-Za-z]|[A-Za-z_]+=", word)]
    names = [word.lstrip("-").split("=")[0].replace("-", "_") for word in written]
    wrong = [(word, name) for word, name in zip(written, names, strict=True) if name in options]
    if wrong:
        return [f"{word!r} is not an option; write --{name} VALUE" for word, name in wrong]
    if names or not unknown:
        return [explain(key) for key in dict.fromkeys(names)]
    hint = f"; for a recipe write --config {unknown[0]}" if unknown[0].endswith((".yaml", ".yml")) else ""
    return [f"{unknown[0]!r} is not an option; options are written --name value{hint}"]


def with_variables(value: Any, place: str = "") -> Any:
    """Return a value of a YAML file, or a word, with each ${NAME} replaced by the environment variable.

    A `~/` at its start is the home folder, also in `--output_dir=~/runs`, where a shell leaves it.
    """
    if isinstance(value, dict):
        return {key: with_variables(entry, place) for key, entry in value.items()}
    if isinstance(value, list):
        return [with_variables(entry, place) for entry in value]

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ or is_secret_name(match[1]):
            fault = "is a secret" if is_secret_name(match[1]) else "is not set"
            raise UsageError(f"{place}{value!r} names {match[0]}, which {fault}; write the value itself")
        return os.environ[match[1]]

    if not isinstance(value, str):
        return value
    text = re.sub(r"\$\{(\w+)\}", variable, value)
    return re.sub(r"^(--[\w-]+=)?~/", lambda match: f"{match[1] or ''}{os.path.expanduser('~')}/", text)


def read_mapping(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in a YAML file, and the line of each of its top-level keys."""
    try:
        value, lines = read_yaml(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not isinstance(value, dict):
        content = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise UsageError(f"{path} {content}; expected lines of the form 'key: value'")
    return with_variables(value, f"{path}: "), lines


def _read_file(
    name: str, options: Mapping[str, Option], explain: Callable[[str], str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings in a YAML file and all that is wrong with them."""
    path = find_config(name)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(
            f"the config file {path} {what} (working folder {Path.cwd()}); {missing_config_hint(name)}give an existing"
            " YAML file"
        )
    written, lines = read_mapping(path)
    values: dict[str, Any] = {}
    faults = []
    for key, value in with_shipped_files(written).items():
        ours = RENAMED.get(key, key)
        try:
            reason = secret_in_setting(key, value)
            if reason:
                raise ValueError(f"{key} {reason}")
            if ours not in options:
                raise ValueError(explain(key))
            elif ours != key and ours in written:
                raise ValueError(f"{key} and {ours} are the same setting; keep {ours}")
            else:
                values[ours] = yaml_value(options[ours], value)
        except ValueError as error:
            faults.append(f"{path} line {lines[key]}: {error}")
    return values, faults


def yaml_value(option: Option, value: Any) -> Any:
    """Return a value of a YAML file as the option takes it. A number may be written as a text, such as 1e-3."""
    name, kinds = option.name, option.kinds
    if value is None and "NoneType" not in kinds:
        raise ValueError(f"{name} is empty; give a value or remove the line")
    if isinstance(value, bool) and "bool" not in kinds and "str" in kinds and name != RESUME:
        raise ValueError(f"{name} is read as {value} by YAML; write the word in quotes")
    if isinstance(value, list) and "list" in kinds:
        return [_typed(option, entry, {option.entries}, f"{name} holds") for entry in value]
    if value is None or "Any" in kinds or name == RESUME:
        return value
    value = _typed(option, value, kinds, f"{name} is")
    # argparse checks the choices of words only.
    if option.choices and value not in option.choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(option.choices)}")
    return [value] if "list" in kinds and "str" not in kinds else value


def _typed(option: Option, value: Any, kinds: Iterable[str], place: str) -> Any:
    """Return a value, or an entry of a list, of one of the types `kinds`; raises ValueError for another type."""
    if isinstance(value, str):
        try:
            return _reader(option)(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{option.name}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{place} {value!r}; expected {_names(kinds)}") from error
    if type(value).__name__ in kinds or (type(value) is int and "float" in kinds):
        return value
    hint = ", in quotes where YAML reads it otherwise" if set(kinds) == {"str"} else ""
    raise ValueError(f"{place} {value!r:.100} ({type(value).__name__}); expected {_names(kinds)}{hint}")


def _names(kinds: Iterable[str]) -> str:
    return " or ".join(sorted(kind for kind in kinds if kind != "NoneType"))


def secret_in_words(words: Sequence[str]) -> str | None:
    """Return why a command line is rejected: it holds a secret. None if it does not."""
    for word in words:
        name, _, value = word.partition("=")
        if is_secret_name(name) and name.isidentifier() and value:
            return (
                f"{name}=... is rejected: a command line is visible to all users of the machine; export {name} before"
            )
        name = name.removeprefix("--").replace("-", "_")
        if word.startswith("--") and (name in SECRET_KEYWORDS or name.endswith(("_api_key", "_password", "_secret"))):
            return f"--{name} is rejected: a command line is visible to all users of the machine; {_alternative(name)}"
    return None


def secret_in_setting(key: str, value: Any) -> str | None:
    """Return why a YAML entry or a JSON option is rejected, to be printed after its key; None if it is not."""
    if key in SECRET_KEYWORDS and isinstance(value, str) and value:
        return f"holds a secret, and recipes are shared; remove it and {_alternative(key)}"
    name = next(_secret_keywords(value), None) if key.endswith("_kwargs") else None
    return name and f"holds a secret in {name}; remove it and {_alternative(name)}"


def _alternative(name: str) -> str:
    if name.endswith("api_key"):
        return "put the key into an environment variable and name it in judge_api_key_env"
    return "set the environment variable HF_TOKEN, or run `hf auth login` once"


def _secret_keywords(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key in SECRET_KEYWORDS and isinstance(entry, str) and entry:
                yield key
            yield from _secret_keywords(entry)


def check_files(values: Mapping[str, Any], verb: str) -> None:
    """Raise FileFault for a mistake in a constitution, or for columns that the rows of a local file do not have."""
    try:
        for name in ("constitution", "monitor_constitution"):
            if values.get(name):
                load_constitution(values[name])
        path = Path(os.path.expanduser(values.get("dataset_name") or ""))
        names = column_names(path) if path.is_file() and path.stat().st_size <= MOST_BYTES else None
        if names and not values.get("environment"):
            check_columns(names, values.get("dataset_columns") or {}, VERBS[verb].columns)
    except ValueError as error:
        raise FileFault(str(error)) from error


def check_columns(names: list[str], renamed: Mapping[str, str], needed: tuple[tuple[str, ...], ...]) -> None:
    """Raise ValueError if columns that are renamed (ours to theirs) or needed are missing."""
    if renamed:
        from onetrunk.data.files import check_renaming  # The import takes most of a second.

        check_renaming(names, renamed)
    ours = {name for name in names if name not in renamed.values()} | set(renamed)
    readable = ours | {"messages"} if "conversations" in ours else ours  # As ShareGPT calls them.
    if needed and not any(readable.issuperset(columns) for columns in needed):
        from onetrunk.data.files import missing_columns

        raise missing_columns(sorted(ours), ", or ".join(" and ".join(columns) for columns in needed))


def column_names(path: Path) -> list[str] | None:
    """Return the columns of a file of rows; None for one of another kind, or one that its reader will reject."""
    try:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                return next(csv.reader(file), None)
        if path.suffix == ".jsonl":
            rows = [parse_json(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
            return list(dict.fromkeys(name for row in rows for name in row.keys()))
    except (OSError, ValueError, AttributeError, csv.Error):
        return None
    return None


DESCRIPTION = """Memory, time and cost of a PPO run, and the best plan for the hardware that you have or would rent.
Arithmetic: it needs no GPU, no network and no weights, only the config.json of the model."""
EPILOG = """Settings of `onetrunk ppo` are accepted too (--rollout_batch_size 256) and change the planned recipe.
Examples: onetrunk plan --model Qwen/Qwen2.5-7B --hardware 8xH100-80GB;
onetrunk plan --config llama-3.1-8b/ppo --model meta-llama/Llama-3.1-8B --hardware 8xH100 --nodes 2;
onetrunk plan --calibrate machine.yaml;
onetrunk plan --check runs/tiny/ppo --hardware THIS-CPU --hardware_file machine.yaml"""
# Largest number of an option of `plan`.
MOST = 10**9


def run_words(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `onetrunk run`; stages are given by their names.

    Raises:
        UsageError: a word that is not an option, or a file that does not exist.
        SystemExit: after --help.
    """
    text = "A whole pipeline, such as SFT, preferences, reward model, PPO and evaluation, as one resumable chain."
    parser = Parser(prog="onetrunk run", description=text, allow_abbrev=False)
    parser.add_argument("pipeline", help="a YAML file with output_dir and stages")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="begin here; earlier stages' output is used")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="end with this stage")
    parser.add_argument(*DRY_RUN, dest="is_dry", action="store_true", help="show what would run, and run nothing")
    text = "let a stage start over if something it depends on has changed; deletes its checkpoints and result"
    parser.add_argument("--overwrite", dest="overwrites", action="store_true", help=text)
    text = "start this stage over, even if it is done"
    parser.add_argument("--force", dest="forced", metavar="STAGE", action="append", default=[], help=text)
    parser.add_argument("--resume", choices=["auto"], help="has no effect: a pipeline always resumes where it stopped")
    # Elsewhere the file stands after --config.
    args = parser.parse_args([word.removeprefix("--config=") for word in argv if word != "--config"])
    if not find_config(args.pipeline).is_file():
        raise UsageError(
            f"the pipeline {args.pipeline} does not exist (working folder {Path.cwd()}); give a YAML file"
        )
    return args


def report_words(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `onetrunk report`; UsageError for an unknown option, SystemExit after --help."""
    text = "One page about how a run went, or about several runs or a pipeline."
    parser = Parser(prog="onetrunk report", description=text, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="output_dir of a stage or of a pipeline")
    text = "folder to write to; default: _report in the run's folder, of several runs in the folder around them"
    parser.add_argument("--output_dir", dest="target", metavar="FOLDER", help=text)
    return parser.parse_args(list(argv))


def positive(text: str) -> float:
    """Return a number above 0, as an integer where it is one."""
    number = float(text)
    if not 0 < number <= MOST:
        raise argparse.ArgumentTypeError(f"{text:.40} is not above 0, and at most {MOST:g}")
    return int(number) if number.is_integer() else number


def plan_parser() -> Parser:
    parser = Parser(
        prog="onetrunk plan", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    group = parser.add_argument_group("what is planned")
    named, number = {"metavar": "NAME"}, {"type": positive, "metavar": "N"}
    group.add_argument("--config", metavar="FILE", help="recipe of onetrunk ppo, such as llama-3.1-8b/ppo")
    group.add_argument("--model", **named, help="folder with a config.json, or a name; instead of the recipe's")
    group.add_argument("--reward_model", **named, help="reward model that the trainer loads; None: the recipe's")
    group.add_argument("--prompt_tokens", **number, help="mean tokens of a prompt; None: half the longest")
    group.add_argument("--completion_tokens", **number, help="mean tokens of a completion; None: half the longest")
    text = "standard deviation of the logarithm of completion lengths; 0: all equally long"
    group.add_argument("--length_spread", type=float, default=SPREAD, metavar="X", help=text)
    group.add_argument("--label_prompts", **number, help="prompts that a judge labels before PPO")
    group.add_argument("--label_completions", **number, default=4, help="completions of each of them")
    group.add_argument("--judge_model", **named, help="model of the judge; None: the base")
    group.add_argument("--reward_pairs", **number, help="pairs that a reward model trains on")
    group.add_argument("--distill_rows", **number, help="rows that a student trains on")
    group.add_argument("--student_model", **named, help="model of the student; None: the base")
    group = parser.add_argument_group("hardware and money")
    group.add_argument("--hardware", metavar="POOLS", help="such as 8xH100-80GB or 8xH100-80GB+4xL40S")
    group.add_argument("--nodes", **number, help="machines that each have these devices")
    group.add_argument("--hardware_file", metavar="FILE", help="devices and prices of yours; see plan/hardware.yaml")
    group.add_argument("--market", choices=tuple(MARKETS), default="on_demand", help="price that counts")
    group.add_argument("--budget", type=positive, metavar="USD", help="a plan that costs more is rejected")
    group = parser.add_argument_group("what may be varied")
    group.add_argument("--objective", choices=OBJECTIVES, default="time", help="fewest seconds, dollars or devices")
    group.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES, help="schedules that are tried")
    group.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="where completions are sampled")
    group.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), help="precisions of the base; None: the recipe's")
    text = "plan with the recipe's microbatch, checkpointing and offloading"
    group.add_argument("--keep_settings", action="store_true", help=text)
    group = parser.add_argument_group("what comes out")
    group.add_argument("--top", **number, default=8, help="plans in the table")
    group.add_argument("--json", action="store_true", help="print JSON instead of tables")
    group.add_argument("--write", metavar="FOLDER", help="folder for the launch files and plan.json of the best plan")
    group = parser.add_argument_group("this machine and finished runs").add_mutually_exclusive_group()
    text = "measure this machine (about a minute) and write a hardware file"
    group.add_argument("--calibrate", metavar="FILE", help=text)
    group.add_argument("--check", metavar="RUN_DIR", help="compare the prediction with the log of a run")
    return parser


def plan_words(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the own options of `onetrunk plan`, by name, and the words that are settings of PPO.

    Raises:
        UsageError: a word that is not an option, or a value out of range.
        SystemExit: after --help.
    """
    known, rest = plan_parser().parse_known_args(list(argv))
    own = vars(known)
    has_recipe = own["config"] is not None or own["model"] is not None
    if not 0 <= own["length_spread"] <= 3:
        raise UsageError(f"--length_spread is {own['length_spread']:g}; give a number from 0 to 3")
    if own["calibrate"] is None and own["hardware"] is None:
        raise UsageError("--hardware is missing; write for example --hardware 8xH100-80GB (or --hardware CPU)")
    if own["calibrate"] is None and own["check"] is None and not has_recipe:
        raise UsageError("neither --config nor --model is given; write for example --model Qwen/Qwen2.5-7B")
    if own["calibrate"] is not None and rest:
        raise UsageError(f"--calibrate takes no settings of a recipe: {' '.join(rest)}")
    return own, rest
