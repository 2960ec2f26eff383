"""What explains options: `onetrunk VERB --help`, the YAML of `onetrunk config VERB`, and completion in a shell."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import textwrap
from collections.abc import Sequence

from onetrunk.stages.options.parser import TRUE_OR_FALSE, UsageError, make_parser
from onetrunk.stages.options.plan_words import plan_parser
from onetrunk.stages.options.reading import HELP_WORDS, RESUME
from onetrunk.stages.options.table import Option, load_options, shown_options
from onetrunk.stages.options.verbs import SETTINGS_MODULES, VERBS
from onetrunk.stages.options.words import run_parser

WIDTH, INDENT = 100, 34
ALL = "all"
_TRAINING = "model_name_or_path dtype dataset_name eval_size"
_RUN = "learning_rate num_train_epochs max_steps per_device_train_batch_size seed output_dir overwrite_output_dir"
_RUN += " save_steps eval_strategy report_to logging_steps bf16"
# Verb -> the options that are explained first.
FIRST = {
    "ppo": "model_name_or_path lora_r dataset_name eval_size rollout_batch_size num_rollouts max_completion_length"
    " use_vllm reward_funcs missing_eos_penalty beta num_ppo_epochs num_minibatches value_head"
    " learning_rate per_device_train_batch_size output_dir overwrite_output_dir report_to judge",
    "sft": f"{_TRAINING} {_RUN} use_peft lora_r max_length packing",
    "reward": f"{_TRAINING} {_RUN} use_peft lora_r adapter_layers max_length",
    "distill": f"{_TRAINING} {_RUN} teacher student_config student_tokenizer",
    "judge": "dataset_name dataset_columns dataset_split dataset_config output_dir judge constitution rubric"
    " judge_model judge_api_key_env judge_max_concurrency judge_batch_size judge_prices judge_budget_usd"
    " max_failed_fraction",
    "prefs": "model_name_or_path dtype dataset_name dataset_columns dataset_split output_dir overwrite_output_dir"
    " max_completion_length temperature seed judge constitution judge_model mode num_generations pairing completions"
    " engine shard limit",
    "eval": "model_name_or_path dtype dataset_name dataset_columns dataset_split output_dir max_prompt_length"
    " max_completion_length temperature seed judge constitution judge_model reward_funcs reward_weights opponent"
    " tie_margin checks bf16",
    "serve": "model host port dtype max_lora_rank max_loras max_model_len tensor_parallel_size gpu_memory_utilization"
    " device api_key_env python command print revision",
    "merge": "adapter output_dir overwrite_output_dir revision dtype push_to_hub hub_model_id hub_private_repo"
    " hub_revision",
}
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
    """Return what `--help` asks about: all, a part of a name, or "" for the overview. None without --help."""
    for index, word in enumerate(argv):
        if word in HELP_WORDS:
            following = argv[index + 1] if index + 1 < len(argv) else ""
            return "" if following.startswith("-") else following
    return None


def help_text(verb: str, topic: str = "") -> str:
    """Return the help text of a verb: the options that matter most, or those that `topic` names.

    Args:
        topic: all, an option, or a part of the names of options; "": the overview.

    Raises:
        UsageError: no option has `topic` in its name.
    """
    shown = shown_options(verb)
    topic = topic.removeprefix("--").replace("-", "_")
    if topic in ("", ALL):
        first = FIRST[verb].split()
        chosen = [option for option in shown if topic == ALL or option.name in first]
        lines = _introduction(verb, len(shown))
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
    if topic == "":
        rest = " ".join(option.name for option in shown if option not in chosen)
        lines += ["", f"The other options (`onetrunk config {verb}` prints a YAML file with all of them):"]
        lines += textwrap.wrap(rest, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def _introduction(verb: str, count: int) -> list[str]:
    lines = [f"usage: onetrunk {verb} --config FILE.yaml [--option value ...]", "", f"{VERBS[verb]}.", ""]
    lines += _entry("--config FILE", "YAML file with options under the names below; the command line overrides it.")
    if RESUME in load_options(verb):
        lines += _entry(
            "--resume auto",
            "Resume from the last checkpoint in output_dir, if there is one; or true, or a checkpoint folder.",
        )
    if verb == "ppo":
        lines += _entry("--dry_run", "Check everything, print rows, steps and memory; train and write nothing.")
    lines += _entry(
        "--help WORD", f"The options with WORD in their names, such as {FIRST[verb].split()[0]}; all: {count}."
    )
    return [*lines, ""]


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


def config_text(verb: str) -> str:
    """Return a YAML file with every option of a verb and its default, as comments; what a stage needs is set."""
    lines = [
        f"# onetrunk {verb}: {VERBS[verb]}.",
        "# Every option with its default. Remove the # in front of a name to set another value.",
    ]
    needed = NEEDED[verb]
    for option in shown_options(verb):
        lines += ["", *textwrap.wrap(option.help, 116, initial_indent="# ", subsequent_indent="# ")]
        is_needed = option.name in needed
        value = json.dumps(needed[option.name] if is_needed else option.default, ensure_ascii=False)
        lines.append(f"{'' if is_needed else '#'}{option.name}: {value}")
    return "\n".join(lines) + "\n"


def complete() -> None:
    """Print the verbs, options and words that a shell asks for, and exit; does nothing if no shell asks."""
    import argcomplete

    line = os.environ.get("COMP_LINE", "").split()
    verb = line[1] if len(line) > 1 else ""
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()
    for name, text in VERBS.items():
        parents = [_parser_of(name)] if name == verb else []
        verbs.add_parser(name, parents=parents, add_help=False, help=text)
    argcomplete.autocomplete(parser, always_complete_options="long")


def _parser_of(verb: str) -> argparse.ArgumentParser:
    if verb in ("run", "plan"):
        return run_parser() if verb == "run" else plan_parser()
    parser = make_parser(shown_options(verb) if verb in SETTINGS_MODULES else ())
    for action in parser._actions:
        action.choices = action.choices or (TRUE_OR_FALSE if action.const is True else None)
    for flag in ("--config", "--resume") if verb in SETTINGS_MODULES else ():
        parser.add_argument(flag)
    return parser
