"""Arguments of `onetrunk judge`: rows with the preferences of people."""

from __future__ import annotations

from dataclasses import dataclass

from onetrunk.judges.judge_config import JudgeConfig
from onetrunk.stages.arguments import DatasetArguments, PushArguments, require_output_dir_is_set
from onetrunk.utils.options import option, require_seed


@dataclass
class JudgeArguments(DatasetArguments, PushArguments):
    """The rows, and what is reported."""

    output_dir: str | None = option(None, "Folder that the run writes to.")
    fewest_rows: int = option(
        1, "Smaller parts of the dataset have no metrics of their own, but count in those of all rows; 1 or more."
    )
    max_failed_fraction: float = option(
        0.1,
        "Stop when more than this fraction of a judge's questions, or 50 in a row, get no answer. Questions that it"
        " refuses or answers without a verdict are counted separately; they stop a run only on 5 prompts or more.",
    )
    num_samples_to_print: int = option(3, "Pairs on which a judge is most wrong, printed at the end; 0: none.")
    seed: int = option(42, "Seed of the resamples from which intervals of slopes are made.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_output_dir_is_set(self)
        require_seed("seed", self.seed)
        if not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(f"max_failed_fraction is {self.max_failed_fraction}; set it from 0 to 1")
        if self.fewest_rows < 1:
            raise ValueError(f"fewest_rows is {self.fewest_rows}; set it to 1 or more")
        if self.num_samples_to_print < 0:
            raise ValueError(f"num_samples_to_print is {self.num_samples_to_print}; set it to 0 or more")


def check_judge_is_named(settings: JudgeConfig) -> None:
    """Raise ValueError without a judge."""
    if not settings.judge:
        raise ValueError(
            "judge is not set; name who is measured, such as reward:runs/reward, a server's address, or a causal"
            " model's folder; several are measured one by one and as an ensemble"
        )
