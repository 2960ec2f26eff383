"""Several reward models as one reward: their mean, less a penalty where they disagree.

Where a policy leaves the rows that reward models were trained on, the models come apart; a penalty on their spread
keeps PPO from living off the mistakes of one of them. In YAML: `reward_funcs: ["ensemble:runs/rm-0,runs/rm-1,
penalty=0.5"]`. Knows reward models by name and their scales; no policy. After Coste et al. 2023 (2310.02743), who
subtract the variance; here it is the standard deviation, which has the unit of the score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onetrunk.models.score_adapter import is_adapter_name, load_adapter_scorer, read_score_adapter
from onetrunk.models.scorer import SCALE_FILE, ScoreScale, read_score_scale
from onetrunk.rewards.base import Completion
from onetrunk.rewards.model import ModelReward, adapter_tokenizer
from onetrunk.types import Prompt

PREFIX = "ensemble:"


def load_reward(name: str | Path, *, device: torch.device | str | None = None, **settings: Any) -> ModelReward:
    """Return the reward model at `name` with its own tokenizer; an adapter is loaded on a base model of its own.

    Args:
        name: folder or Hub name of a sequence-classification model with one label, or of an adapter of one.
        device: None leaves it on the CPU.
        **settings: of ModelReward (batch_size, max_length, dtype).

    Raises:
        ValueError: a model or an adapter without a trained score head.
        RuntimeError: nothing loadable there.
    """
    name = str(name)
    if not is_adapter_name(name):
        return ModelReward(name, device=device, **settings)
    model = load_adapter_scorer(name, device=device, dtype=settings.pop("dtype", None))
    tokenizer = adapter_tokenizer(name)
    if tokenizer is None:
        return ModelReward(model, read_score_adapter(name).base, name=Path(name).name, **settings)
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return ModelReward(model, tokenizer, name=Path(name).name, **settings)


class EnsembleReward:
    """Mean of the members' standardised scores less `penalty` times their standard deviation (that of a population).

    Args:
        paths: folders or Hub names of two reward models or more, each with its scale beside it (`onetrunk reward` and
            `onetrunk distill` write it): without it, zeros that differ would look like disagreement.
        penalty: in standard deviations of a score for each of disagreement; 0 or more.
        batch_size: texts of one forward.
        device: None leaves them on the CPU.
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
        rows = {"prompts": prompts, "completions": completions, "completion_stopped": stopped}
        scores = [torch.tensor(member(**rows)) for member in self.members]
        return torch.stack([scale.standardize(s) for scale, s in zip(self.scales, scores, strict=True)])

    def __call__(
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return n scores. Of the columns only `completion_stopped` is read, and no token id of the policy."""
        if not prompts:
            return []
        scores = self.member_scores(prompts, completions, columns.get("completion_stopped"))
        disagreement = scores.std(dim=0, correction=0)
        if "log_metric" in columns:
            columns["log_metric"](f"score/{self.__name__}_disagreement", float(disagreement.mean()))
        return (scores.mean(dim=0) - self.penalty * disagreement).tolist()


def names_an_ensemble(spec: str) -> bool:
    """Say whether a text among the reward functions means an ensemble."""
    return spec.startswith(PREFIX)


def ensemble_reward(spec: str, device: torch.device | str | None = None) -> EnsembleReward:
    """Return the ensemble that "ensemble:PATH,PATH,...,penalty=NUMBER" means; the penalty is 0 where it is left out.

    Raises:
        ValueError: another form, or what EnsembleReward refuses.
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


def _scale(name: str) -> ScoreScale:
    scale = read_score_scale(name)
    if scale is None:
        raise ValueError(
            f"reward model {name} has no {SCALE_FILE} beside it, so its scores can't be compared with another model's;"
            " `onetrunk reward` writes one, or ScoreScale.of(scores).save(folder) with its scores of some rows"
        )
    return scale
