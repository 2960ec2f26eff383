"""The stage `onetrunk plan`: memory, time and cost of a PPO run, and the best plan for some hardware.

    onetrunk plan --model Qwen/Qwen2.5-7B --hardware 8xH100-80GB
    onetrunk plan --config llama-3.1-8b/ppo --model meta-llama/Llama-3.1-8B --hardware 2xH100 --write plans/llama
    onetrunk plan --calibrate machine.yaml
    onetrunk plan --check runs/tiny/ppo --hardware_file machine.yaml

It answers in about a second: neither torch nor transformers is imported, except by --calibrate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.costs import ModelShape
from onetrunk.plan.evaluate import cost_of
from onetrunk.plan.hardware import Catalog, Pool, load_catalog, parse_pools
from onetrunk.plan.job import DTYPES, Job, ModelFacts, job_of, read_model, reward_specs
from onetrunk.plan.launch import Launch, write_files
from onetrunk.plan.search import Ranked, Space, rejected, search, smallest_hardware, why_not
from onetrunk.plan.timing import PIPELINED, Around, around_times
from onetrunk.ppo.settings import PPOSettings
from onetrunk.stages.options.reading import UsageError, read, say
from onetrunk.stages.options.table import load_options
from onetrunk.stages.options.words import PlanWords, plan_words
from onetrunk.utils.files import atomic_write_text, require_output_dir


@dataclass(frozen=True)
class Request:
    """What is planned: a job, the devices for it, what may be varied, and the reward model that may be served."""

    job: Job
    pools: tuple[Pool, ...]
    catalog: Catalog
    space: Space
    around: Around
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
        _calibrate(words.own)
    elif words.own["check"] is not None:
        _check(words.own)
    else:
        _plan(words.own, values)
    return 0


def request_of(own: Mapping[str, Any], values: Mapping[str, Any]) -> Request:
    """Return what the options ask for."""
    catalog = load_catalog(own["hardware_file"])
    pools = parse_pools(own["hardware"], own["nodes"], catalog)
    name = own["model"] or values["model_name_or_path"]
    if not name:
        raise UsageError("the recipe names no model; give --model")
    model = read_model(name)
    reward, reward_name = _reward_of(own, values)
    job = job_of(
        values,
        model,
        reward,
        prompt_tokens=own["prompt_tokens"],
        completion_tokens=own["completion_tokens"],
        spread=own["length_spread"],
        on_cpu=all(pool.device.is_cpu for pool in pools),
    )
    space = Space(
        schedules=tuple(own["schedules"]),
        **_stages_of(own, values, pools, model),
        base_bytes=tuple(DTYPES[dtype] for dtype in own["dtypes"] or ()),
        keeps_settings=own["keep_settings"],
        serves_reward=reward_name is not None,
    )
    around = Around(
        own["label_prompts"] or 0, own["label_completions"], _shape_of(own["judge_model"]), own["reward_pairs"] or 0,
        own["distill_rows"] or 0, _shape_of(own["student_model"]),
    )  # fmt: skip
    return Request(job, pools, catalog, space, around, reward_name)


def _shape_of(name: str | None) -> ModelShape | None:
    return None if name is None else read_model(name).shape


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
    stages = values["pipeline_stages"] or len(split) or None
    training = bool(values["pipeline_training"]) or None
    return {"engines": (PIPELINED,), "stages": stages, "split": split, "stage_training": training}


def _reward_of(own: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[ModelFacts | None, str | None]:
    """Return the reward model, and its name if it may run on a server.

    It is the one that is named, or the recipe's only model whose config is here. One of several rewards stays where it
    is, because the launch files would have to repeat the others.
    """
    specs = reward_specs(values)
    named = own["reward_model"]
    for spec in specs if named is None else [named]:
        try:
            return read_model(spec), spec if len(specs) <= 1 else None
        except ValueError:
            if named is not None:
                raise
    return None, None


def _plan(own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    from onetrunk.stages.plan_text import around_lines, json_text, plan_parts, show

    request = request_of(own, values)
    job, market = request.job, own["market"]
    ranking = search(job, request.pools, request.space, own["objective"], market, own["top"])
    if not ranking:
        raise ValueError(does_not_fit(request, market))
    ranking = _within_budget(request, own, ranking)
    best = ranking[0].plan
    cost = cost_of(job, best, request.catalog)
    around = around_times(job, best.train, best.sample, request.around)
    numbers = json_text(job, ranking, cost, market, around)
    if own["write"] is not None:
        folder = require_output_dir(own["write"])
        is_overridden = own["model"] not in (None, values["model_name_or_path"])
        launch = Launch(
            job, best, request.catalog, own["config"] or "YOUR_RECIPE.yaml", str(folder), market, is_overridden,
            request.reward,
        )  # fmt: skip
        atomic_write_text(folder / "plan.json", numbers + "\n")
        for path in (*write_files(launch), folder / "plan.json"):
            say(f"wrote {path}")
    if own["json"]:
        print(numbers, flush=True)
        return
    show(*plan_parts(job, request.pools, ranking, cost, own), *around_lines(best, around, market))
    lost = rejected(job, request.pools, request.space)
    show(*(["\nwhat does not fit at its best, or is not tried"] if lost else []), *lost)


def _within_budget(request: Request, own: Mapping[str, Any], ranking: list[Ranked]) -> list[Ranked]:
    """Return the plans that the budget allows, the best first; the cheapest of all if it allows no other."""
    market, budget = own["market"], own["budget"]
    if budget is None:
        return ranking
    cheapest = search(request.job, request.pools, request.space, "cost", market, 1)
    totals = [cost_of(request.job, e.plan, request.catalog).total(market) for e in (*ranking, *cheapest)]
    if totals[-1] > budget:
        raise ValueError(
            f"the cheapest plan costs ${totals[-1]:,.2f} ({market}), and the budget is ${budget:,.2f}; lower"
            " num_rollouts or num_ppo_epochs, take another market (--market spot), or raise --budget"
        )
    kept = [entry.plan for entry, total in zip(ranking, totals, strict=False) if total <= budget]
    plans = kept or [cheapest[0].plan]
    return [Ranked(plan, why_not(plan, plans[0], own["objective"], market)) for plan in plans]


def does_not_fit(request: Request, market: str) -> str:
    """Return why nothing fits, and the cheapest hardware on which something does."""
    reasons = rejected(request.job, request.pools, request.space)
    reasons = reasons or ["no number of processes divides rollout_batch_size into equal minibatches"]
    hint = "No known device holds it, not even 64 of the largest"
    smallest = smallest_hardware(request.job, request.catalog, request.space, market)
    if smallest is not None:
        hint = f"The smallest hardware on which it fits is {smallest[0]}, at ${smallest[1]:.2f} per hour ({market})"
    settings = "" if request.space.base_bytes else "; --dtypes nf4 quantises the base"
    return f"nothing fits {' + '.join(map(str, request.pools))}: {'; '.join(reasons[:3])}. {hint}{settings}"


def _calibrate(own: Mapping[str, Any]) -> None:
    from onetrunk.plan.calibrate import calibrate, hardware_text, lines_of

    path = Path(own["calibrate"]).expanduser()
    if path.is_dir():
        raise ValueError(f"--calibrate {path} is a folder; name the file that is written")
    say("measuring this machine; about a minute, with nothing else running")
    device, observations = calibrate(load_catalog(own["hardware_file"]))
    atomic_write_text(path, hardware_text(device))
    print("\n".join(lines_of(device, observations)))
    print(f"wrote {path}; use it with --hardware_file {path} --hardware {device.name}")


def _check(own: Mapping[str, Any]) -> None:
    from onetrunk.plan.check import check_run
    from onetrunk.stages.plan_text import check_parts, show

    folder = Path(own["check"])
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder (working folder {Path.cwd()}); give the output_dir of a run")
    defaults = {name: option.default for name, option in load_options("ppo").items()}
    show(*check_parts(folder, check_run(folder, defaults, load_catalog(own["hardware_file"]), own)))
