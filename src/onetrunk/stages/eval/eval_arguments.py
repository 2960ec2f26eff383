"""Arguments of `onetrunk eval`: how completions are scored, and the opponent.

The judge's settings are in `judges/judge_config.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from onetrunk.judges.judge_config import JudgeConfig
from onetrunk.stages.arguments import DatasetArguments, SamplingArguments
from onetrunk.utils.options import option

if TYPE_CHECKING:
    from onetrunk.ppo.config import PPOConfig
    from onetrunk.stages.arguments import ModelArguments

# Fields that PPOConfig does not have.
NOT_IN_PPO = {"reward_funcs", "num_completions_to_print", "opponent", "checks", "tie_margin", "max_failed_fraction"}


@dataclass
class EvalArguments(SamplingArguments):
    """Reward functions, checks, and the opponent."""

    reward_funcs: list[str] | None = option(None, "As in ppo; may be left out if a judge compares.")
    reward_weights: list[float] | None = option(None, "Weight of each reward function; None: 1 each.")
    opponent: str | None = option(
        None,
        "Whom the model is compared with: reference (what an adapter started from; the default with a judge), or the"
        " folder or Hub name of a model or an adapter that answers the same prompts.",
    )
    tie_margin: float = option(0.0, "Pairs whose label is at most this far from 0.5 are ties; from 0 to below 0.5.")
    checks: list[str] | None = option(
        None,
        "Checks of a completion: functions as in ppo (package.module.function, path/to/file.py:function) that return"
        " True, False, or None where they do not apply. The share that passes is reported for each side.",
    )
    max_unscored_fraction: float = option(0.1, "Fail when a larger share of the completions has no finite score.")
    per_device_eval_batch_size: int = option(8, "Rows in one forward that measures the KL.")
    microbatch_tokens: int | None = option(
        None, "Most tokens in one such forward, padding included unless padding_free is set; None: no bound."
    )
    padding_free: bool = option(
        False, "Run the rows of such a forward in one sequence, without padding (see onetrunk ppo --help)."
    )
    bf16: bool | None = option(None, "bfloat16 autocast. None: where an accelerator supports it.")
    num_completions_to_print: int = option(4, "Samples shown in the terminal; 0 for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("reward_funcs", "checks"):
            value = getattr(self, name)
            setattr(self, name, [value] if isinstance(value, str) else value)
        if self.reward_weights and not self.reward_funcs:
            raise ValueError("reward_weights is set and reward_funcs is not; give the functions, or leave both out")
        if not 0 <= self.tie_margin < 0.5:
            raise ValueError(f"tie_margin is {self.tie_margin}; set it from 0 to below 0.5")

    def ppo_config(self, model_init_kwargs: dict[str, Any]) -> PPOConfig:
        from onetrunk.ppo.config import PPOConfig  # Here: the command line checks these settings before torch loads.

        left_out = {f.name for f in fields(DatasetArguments)} | NOT_IN_PPO
        settings = {name: value for name, value in asdict(self).items() if name not in left_out}
        config = PPOConfig(**settings, per_device_train_batch_size=1, model_init_kwargs=model_init_kwargs)
        config.rollout_batch_size = config.world_size
        return config


def check_purpose(args: EvalArguments, settings: JudgeConfig, model_args: ModelArguments) -> None:
    """Raise ValueError if nothing would be measured, or only one of judge and constitution is set."""
    judge, constitution = settings.judge, settings.constitution
    if judge and not constitution:
        raise ValueError("judge is set and constitution is not; a judge compares by one: name a YAML file")
    if constitution and not judge:
        raise ValueError("constitution is set and judge is not; name a judge, such as rubric, or leave both out")
    if not judge and not args.reward_funcs:
        raise ValueError(
            "reward_funcs is not set, and neither is a judge: nothing would be measured; give at least one reward"
            " function, such as path/to/file.py:function, or judge and constitution"
        )
