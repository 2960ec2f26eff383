"""The command lines of `run`, `report` and `plan`, which take more than settings."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onetrunk.plan.hardware import MARKETS
from onetrunk.plan.job import DTYPES, SCHEDULES
from onetrunk.plan.ranges import OPTIONS, require_ranges
from onetrunk.plan.search import OBJECTIVES
from onetrunk.stages.options.reading import Parser, UsageError

DESCRIPTION = """Memory, time and cost of a PPO run, and the best plan for the hardware that you have or would rent.
Arithmetic: it needs no GPU, no network and no weights, only the config.json of the model."""
EPILOG = """Settings of `onetrunk ppo` are accepted too (--rollout_batch_size 256) and change the planned recipe.
Examples: onetrunk plan --model Qwen/Qwen2.5-7B --hardware 8xH100-80GB;
onetrunk plan --config llama-3.1-8b/ppo --model meta-llama/Llama-3.1-8B --hardware 8xH100 --nodes 2;
onetrunk plan --calibrate machine.yaml; onetrunk plan --check runs/tiny/ppo --hardware_file machine.yaml"""
ENGINES = ("local", "pipelined", "colocate", "server")


def run_parser() -> Parser:
    """Return the parser of `onetrunk run`."""
    text = "A whole pipeline, such as SFT, preferences, reward model, PPO and evaluation, as one resumable chain."
    parser = Parser(prog="onetrunk run", description=text, allow_abbrev=False)
    parser.add_argument("pipeline", help="a YAML file with output_dir and stages")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="begin here; earlier stages' output is used")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="end with this stage")
    parser.add_argument("--dry-run", dest="is_dry", action="store_true", help="show what would run, and run nothing")
    text = "let a stage start over if something it depends on has changed; deletes its checkpoints and result"
    parser.add_argument("--overwrite", dest="overwrites", action="store_true", help=text)
    text = "start this stage over, even if it is done"
    parser.add_argument("--force", dest="forced", metavar="STAGE", action="append", default=[], help=text)
    parser.add_argument("--resume", choices=["auto"], help="has no effect: a pipeline always resumes where it stopped")
    return parser


def run_words(argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields of RunArguments in the words after the verb.

    Raises:
        UsageError: a word that is no option.
        SystemExit: after --help.
    """
    words = vars(run_parser().parse_args(list(argv)))
    words.pop("resume")
    return words


def report_words(argv: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ReportArguments in the words after the verb.

    Raises:
        UsageError: a word that is no option, or a price below 0.
        SystemExit: after --help.
    """
    parser = Parser(
        prog="onetrunk report",
        description="One page about how a run went, or about several runs or a pipeline.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="output_dir of a stage or of a pipeline")
    text = "folder to write to; default: _report in the run's folder, of several runs in the folder around them"
    parser.add_argument("--output_dir", dest="target", metavar="FOLDER", help=text)
    text = "price of one GPU for one hour, in any currency; the page then has the cost of each run"
    parser.add_argument("--price_per_gpu_hour", dest="price", type=float, metavar="PRICE", help=text)
    words = vars(parser.parse_args(list(argv)))
    price = words["price"]
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UsageError(f"--price_per_gpu_hour is {price}; give a price, 0 or more")
    return words


@dataclass(frozen=True)
class PlanWords:
    """The own options of `onetrunk plan`, by name, and the words that are settings of PPO."""

    own: dict[str, Any]
    settings: list[str]


def plan_parser() -> Parser:
    """Return the parser of the own options."""
    parser = Parser(
        prog="onetrunk plan", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    about = parser.add_argument_group("what is planned")
    about.add_argument("--config", metavar="FILE", help="recipe of onetrunk ppo, such as llama-3.1-8b/ppo")
    about.add_argument("--model", metavar="NAME", help="folder with a config.json, or a name; instead of the recipe's")
    about.add_argument(
        "--reward_model", metavar="NAME", help="reward model that the trainer loads; None: the recipe's"
    )
    about.add_argument("--num_rollouts", type=int, metavar="N", help="rollouts of the run, instead of the recipe's")
    about.add_argument(
        "--prompt_tokens", type=float, metavar="N", help="mean tokens of a prompt; None: half the longest"
    )
    about.add_argument(
        "--completion_tokens", type=float, metavar="N", help="mean tokens of a completion; None: half the longest"
    )
    text = "standard deviation of the logarithm of completion lengths; 0: all equally long"
    about.add_argument("--length_spread", type=float, default=0.6, metavar="X", help=text)
    about.add_argument("--label_prompts", type=int, default=0, metavar="N", help="prompts that a judge labels before")
    about.add_argument("--label_completions", type=int, default=4, metavar="N", help="completions of each of them")
    about.add_argument("--judge_model", metavar="NAME", help="model of the judge; None: the base")
    about.add_argument("--reward_pairs", type=int, default=0, metavar="N", help="pairs that a reward model trains on")
    about.add_argument("--distill_rows", type=int, default=0, metavar="N", help="rows that a student trains on")
    about.add_argument("--student_model", metavar="NAME", help="model of the student; None: the base")
    _add_hardware(parser)
    search = parser.add_argument_group("what may be varied")
    search.add_argument("--objective", choices=OBJECTIVES, default="time", help="what the best plan has fewest of")
    search.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES, help="schedules that are tried"
    )
    search.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="where completions are sampled")
    search.add_argument(
        "--dtypes", nargs="+", choices=tuple(DTYPES), help="precisions of the base; None: the recipe's"
    )
    text = (
        "stages of a server's pipeline that are tried besides 1; as many batches are in flight. Of a recipe with"
        " rollout_backend pipelined, one number: the stages of the trainer's processes"
    )
    search.add_argument("--pipeline_stages", nargs="+", type=int, default=(), metavar="P", help=text)
    text = "plan with the recipe's microbatch, checkpointing and offloading"
    search.add_argument("--keep_settings", action="store_true", help=text)
    out = parser.add_argument_group("what comes out")
    out.add_argument("--top", type=int, default=8, metavar="N", help="plans in the table")
    out.add_argument("--json", action="store_true", help="print JSON instead of tables")
    out.add_argument("--write", metavar="FOLDER", help="folder for the launch files and plan.json of the best plan")
    other = parser.add_argument_group("this machine and finished runs")
    text = "measure this machine (about a minute) and write a hardware file"
    other.add_argument("--calibrate", metavar="FILE", help=text)
    other.add_argument("--check", metavar="RUN_DIR", help="compare the prediction with the log of a run")
    return parser


def _add_hardware(parser: Parser) -> None:
    group = parser.add_argument_group("hardware and money")
    group.add_argument("--hardware", metavar="POOLS", help="such as 8xH100-80GB or 8xH100-80GB+4xL40S")
    group.add_argument("--nodes", type=int, metavar="N", help="machines that each have these devices")
    group.add_argument("--hardware_file", metavar="FILE", help="devices and prices of yours; see plan/hardware.yaml")
    group.add_argument("--market", choices=MARKETS, default="on_demand", help="price that counts")
    group.add_argument("--budget", type=float, metavar="USD", help="a plan that costs more is refused")


def plan_words(argv: Sequence[str]) -> PlanWords:
    """Return the options in the words after the verb.

    Raises:
        UsageError: a word that is no option, or a value out of range.
        SystemExit: after --help.
    """
    known, rest = plan_parser().parse_known_args(list(argv))
    own = vars(known)
    try:
        require_ranges(own, OPTIONS, "--")
    except ValueError as error:
        raise UsageError(str(error)) from error
    if any(stages < 2 for stages in own["pipeline_stages"]):
        raise UsageError("--pipeline_stages takes numbers from 2 on; one stage is always tried")
    tasks = [name for name in ("calibrate", "check") if own[name] is not None]
    if len(tasks) == 2:
        raise UsageError("--calibrate and --check are two tasks; run one after the other")
    if not tasks and own["hardware"] is None:
        raise UsageError("--hardware is missing; write for example --hardware 8xH100-80GB (or --hardware CPU)")
    if not tasks and own["config"] is None and own["model"] is None:
        raise UsageError("neither --config nor --model is given; write for example --model Qwen/Qwen2.5-7B")
    if tasks == ["calibrate"] and rest:
        raise UsageError(f"--calibrate takes no settings of a recipe: {' '.join(rest)}")
    return PlanWords(own, rest)


READERS = {"run": run_words, "report": report_words}
