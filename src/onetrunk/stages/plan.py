"""The stage `onetrunk plan`: memory, time and cost of a PPO run, and the best plan for some hardware.

    onetrunk plan --model Qwen/Qwen2.5-7B --hardware 8xH100-80GB
    onetrunk plan --config llama-3.1-8b/ppo --model meta-llama/Llama-3.1-8B --hardware 2xH100 --write plans/llama
    onetrunk plan --calibrate machine.yaml
    onetrunk plan --check runs/tiny/ppo --hardware_file machine.yaml

It answers in about a second: neither torch nor transformers is imported, except by --calibrate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.plan.cost import check_budget, cost_of
from onetrunk.plan.evaluate import Plan
from onetrunk.plan.hardware import Catalog, Pool, load_catalog, parse_pools
from onetrunk.plan.job import DTYPES, Job, job_of
from onetrunk.plan.launch import Launch, write_files
from onetrunk.plan.other_stages import Around, around_times
from onetrunk.plan.search import Ranked, Space, rejected, search, size_for_all, smallest_hardware, why_not
from onetrunk.plan.shapes import ADAPTER_CONFIG, ModelFacts, read_model
from onetrunk.plan.timing import PIPELINED
from onetrunk.ppo.settings import PPOSettings
from onetrunk.stages.options.reading import UsageError, read, say
from onetrunk.stages.options.table import load_options
from onetrunk.stages.options.words import PlanWords, plan_words
from onetrunk.stages.plan_text import json_text, plan_lines
from onetrunk.utils.files import atomic_write_text, require_output_dir


@dataclass(frozen=True)
class Request:
    """What is planned: a job, the devices for it, and what the launch files name."""

    job: Job
    pools: tuple[Pool, ...]
    catalog: Catalog
    space: Space
    around: Around
    model: str
    base: str
    is_overridden: bool
    reward: str | None


def parse_plan(argv: Sequence[str]) -> tuple[PlanWords, dict[str, Any]]:
    """Return the own options, and the values of every setting of PPO; raises UsageError for a mistake in them."""
    words = plan_words(argv)
    config = [] if words.own["config"] is None else ["--config", words.own["config"]]
    values = {name: option.default for name, option in load_options("ppo").items()}
    values |= read("ppo", [*config, *words.settings])
    settings = object.__new__(_Settings)
    # A plan of a model alone has no folder.
    vars(settings).update(values, output_dir=values["output_dir"] or "runs/plan")
    try:
        settings.__post_init__()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return words, values


class _Inherited:
    def __post_init__(self) -> None:
        pass


class _Settings(PPOSettings, _Inherited):
    """PPOConfig without TrainingArguments, whose import takes seconds; it checks the ranges of PPO's own settings."""

    def _inherited_defaults(self) -> dict[str, Any]:
        return {name: option.default for name, option in load_options("ppo").items()}


def main(argv: Sequence[str]) -> int:
    """Plan, calibrate or check; return the exit code."""
    words, values = parse_plan(argv)
    if words.own["calibrate"] is not None:
        return _calibrate(words)
    if words.own["check"] is not None:
        return _check(words)
    return _plan(words, values)


def request_of(own: Mapping[str, Any], values: Mapping[str, Any]) -> Request:
    """Return what the options ask for.

    Raises:
        ValueError: unknown devices, a model without a config, or settings that fit neither model nor lengths.
    """
    catalog = load_catalog(own["hardware_file"])
    pools = parse_pools(own["hardware"], own["nodes"], catalog)
    name = own["model"] or values["model_name_or_path"]
    if not name:
        raise UsageError("the recipe names no model; give --model")
    model = read_model(name)
    adapter = Path(name).expanduser() / ADAPTER_CONFIG
    reward, reward_name = _reward_of(own, values)
    job = job_of(
        values,
        model,
        reward=reward,
        prompt_tokens=own["prompt_tokens"],
        completion_tokens=own["completion_tokens"],
        spread=own["length_spread"],
        num_rollouts=own["num_rollouts"],
        is_continued=adapter.is_file(),
        on_cpu=all(pool.device.is_cpu for pool in pools),
    )
    space = Space(
        schedules=tuple(own["schedules"]),
        **_stages_of(own, values, pools, model),
        base_bytes=tuple(DTYPES[dtype] for dtype in own["dtypes"] or ()),
        keeps_settings=own["keep_settings"],
        pipelines=(1, *own["pipeline_stages"]),
        serves_reward=reward_name is not None,
    )
    around = Around(
        own["label_prompts"], own["label_completions"], _model_or_none(own["judge_model"]), own["reward_pairs"],
        own["distill_rows"], _model_or_none(own["student_model"]),
    )  # fmt: skip
    base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.is_file() else name
    is_overridden = own["model"] is not None and own["model"] != values["model_name_or_path"]
    return Request(job, pools, catalog, space, around, name, base, is_overridden, reward_name)


def _stages_of(
    own: Mapping[str, Any], values: Mapping[str, Any], pools: Sequence[Pool], model: ModelFacts
) -> dict[str, Any]:
    """Return the fields of Space that say where completions are sampled, and in which stages.

    A recipe with `rollout_backend: pipelined` samples so in every plan, and trains so if it has `pipeline_training`.
    """
    if values["rollout_backend"] != PIPELINED:
        if values["pipeline_training"]:
            raise UsageError(
                "the recipe trains in pipeline stages on rows of a server, which plan does not know; add"
                " --rollout_backend pipelined, or --pipeline_training false"
            )
        return {"engines": tuple(own["engines"])}
    if max(pool.count for pool in pools) == 1 or PIPELINED not in own["engines"]:
        raise UsageError(
            "the recipe's rollout_backend is 'pipelined', which needs --engines pipelined and two or more devices of a"
            " kind; add them, or --rollout_backend local"
        )
    split, layers = tuple(values["pipeline_split"] or ()), model.shape.num_layers
    if split and sum(split) != layers:
        raise UsageError(
            f"pipeline_split has {sum(split)} layers and the model {layers}; give the layers of each stage, or leave"
            " it out"
        )
    # On the command line --pipeline_stages is the plan's own option; no server is tried here.
    asked = own["pipeline_stages"][0] if len(own["pipeline_stages"]) == 1 else None
    return {
        "engines": (PIPELINED,),
        "stages": values["pipeline_stages"] or (len(split) or asked),
        "split": split,
        "stage_training": bool(values["pipeline_training"]) or None,
    }


def _model_or_none(name: str | None) -> Any:
    return None if name is None else read_model(name)


def _reward_of(own: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[ModelFacts | None, str | None]:
    """Return the reward model, and its name if it may stand on a server.

    It is the one that is named, or the recipe's only model whose config is here. One of several rewards stays where it
    is, because the launch files would have to repeat the others.
    """
    written = values["reward_funcs"] or []
    specs = [written] if isinstance(written, str) else list(written)
    if own["reward_model"] is not None:
        return read_model(own["reward_model"]), own["reward_model"] if len(specs) <= 1 else None
    for spec in specs:
        if ":" in spec or spec in ("judge", "pairwise"):
            continue
        try:
            return read_model(spec), spec if len(specs) == 1 else None
        except ValueError:
            continue
    return None, None


def _plan(words: PlanWords, values: Mapping[str, Any]) -> int:
    own = words.own
    request = request_of(own, values)
    ranking = search(request.job, request.pools, request.space, own["objective"], own["market"], own["top"])
    if not ranking:
        raise ValueError(does_not_fit(request, own["market"]))
    ranking = _within_budget(request, own, ranking)
    best = ranking[0].plan
    cost = cost_of(request.job, best, request.catalog)
    around = around_times(request.job, best, request.around)
    if own["write"] is not None:
        for path in _write(request, ranking, own):
            say(f"wrote {path}")
    if own["json"]:
        print(json_text(request.job, ranking, cost, own["market"], around))
    else:
        unused = unused_line(request, best) if own["objective"] == "time" else None
        print("\n".join(plan_lines(request.job, request.pools, ranking, cost, own, around, unused)))
        lost = rejected(request.job, request.pools, request.space)
        if lost:
            print("\n".join(["", "what does not fit at its best, or is not tried", *(f"  {line}" for line in lost)]))
    sys.stdout.flush()
    return 0


def unused_line(request: Request, best: Plan) -> str | None:
    """Return why the fastest plan leaves devices unused, and the size of a rollout that would use them."""
    total = sum(pool.count for pool in request.pools)
    if best.count == total:
        return None
    size = size_for_all(request.job, request.pools, request.space, best)
    reason = "no plan with more of them is faster"
    if size is not None:
        given = request.job.rollout_batch_size
        reason = f"processes have equally many prompts; rollout_batch_size {size} instead of {given} would use all"
    return f"{total - best.count} of {total} devices are unused: {reason}"


def _within_budget(request: Request, own: Mapping[str, Any], ranking: list[Ranked]) -> list[Ranked]:
    """Return the plans that the budget allows, the best first; the cheapest of all if it allows no other.

    Raises:
        ValueError: even the cheapest plan costs more.
    """
    if own["budget"] is None:
        return ranking
    market = own["market"]
    cheapest = search(request.job, request.pools, request.space, "cost", market, 1)
    check_budget(cost_of(request.job, cheapest[0].plan, request.catalog), market, own["budget"])
    kept = [e.plan for e in ranking if cost_of(request.job, e.plan, request.catalog).total(market) <= own["budget"]]
    plans = kept or [cheapest[0].plan]
    return [Ranked(plan, why_not(plan, plans[0], own["objective"], market)) for plan in plans]


def does_not_fit(request: Request, market: str) -> str:
    """Return why nothing fits, and the cheapest hardware on which something does."""
    reasons = rejected(request.job, request.pools, request.space)
    pools = " + ".join(map(str, request.pools))
    found = smallest_hardware(request.job, request.catalog, request.space, market)
    if not reasons:
        size = request.job.rollout_batch_size
        divisors = [d for d in range(1, min(size, 4096) + 1) if size % d == 0]
        reasons = [f"no number of processes divides rollout_batch_size and num_minibatches; of {divisors[:6]} ..."]
    hint = "no known device holds it, not even 64 of the largest"
    if found is not None:
        hint = f"the smallest hardware on which it fits is {found[0]}, at ${found[1]:.2f} per hour ({market})"
    settings = "" if request.space.base_bytes else "; --dtypes nf4 quantises the base"
    return f"nothing fits {pools}: {'; '.join(reasons[:3])}. {hint[0].upper()}{hint[1:]}{settings}"


def _write(request: Request, ranking: Sequence[Ranked], own: Mapping[str, Any]) -> list[Path]:
    """Write the launch files and the numbers of the best plan."""
    best = ranking[0].plan
    folder = require_output_dir(own["write"])
    config = own["config"] or "YOUR_RECIPE.yaml"
    launch = Launch(
        request.job, best, request.catalog, config, request.model, request.base, str(folder), own["market"],
        request.is_overridden, request.reward,
    )  # fmt: skip
    paths = write_files(launch)
    cost = cost_of(request.job, best, request.catalog)
    numbers = json_text(request.job, ranking, cost, own["market"], around_times(request.job, best, request.around))
    atomic_write_text(folder / "plan.json", numbers + "\n")
    return [*paths, folder / "plan.json"]


def _calibrate(words: PlanWords) -> int:
    from onetrunk.plan.calibrate import calibrate, hardware_text

    path = Path(words.own["calibrate"]).expanduser()
    if path.is_dir():
        raise ValueError(f"--calibrate {path} is a folder; name the file that is written")
    say("measuring this machine; about a minute, with nothing else running")
    measured = calibrate(load_catalog(words.own["hardware_file"]))
    atomic_write_text(path, hardware_text(measured))
    print("\n".join(measured.lines()))
    print(f"wrote {path}; use it with --hardware_file {path} --hardware {measured.device.name}")
    return 0


def _check(words: PlanWords) -> int:
    from onetrunk.plan.check import check_lines, check_run

    own = words.own
    folder = Path(own["check"])
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder (working folder {Path.cwd()}); give the output_dir of a run")
    defaults = {name: option.default for name, option in load_options("ppo").items()}
    catalog = load_catalog(own["hardware_file"])
    checked = check_run(folder, defaults, catalog, own)
    print("\n".join(check_lines(checked)))
    return 0
