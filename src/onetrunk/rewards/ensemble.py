"""Several reward models as one reward: their mean score, minus a penalty on their disagreement.

Reward models disagree most on rows unlike those they were trained on. The penalty keeps PPO from exploiting the
mistakes of one of them there. In YAML: `reward_funcs: ["ensemble:runs/rm-0,runs/rm-1,penalty=0.5"]`.
Source: Coste et al. 2023 (arXiv:2310.02743), who subtract the variance; we subtract the standard deviation, which has
the unit of the score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onetrunk.models.reward_model import (
    SCALE_FILE,
    ScoreScale,
    is_adapter_name,
    load_adapter_scorer,
    read_score_scale,
)
from onetrunk.rewards.model import ModelReward
from onetrunk.rewards.reward import Completion
from onetrunk.types import Prompt

PREFIX = "ensemble:"


class EnsembleReward:
    """The mean of the members' standardised scores, minus `penalty` times their (population) standard deviation.

    Args:
        paths: folders or Hub names of two reward models or more. Each needs its scale file, which `onetrunk reward`
            and `onetrunk distill` write: without it, different zero points would look like disagreement.
        penalty: score units per unit of disagreement; 0 or more.
        batch_size: texts per forward.
        device: None: the CPU.
        name: for metrics; the disagreement is logged as `score/<name>_disagreement`.

    Raises:
        ValueError: fewer than two members, a negative penalty, or a member without a scale or without a head.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        penalty: float = 0.0,
        *,
        batch_size: int = 16,
        device: torch.device | str | None = None,
        name: str = "ensemble",
    ):
        if len(paths) < 2 or len(set(map(str, paths))) < len(paths):
            raise ValueError(
                f"an ensemble of {', '.join(map(str, paths)) or 'nothing'} has no disagreement; name two different"
                " reward models or more"
            )
        if not (math.isfinite(penalty) and penalty >= 0):
            raise ValueError(f"the penalty of an ensemble is {penalty}; set a finite number of at least 0")
        self.scales = [_scale(str(path)) for path in paths]
        self.members = [load_reward(path, device=device, batch_size=batch_size) for path in paths]
        self.penalty = penalty
        self.__name__ = name

    def member_scores(
        self, prompts: list[Prompt], completions: list[Completion], stopped: list[bool] | None = None
    ) -> Tensor:
        """Return the standardised scores [members, n]; `stopped` is False for completions that were cut off."""
        scores = [torch.tensor(member(prompts, completions, completion_stopped=stopped)) for member in self.members]
        return torch.stack([scale.standardize(s) for scale, s in zip(self.scales, scores, strict=True)])

    def __call__(self, prompts: list[Prompt], completions: list[Completion], **columns: Any) -> list[float]:
        """Return n scores. Of the columns only `completion_stopped` counts."""
        if not prompts:
            return []
        scores = self.member_scores(prompts, completions, columns.get("completion_stopped"))
        disagreement = scores.std(dim=0, correction=0)
        if "log_metric" in columns:
            columns["log_metric"](f"score/{self.__name__}_disagreement", float(disagreement.mean()))
        return (scores.mean(dim=0) - self.penalty * disagreement).tolist()


def _scale(name: str) -> ScoreScale:
    scale = read_score_scale(name)
    if scale is None:
        raise ValueError(
            f"reward model {name} has no {SCALE_FILE}, so its scores can't be compared with another model's;"
            " `onetrunk reward` writes one, or ScoreScale.of(scores).save(folder) with its scores of some rows"
        )
    return scale


def names_an_ensemble(spec: str) -> bool:
    """Return whether a text among the reward functions names an ensemble."""
    return spec.startswith(PREFIX)


def ensemble_reward(spec: str, device: torch.device | str | None = None) -> EnsembleReward:
    """Return the ensemble that "ensemble:PATH,PATH,...,penalty=NUMBER" names; the default penalty is 0.

    Raises:
        ValueError: the text has another form, or EnsembleReward rejects the settings.
    """
    parts = [part.strip() for part in spec.removeprefix(PREFIX).split(",")]
    settings = dict(part.split("=", 1) for part in parts if "=" in part)
    paths = [part for part in parts if "=" not in part]
    form = f"write '{PREFIX}runs/rm-0,runs/rm-1,penalty=0.5'"
    if set(settings) - {"penalty"} or not all(paths):
        raise ValueError(f"reward {spec!r} is no list of reward models with a penalty; {form}")
    try:
        penalty = float(settings.get("penalty", 0.0))
    except ValueError as error:
        raise ValueError(f"reward {spec!r}: the penalty is no number; {form}") from error
    return EnsembleReward(paths, penalty, device=device)


def load_reward(name: str | Path, *, device: torch.device | str | None = None, batch_size: int = 16) -> ModelReward:
    """Return the reward model at `name` with its own tokenizer; an adapter is loaded on a base model of its own.

    Args:
        name: folder or Hub name of a sequence-classification model with one label, or of an adapter of one.
        device: None: the CPU.
        batch_size: texts per forward.

    Raises:
        ValueError: the model or adapter has no trained score head.
        RuntimeError: nothing can be loaded from there.
    """
    name = str(name)
    if not is_adapter_name(name):
        return ModelReward(name, device=device, batch_size=batch_size)
    model, tokenizer = load_adapter_scorer(name, device=device)
    return ModelReward(model, tokenizer, name=Path(name).name, batch_size=batch_size)
