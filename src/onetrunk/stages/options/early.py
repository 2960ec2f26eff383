"""Answer a command line before torch and transformers are imported: help, and every mistake that needs neither.

The checks are those that the settings classes make of themselves; where a class inherits from a trainer's settings, a
stand-in with the same fields runs them. Paths are looked up, too. What is found here is not trusted later: the stage
parses and checks everything again, with the libraries.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from onetrunk.checkpoints.config import CheckpointConfig
from onetrunk.checkpoints.folders import require_free
from onetrunk.data.names import looks_like_path, missing_path
from onetrunk.feedback.costs import CostConfig
from onetrunk.judges.load import REWARD, JudgeConfig, names_a_judge
from onetrunk.ppo.settings import PPOSettings
from onetrunk.reward_models.stage_settings import StageTrainingConfig
from onetrunk.stages.eval.arguments import EvalArguments, check_purpose
from onetrunk.stages.judge.arguments import JudgeArguments, check_judge_is_named
from onetrunk.stages.options.helping import help_text, help_topic
from onetrunk.stages.options.reading import RESUME, parsed_values, read
from onetrunk.stages.options.report_words import report_words
from onetrunk.stages.options.run_words import run_words
from onetrunk.stages.options.schema import Option, UsageError, is_current, load_options
from onetrunk.stages.plain_arguments import (
    JUDGE,
    PAIRWISE,
    WITHOUT_MEANING,
    MergeArguments,
    PPODataArguments,
    PPOJudgeArguments,
    ServeArguments,
    TrainingDataArguments,
    check_judges,
    check_model,
    check_seeds,
    require_output_dir_is_set,
    with_first_word,
)
from onetrunk.utils.escaping import printable
from onetrunk.utils.objects import is_dotted_path
from onetrunk.utils.redaction import add_stored_token, redact
from onetrunk.utils.shipped import find_config, missing_config_hint

Settings = TypeVar("Settings")
Values = Mapping[str, Any]
# Words of `resume_from_checkpoint` that name no folder.
NO_FOLDER = ("none", "false", "true", "auto", "")


def answer(verb: str, argv: Sequence[str], description: str) -> int | None:
    """Print the help of a verb, or what is wrong with the words after it; return the exit code.

    None means that the stage should run: nothing is wrong, or the installed libraries are not those that the options
    are known for.
    """
    try:
        if verb == "run":
            _check_run(argv)
            return None
        if verb == "report":
            report_words(argv)
            return None
        if not is_current():
            return None
        options = load_options(verb)
        topic = help_topic(argv)
        if topic is not None:
            print(help_text(verb, description, options, topic), flush=True)
            return 0
        check(verb, argv, options)
    except SystemExit as end:  # argparse, after --help.
        return int(end.code or 0)
    except UsageError as error:
        say(f"error: {error}", f"all options: onetrunk {verb} --help")
        return 2
    except BrokenPipeError:
        # `onetrunk ppo --help | head`: Python would report the same error again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    return None


def say(*lines: str) -> None:
    """Print lines to stderr, without secrets."""
    add_stored_token()
    print(printable(redact("\n".join(lines))), file=sys.stderr, flush=True)


def check(verb: str, argv: Sequence[str], options: Sequence[Option]) -> None:
    """Check the words after a verb.

    Raises:
        UsageError: a mistake in an option or a YAML file.
        ValueError, FileNotFoundError: a file or folder that is missing or in use.
    """
    dry_run = ("--dry_run", "--dry-run") if verb == "ppo" else ()
    words = [word for word in with_first_word(verb, argv) if word not in dry_run]
    values = parsed_values(read(words, options, knows_ppo=verb == "ppo"), options)
    defaults = {option.name: option.default for option in options}
    try:
        VALUE_CHECKS[verb](values, defaults)
    except UsageError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    if int(os.environ.get("RANK", "0")) == 0:
        check_paths(values)


class _Inherited:
    """Stands where TrainingArguments would, at the end of a chain of `__post_init__`."""

    def __post_init__(self) -> None:
        pass


@dataclass(repr=False)
class _Training(CheckpointConfig, _Inherited):
    """The settings of a training with a trainer of TRL."""


@dataclass(repr=False)
class _RewardTraining(StageTrainingConfig, _Training):
    """The settings of a training of a reward model."""


@dataclass(repr=False)
class _PPO(PPOSettings, _Inherited):
    """PPOConfig without TrainingArguments, whose fields `_filled` adds."""

    def _inherited_defaults(self) -> dict[str, Any]:
        return self.defaults


def _filled(kind: type[Settings], values: Values, defaults: Values) -> Settings:
    """Return an instance that has all values as attributes, and has checked itself."""
    settings = object.__new__(kind)
    vars(settings).update(values, defaults=dict(defaults))
    settings.__post_init__()
    return settings


def _made(kind: type[Settings], values: Values) -> Settings:
    """Return an instance of a class that needs no library; it checks itself."""
    return kind(**{f.name: values[f.name] for f in fields(kind) if f.init})


def check_ppo_settings(values: Values, defaults: Values) -> None:
    """Raise ValueError for a setting of PPO that is out of range or contradicts another one."""
    _filled(_PPO, values, defaults)


def _check_training(values: Values, defaults: Values) -> None:
    _made(TrainingDataArguments, values)
    args = SimpleNamespace(**values)
    require_output_dir_is_set(args)
    check_seeds(args)
    _filled(_RewardTraining if "pipeline_training" in values else _Training, values, defaults)
    if not values.get("student_config"):
        _check_model(values, defaults)


def _check_ppo(values: Values, defaults: Values) -> None:
    data = _made(PPODataArguments, values)
    require_output_dir_is_set(SimpleNamespace(**values))
    args = _filled(_PPO, values, defaults)
    _check_model(values, defaults)
    judges, arguments = _made(JudgeConfig, values), _made(PPOJudgeArguments, values)
    check_judges(data, args, SimpleNamespace(**values), judges, arguments)


def _check_eval(values: Values, defaults: Values) -> None:
    args, judges = _made(EvalArguments, values), _made(JudgeConfig, values)
    _check_model(values, defaults)
    check_purpose(args, judges, SimpleNamespace(**values))


def _check_prefs(values: Values, defaults: Values) -> None:
    from onetrunk.stages.prefs.arguments import PrefsArguments, check_model_is_named  # Here: it imports pyarrow.

    args = _made(PrefsArguments, values)
    _made(JudgeConfig, values)
    _made(CostConfig, values)
    _check_model(values, defaults, needs_model=False)
    check_model_is_named(args, SimpleNamespace(**values))


def _check_judge(values: Values, defaults: Values) -> None:
    _made(JudgeArguments, values)
    _made(CostConfig, values)
    check_judge_is_named(_made(JudgeConfig, values))


def _check_model(values: Values, defaults: Values, needs_model: bool = True) -> None:
    check_model(SimpleNamespace(**values), {name: defaults[name] for name in WITHOUT_MEANING}, needs_model)


def _check_serve(values: Values, defaults: Values) -> None:
    _made(ServeArguments, values)


def _check_merge(values: Values, defaults: Values) -> None:
    _made(MergeArguments, values)


VALUE_CHECKS: dict[str, Callable[[Values, Values], None]] = {
    "sft": _check_training,
    "reward": _check_training,
    "distill": _check_training,
    "ppo": _check_ppo,
    "judge": _check_judge,
    "prefs": _check_prefs,
    "eval": _check_eval,
    "serve": _check_serve,
    "merge": _check_merge,
}


def _check_run(argv: Sequence[str]) -> None:
    name = run_words(argv)["pipeline"]
    path = find_config(name)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        hint = missing_config_hint(name)
        raise UsageError(f"{path} {what} (working folder {Path.cwd()}); {hint}give a pipeline file")


def check_paths(values: Values) -> None:
    """Look up the files and folders that settings name.

    Raises:
        FileNotFoundError, ValueError: one is missing, or output_dir holds another run.
    """
    for key in ("dataset_name", "eval_dataset_name", "unlabelled_dataset_name"):
        name = values.get(key)
        is_remote = bool(values.get("streaming")) and name is not None and ("*" in name or "://" in name)
        if name and not is_remote and looks_like_path(name) and not Path(name).expanduser().exists():
            raise missing_path(name)
    for key in ("constitution", "monitor_constitution"):
        path = values.get(key)
        if path and not Path(path).expanduser().is_file():
            raise FileNotFoundError(
                f"the constitution {path} does not exist (working folder {Path.cwd()}); give a YAML file"
            )
    report = values.get("judge_report")
    if report and not Path(report).is_dir():
        raise FileNotFoundError(
            f"judge_report {report} is no folder (working folder {Path.cwd()}); give the output_dir of onetrunk judge"
        )
    for spec in _listed(values.get("reward_funcs")):
        _check_reward(spec)
    for spec in (spec for key in ("judge", "monitor_judge") for spec in _listed(values.get(key))):
        if isinstance(spec, str) and names_a_judge(spec):
            _check_function(spec, "judge")
        elif spec.startswith(REWARD):
            _check_model_path("reward model", spec.removeprefix(REWARD))
    output_dir, resume = values.get("output_dir"), str(values.get(RESUME)).lower()
    if output_dir and os.path.isfile(output_dir):
        raise ValueError(f"the output folder {output_dir} is a file; name a folder, or move the file away")
    if RESUME in values:
        if resume in ("none", "false", "") and os.path.isdir(output_dir):
            require_free(output_dir, values["overwrite_output_dir"])
        if resume not in NO_FOLDER and not Path(values[RESUME]).is_dir():
            raise FileNotFoundError(
                f"{RESUME} {values[RESUME]} is no folder (working folder {Path.cwd()}); give a checkpoint-* folder,"
                " true for the last one in output_dir, or auto for that one if there is any"
            )
    if values.get("model_name_or_path"):
        _check_model_path("model", values["model_name_or_path"])


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _check_model_path(kind: str, name: str) -> None:
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not Path(name).expanduser().exists():
        where = "" if Path(name).is_absolute() else f" in {Path.cwd()}"
        raise FileNotFoundError(
            f"the {kind} {name!r} cannot be loaded: there is no such folder{where}. Give a folder that holds a model,"
            " or a name on the Hub"
        )


def _check_reward(spec: str) -> None:
    """Raise ValueError if a spec is none of a reward's forms, or names a Python file without the function."""
    is_word = spec in (JUDGE, PAIRWISE)
    if is_word or "/" in spec or ":" in spec or is_dotted_path(spec) or Path(spec).expanduser().is_dir():
        if spec.endswith(".py") and Path(spec).expanduser().is_file():
            there = ", ".join(_public(_body_of(Path(spec).expanduser()) or [], ast.FunctionDef)) or "none"
            raise ValueError(
                f"reward function {spec!r} names a file and no function in it; write '{spec}:NAME' (functions in it:"
                f" {there})"
            )
        _check_function(spec)
        return
    near = difflib.get_close_matches(spec, (JUDGE, PAIRWISE), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"reward function {spec!r} names nothing; {hint}write path/to/file.py:{spec}, package.module.{spec}, or the"
        " folder or Hub name (owner/model) of a reward model"
    )


def _body_of(path: Path) -> list[ast.stmt] | None:
    """Return the statements of a Python file; None if it cannot be read: its import says why, with the line."""
    try:
        return ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return None


def _public(body: Sequence[ast.stmt], kind: type[ast.FunctionDef] | type[ast.ClassDef]) -> list[str]:
    """Return the names of the public functions, or classes, among the statements of a file."""
    return [node.name for node in body if isinstance(node, kind) and node.name[0] != "_"]


def _check_function(spec: str, what: str = "reward function") -> None:
    """Raise ValueError if a spec names a Python file that is missing, or that has no such name."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if path.suffix != ".py":
        return
    if not path.is_file():
        folder = "" if path.is_absolute() else f" (working folder {Path.cwd()})"
        raise ValueError(f"{what} {spec!r}: there is no file {path}{folder}; check the path")
    body = _body_of(path)
    if body is None:
        return
    names = [_defined(node) for node in body]
    if None in names or name in sum(names, []):
        return
    kind, kinds = (ast.ClassDef, "classes") if what == "judge" else (ast.FunctionDef, "functions")
    there = _public(body, kind)
    near = difflib.get_close_matches(name, there, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(there) or f'no {kinds}'}"
    raise ValueError(f"{what} {spec!r}: {path} has no {name!r}; {hint}")


def _defined(node: ast.stmt) -> list[str] | None:
    """Return the names that a statement at the top of a module defines; None if that is not plain to see."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.asname or alias.name for alias in node.names]
        return None if "*" in names else names
    if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
        return [target.id for target in node.targets]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return [] if isinstance(node, ast.Expr) else None
