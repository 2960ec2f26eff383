"""PPO: prompts and reward functions -> a LoRA adapter on the frozen base; held-out figures before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from onetrunk.judges.load import REWARD, JudgeSettings
from onetrunk.ppo.monitor import ACTIONS, check_settings
from onetrunk.stages.parsing import UsageError, parse
from onetrunk.stages.running import run_stage

# Words among the reward functions that mean the judge.
JUDGE, PAIRWISE = "judge", "pairwise"


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata: dict[str, Any] = {"help": text}
    return field(default=default, metadata=metadata | ({"choices": list(choices)} if choices else {}))


@dataclass
class PPOJudgeArguments:
    """A judge as a reward function, and another one that watches."""

    pairwise_beta: float = _option(
        1.0, "reward_funcs pairwise: reward = pairwise_beta * log P(completion better than the reference's); above 0."
    )
    pairwise_floor: float = _option(0.01, "Least such probability that counts, above 0 and below 0.5.")
    monitor_judge: list[str] | None = _option(
        None,
        "Specs of a judge that is no part of the reward, as in judge: rates completions of held-out prompts over"
        " training; an alarm is raised where the reward rises while it falls.",
    )
    monitor_constitution: str | None = _option(None, "YAML file with its principles; None: constitution.")
    monitor_rubric: dict[str, str] | None = _option(None, "Its rubric, where it is one; None: rubric.")
    monitor_every: int = _option(1, "Rollouts between two of its measurements.")
    monitor_rows: int = _option(64, "Held-out prompts that it looks at; without held-out rows training prompts.")
    monitor_window: int = _option(
        5, "Measurements over which the reward rises and the judge falls at an alarm; 2 or more."
    )
    monitor_action: str = _option("warn", "At an alarm: warn, or stop training.", ACTIONS)

    def __post_init__(self) -> None:
        if isinstance(self.monitor_judge, str):
            self.monitor_judge = [self.monitor_judge]
        check_settings(self.monitor_every, self.monitor_window, self.monitor_action, self.monitor_rows)
        if not self.pairwise_beta > 0:
            raise ValueError(f"pairwise_beta is {self.pairwise_beta}; set a number above 0, such as 1")
        if not 0 < self.pairwise_floor < 0.5:
            raise ValueError(f"pairwise_floor is {self.pairwise_floor}; set a number above 0 and below 0.5")
        changed = [
            f.name for f in fields(self) if f.name.startswith("monitor_") and getattr(self, f.name) != f.default
        ]
        if changed and not self.monitor_judge:
            raise ValueError(f"{changed[0]} is set and monitor_judge is not; name a judge, or leave {changed[0]} out")

    def monitor_settings(self, settings: JudgeSettings) -> JudgeSettings:
        """Return the settings of the monitor's judge: the reward's, less what is its own."""
        return replace(
            settings,
            judge=self.monitor_judge,
            constitution=self.monitor_constitution or settings.constitution,
            rubric=self.monitor_rubric or (settings.rubric if "rubric" in self.monitor_judge else None),
        )


def check_judges(reward_funcs: Sequence[str], settings: JudgeSettings, arguments: PPOJudgeArguments) -> None:
    """Refuse judges that are named and not described, described and not named, or watched by themselves.

    Raises:
        ValueError: says what to set.
    """
    wanted = [word for word in (JUDGE, PAIRWISE) if word in reward_funcs]
    if wanted and not settings.judge:
        raise ValueError(f"reward_funcs names {wanted[0]}, and judge is not set; name who judges, such as rubric")
    if settings.judge and not wanted:
        raise ValueError(
            f"judge is set, and reward_funcs names neither {JUDGE} (its rating) nor {PAIRWISE} (log P of being better"
            " than the reference's completion); add one of them, or leave judge out (monitor_judge only watches)"
        )
    if wanted and not settings.constitution:
        raise ValueError("judge is set and constitution is not; a judge judges by one: name a YAML file")
    if not arguments.monitor_judge:
        return
    own = arguments.monitor_settings(settings)
    if not own.constitution:
        raise ValueError("monitor_judge is set, and neither monitor_constitution nor constitution; name a YAML file")
    same = [spec for spec in arguments.monitor_judge if spec.removeprefix(REWARD) in reward_funcs]
    if wanted and own == settings:
        same = list(arguments.monitor_judge)
    if same:
        raise ValueError(
            f"monitor_judge {same[0]} is what the reward is made of, and would see no gap; name a judge that PPO does"
            " not see"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onetrunk ppo` with these words; return the exit code."""
    return run_stage("ppo", parse_ppo, run, argv)


def run(data: Any, args: Any, model_args: Any, judge_settings: Any, judge_args: Any) -> None:
    """Read the rows, load judges, build the trainer, train, save, compare, push."""
    from onetrunk.checkpoints.hub import require_push
    from onetrunk.ppo.trainer import PPOTrainer
    from onetrunk.stages.ppo_judges import run_judges
    from onetrunk.stages.resuming import begin, delete_old_run, note_finished
    from onetrunk.stages.rows import load_training_rows, prompt_rows

    is_done, resume = begin("ppo", args, PPOTrainer.needed_files)
    if is_done:
        return
    train, held_out = load_training_rows(data, args.seed, prompt_rows)
    require_push(args)
    with run_judges(data.reward_funcs, args, judge_settings, judge_args) as judges:
        trainer = make_trainer(judges.reward_funcs, args, model_args, train, held_out)
        judges.begin(trainer)
        reference = trainer.evaluate_reference() if held_out is not None else None
        delete_old_run(args, resume)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        if reference is not None:
            compare(trainer, reference, model_args.model_name_or_path, judges.monitor)
    if args.push_to_hub:
        trainer.push_to_hub(dataset=data.hub_dataset)
    note_finished(trainer)
    if trainer.is_world_process_zero():
        if judges.monitor is not None and judges.monitor.explanation:
            print(f"ppo: the monitor's last alarm: {judges.monitor.explanation}")
        if trainer.alarms.explanation:
            print(f"ppo: the last alarm: {trainer.alarms.explanation}")
        print(f"ppo: saved the adapter in {args.output_dir}")
    trainer.accelerator.end_training()


def parse_ppo(argv: Sequence[str]) -> tuple[Any, ...]:
    """Return PPODataArguments, PPOArguments, ModelArguments, JudgeSettings and PPOJudgeArguments."""
    from onetrunk.judges.load import JudgeSettings
    from onetrunk.stages.arguments import ModelArguments, PPOArguments, PPODataArguments

    types = (PPODataArguments, PPOArguments, ModelArguments, JudgeSettings, PPOJudgeArguments)
    parsed = parse(argv, types, "ppo", "Train a LoRA policy on one frozen base by PPO.", knows_ppo=True)
    try:
        check_judges(parsed[0].reward_funcs, *parsed[3:])
    except ValueError as error:
        raise UsageError(str(error)) from error
    return parsed


def make_trainer(reward_funcs: Sequence[Any], args: Any, model_args: Any, train: Any, held_out: Any) -> Any:
    """Return the PPOTrainer; from an adapter its training goes on, from a base model a new adapter begins."""
    from trl import get_quantization_config

    from onetrunk.models.sources import is_adapter
    from onetrunk.ppo.trainer import PPOTrainer

    name = model_args.model_name_or_path
    if model_args.use_peft is False:
        raise ValueError("use_peft is false, but ppo trains a LoRA adapter on a frozen base; leave it out")
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
    )


def compare(trainer: Any, reference: dict[str, float], model_name: str, monitor: Any) -> None:
    """Evaluate the trained policy; write metrics.json and show both sides in a table."""
    from onetrunk.stages.report import figures_table, show, without_prefix, write_metrics

    policy = without_prefix(trainer.final_evaluation())
    if trainer.is_world_process_zero():
        about = {"model": model_name, "num_prompts": len(trainer.eval_dataset), "steps": trainer.state.global_step}
        about |= {"seed": trainer.args.seed, "num_processes": trainer.accelerator.num_processes}
        if monitor is not None:
            about["monitor"] = monitor.summary()
        write_metrics(trainer.args.output_dir, policy, reference, **about)
        show(figures_table(f"PPO from {model_name}", policy, reference))
