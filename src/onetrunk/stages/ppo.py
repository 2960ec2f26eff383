"""PPO: prompts and reward functions -> a LoRA adapter on the frozen base; held-out metrics before and after.

A judge can be a reward function, and another one can monitor the reward. Their answers are kept in a ledger in the
run's folder, so that a resumed run gets the same answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import get_quantization_config

from onetrunk.checkpoints.hub import require_push
from onetrunk.feedback.asking import load_judge_parts
from onetrunk.judges.constitution import require_both
from onetrunk.judges.hacking_monitor import ACTIONS, HackingMonitor, check_monitor
from onetrunk.judges.judge_config import REWARD, JudgeConfig, with_memory
from onetrunk.models.loading import is_adapter
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.report.runs import FOLDER, SAMPLES
from onetrunk.rewards.judge import JudgeReward
from onetrunk.rewards.reward import RewardFunction
from onetrunk.rewards.specs import JUDGE, read_spec
from onetrunk.stages.arguments import ModelArguments, PPOArguments, PPODataArguments, parse
from onetrunk.stages.results import compared, show_columns, without_prefix, write_values
from onetrunk.stages.rows import load_prompt_rows
from onetrunk.stages.run_context import begin, finish, recorded
from onetrunk.utils.ledger import Ledger
from onetrunk.utils.options import option

# What a resumed run needs from its judges. Trainer pushes no path that begins with an underscore to the Hub.
KEPT_FOLDER = "_kept"


@dataclass
class PPOJudgeArguments:
    """A judge that monitors the reward during training and is not part of it."""

    monitor_judge: list[str] | None = option(
        None,
        "Specs of a judge that is not part of the reward, as in judge. It rates completions of held-out prompts during"
        " training, and an alarm is raised where the reward rises while its ratings fall.",
    )
    monitor_constitution: str | None = option(None, "YAML file with its principles; None: constitution.")
    monitor_rubric: dict[str, str] | None = option(None, "Its rubric, if it is a rubric; None: rubric.")
    monitor_every: int = option(1, "Rollouts between two of its measurements.")
    monitor_rows: int = option(64, "Number of held-out prompts that it rates; without held-out rows training prompts.")
    monitor_action: str = option("warn", "At an alarm: warn, or stop training.", ACTIONS)

    def __post_init__(self) -> None:
        check_monitor(self.monitor_every, self.monitor_action, self.monitor_rows)

    def monitor_settings(self, settings: JudgeConfig) -> JudgeConfig:
        """Return the settings of the monitor's judge: the reward's judge with the monitor's own values."""
        return replace(
            settings,
            judge=self.monitor_judge,
            constitution=self.monitor_constitution or settings.constitution,
            rubric=self.monitor_rubric or (settings.rubric if "rubric" in self.monitor_judge else None),
        )


def check_settings(
    data: PPODataArguments,
    args: PPOArguments,
    model_args: ModelArguments,
    settings: JudgeConfig,
    judge_args: PPOJudgeArguments,
) -> None:
    """Raise ValueError for settings that have no meaning in PPO, or that contradict each other."""
    if model_args.use_peft is False:
        raise ValueError("use_peft is false, but ppo trains a LoRA adapter on a frozen base; leave it out")
    if model_args.lora_dropout:
        raise ValueError("lora_dropout makes the first PPO ratio differ from 1; leave it out")
    is_judged = JUDGE in (data.reward_funcs or ())
    if is_judged and not settings.judge:
        raise ValueError(f"reward_funcs names {JUDGE}, and judge is not set; name who judges, such as rubric")
    if settings.judge and not is_judged:
        raise ValueError(
            f"judge is set, and reward_funcs does not name {JUDGE}, its rating; add the word, or leave judge out"
            " (monitor_judge only watches)"
        )
    if settings.judge or not judge_args.monitor_judge:
        require_both(settings.judge, settings.constitution)
    if not judge_args.monitor_judge:
        defaults = ((f.name, f.default) for f in fields(judge_args) if f.name.startswith("monitor_"))
        unused = [name for name, default in defaults if getattr(judge_args, name) != default]
        if unused:
            raise ValueError(f"{unused[0]} is set and monitor_judge is not; name the judge, or leave it out")
        return
    monitor = judge_args.monitor_settings(settings)
    if not monitor.constitution:
        raise ValueError("monitor_judge is set, and neither monitor_constitution nor constitution; name a YAML file")
    is_rewarded = any(spec.removeprefix(REWARD) in (data.reward_funcs or ()) for spec in judge_args.monitor_judge)
    if is_rewarded or (is_judged and monitor == settings):
        raise ValueError(
            f"monitor_judge {judge_args.monitor_judge[0]} is what the reward is made of, and would see no gap; name a"
            " judge that PPO does not see"
        )


def run(
    data: PPODataArguments,
    args: PPOArguments,
    model_args: ModelArguments,
    judge_settings: JudgeConfig,
    judge_args: PPOJudgeArguments,
) -> None:
    is_done, resume = begin("ppo", args, PPOTrainer.needed_files)
    if is_done:
        return
    reward_funcs = data.reward_funcs or []
    require_functions(reward_funcs)
    episodes = data.episode_parts()
    rows, held_out = load_prompt_rows(data, args.seed)
    require_push(args)
    with run_judges(reward_funcs, args, judge_settings, judge_args) as (rewards, monitor):
        trainer = make_trainer(rewards, args, model_args, rows, held_out, **episodes)
        if monitor is not None:
            monitor.attach(trainer)
        # Metrics without their samples would leave the report without the completions before training.
        has_samples = (Path(args.output_dir) / FOLDER / SAMPLES["before"]).is_file()
        reference = trainer.evaluate_reference(resume if has_samples else None) if held_out is not None else None
        with recorded(trainer, resume, "ppo", data, model_args, judge_settings, judge_args):
            trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        if reference is not None:
            compare(trainer, reference, model_args.model_name_or_path, monitor)
    finish("ppo", trainer, "the adapter", dataset=data.hub_dataset)


def require_functions(reward_funcs: Sequence[str]) -> None:
    """Import the reward functions that are named, so that a wrong name is reported before anything loads."""
    for spec in map(read_spec, reward_funcs):
        if spec.kind.loads_first:
            spec.load()


def make_trainer(
    reward_funcs: Sequence[str | RewardFunction],
    args: PPOArguments,
    model_args: ModelArguments,
    train: Dataset,
    held_out: Dataset | None,
    **episodes: Any,
) -> PPOTrainer:
    """Return the trainer. If the model is an adapter, that adapter is trained further; else a new one is added.

    `episodes` are its tools and environments.
    """
    name = model_args.model_name_or_path
    args.model_init_kwargs = {**model_args.init_kwargs(), **(args.model_init_kwargs or {})}
    peft_config = model_args.peft_config()
    if is_adapter(name, model_args.model_revision):
        changed = model_args.changed_lora_fields()
        if changed:
            raise ValueError(f"{name} is an adapter with a LoRA config of its own; remove {', '.join(changed)}")
        peft_config = None
    return PPOTrainer(
        model=name,
        reward_funcs=list(reward_funcs),
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        quantization_config=get_quantization_config(model_args),
        peft_config=peft_config,
        **episodes,
    )


def compare(trainer: PPOTrainer, reference: dict[str, float], model_name: str, monitor: HackingMonitor | None) -> None:
    """Evaluate the trained policy; write metrics.json, and print reference and policy in one table."""
    policy = without_prefix(trainer.final_evaluation())
    if trainer.is_world_process_zero():
        about = {"model": model_name, "num_prompts": len(trainer.eval_dataset), "steps": trainer.state.global_step}
        about |= {"seed": trainer.args.seed, "num_processes": trainer.accelerator.num_processes}
        if monitor is not None:
            about["monitor"] = monitor.summary()
        write_values(trainer.args.output_dir, {**about, "reference": reference, "policy": policy})
        show_columns(f"PPO from {model_name}", compared(reference, policy))


@contextlib.contextmanager
def run_judges(
    reward_funcs: Sequence[str], args: PPOArguments, settings: JudgeConfig, arguments: PPOJudgeArguments
) -> Iterator[tuple[list[str | RewardFunction], HackingMonitor | None]]:
    """Load the judges before any other model; yield the rewards, the judge in place of its word, and the monitor."""
    if not settings.judge and not arguments.monitor_judge:
        yield list(reward_funcs), None
        return
    settings = replace(settings, judge_device=settings.judge_device or str(args.device))
    # The monitor first: it may only be a constitution, so mistakes in it are reported before a model loads.
    watching = judging = None
    if arguments.monitor_judge:
        watching = load_judge_parts(arguments.monitor_settings(settings), asks=args.process_index == 0)
    if settings.judge:
        judging = load_judge_parts(settings)
    with Ledger(Path(args.output_dir) / KEPT_FOLDER / f"judged-{args.process_index}.db") as ledger:
        rewards: dict[str, RewardFunction] = {}
        if judging is not None:
            judge, constitution = judging
            rewards[JUDGE] = JudgeReward(with_memory(judge, ledger), constitution, memory=ledger)
        monitor = None
        if watching is not None:
            judge, constitution = watching
            monitor = HackingMonitor(
                with_memory(judge, ledger),
                constitution,
                every=arguments.monitor_every,
                action=arguments.monitor_action,
                num_rows=arguments.monitor_rows,
                memory=ledger,
            )
        yield [rewards.get(spec, spec) for spec in reward_funcs], monitor


parse_ppo = partial(
    parse,
    verb="ppo",
    dataclass_types=(PPODataArguments, PPOArguments, ModelArguments, JudgeConfig, PPOJudgeArguments),
    check=check_settings,
)
