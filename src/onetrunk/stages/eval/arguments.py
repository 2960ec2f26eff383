"""What a recipe of `onetrunk eval` can say: rows, how completions are sampled and scored, and against whom.

What a judge is asked is in `judges/load.py`. Knows no rows and no model yet.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from onetrunk.ppo.config import PPOConfig
from onetrunk.stages.arguments import DatasetArguments
from onetrunk.stages.reward import require_output_dir_is_set
from onetrunk.utils.randomness import require_seed

# Not fields of PPOConfig.
OWN = {"reward_funcs", "num_completions_to_print", "opponent", "checks", "tie_margin", "max_failed_fraction"}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class EvalArguments(DatasetArguments):
    """Rows, reward functions, and how completions are sampled. The names are those of PPOConfig."""

    reward_funcs: list[str] | None = _option(None, "As in ppo; may be left out where a judge compares.")
    reward_weights: list[float] | None = _option(None, "Weight of each reward function; None: 1 each.")
    opponent: str | None = _option(
        None,
        "Whom the model is compared with: reference (what an adapter started from; what None means where there is a"
        " judge), or the folder or Hub name of a model or an adapter that answers the same prompts.",
    )
    tie_margin: float = _option(0.0, "Pairs whose label is at most so far from 0.5 are ties; from 0 to below 0.5.")
    max_failed_fraction: float = _option(
        0.1,
        "Stop when the judge leaves more of its questions than that without an answer, or 50 in a row. Questions that"
        " it refuses, or answers with no verdict, count apart; they stop a run only on 5 prompts or more.",
    )
    checks: list[str] | None = _option(
        None,
        "What a completion should pass: functions as in ppo (package.module.function, path/to/file.py:function) that"
        " return True, False, or None where they do not apply. The share that passes is reported, per side.",
    )
    output_dir: str | None = _option(None, "Folder for metrics.json, the report and the samples.")
    seed: int = _option(42, "Of the completions.")
    max_prompt_length: int | None = _option(None, "Longest prompt, tokens; None: no limit but the model's.")
    overlong_prompts: str = _option(
        "error", "A longer prompt: 'error', 'drop' the row, or 'truncate' to its last tokens."
    )
    max_completion_length: int = _option(256, "Longest completion, tokens.")
    max_unscored_fraction: float = _option(0.1, "Fail when more of the completions have no finite score.")
    temperature: float = _option(1.0, "Divides the logits; above 0.")
    stop_tokens: list[str] | None = _option(None, "Tokens that end a completion beside the model's EOS, as text.")
    max_rollout_rows: int | None = _option(None, "Most rows that decode at once on a process; None: all.")
    chat_template_kwargs: dict[str, Any] | None = _option(
        None, "Keywords for the tokenizer's chat template, as in training; as JSON on the command line."
    )
    per_device_eval_batch_size: int = _option(8, "Rows in one forward that measures the KL.")
    microbatch_tokens: int | None = _option(
        None, "Most padded tokens (prompt + completion) in one such forward; None: no bound."
    )
    use_cpu: bool = _option(False, "Stay on the CPU even where there is an accelerator.")
    bf16: bool | None = _option(None, "bfloat16 autocast. None: where an accelerator supports it.")
    num_completions_to_print: int = _option(4, "Samples shown in the terminal; 0 for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_output_dir_is_set(self)
        require_seed("seed", self.seed)
        for name in ("reward_funcs", "checks"):
            value = getattr(self, name)
            setattr(self, name, [value] if isinstance(value, str) else value)
        if self.reward_weights and not self.reward_funcs:
            raise ValueError("reward_weights is set and reward_funcs is not; give the functions, or leave both out")
        if not 0 <= self.tie_margin < 0.5:
            raise ValueError(f"tie_margin is {self.tie_margin}; set it from 0 to below 0.5")
        if not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(f"max_failed_fraction is {self.max_failed_fraction}; set it from 0 to 1")

    def ppo_config(self, model_init_kwargs: dict[str, Any]) -> PPOConfig:
        """Return the PPOConfig under which the completions are sampled and scored; it trains nothing."""
        own = {f.name for f in fields(DatasetArguments)} | OWN
        settings = {name: value for name, value in asdict(self).items() if name not in own}
        config = PPOConfig(**settings, per_device_train_batch_size=1, model_init_kwargs=model_init_kwargs)
        config.rollout_batch_size = config.world_size
        return config


def check_purpose(args: EvalArguments, judge: Any, constitution: str | None) -> None:
    """Refuse settings that leave nothing to measure, or a judge without a constitution.

    Args:
        judge: specs of the judge, None or empty for none.
        constitution: path of the constitution.

    Raises:
        ValueError: names what to set.
    """
    if judge and not constitution:
        raise ValueError("judge is set and constitution is not; a judge compares by one: name a YAML file")
    if constitution and not judge:
        raise ValueError("constitution is set and judge is not; name a judge, such as rubric, or leave both out")
    if not judge and not args.reward_funcs:
        raise ValueError(
            "reward_funcs is not set, and neither is a judge: nothing would be measured; give at least one reward"
            " function, such as path/to/file.py:function, or judge and constitution"
        )
