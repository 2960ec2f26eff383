"""The command lines of `run`, `report` and `plan`, which take more than settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onetrunk.plan.hardware import MARKETS
from onetrunk.plan.job import DTYPES, SCHEDULES, SPREAD
from onetrunk.plan.search import OBJECTIVES
from onetrunk.plan.timing import ENGINES
from onetrunk.stages.options.reading import DRY_RUN, Parser, UsageError
from onetrunk.utils.shipped import find_config

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
    group.add_argument("--label_prompts", **number, help="prompts that a judge labels before")
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
