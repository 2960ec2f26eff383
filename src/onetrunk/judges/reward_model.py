"""A reward model as a judge: P(first better) = sigmoid(score of first - score of second), as it was trained.

It cannot read a principle, so it gives the same answer under each. `models/reward_model.py` loads and scores.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.judges.judge import Principle, Rating, ScoringJudge, Single, Verdict, logistic, model_name
from onetrunk.models.loading import read_tokenizer, scorer_fingerprint
from onetrunk.models.reward_model import (
    ScoreScale,
    check_scorer,
    encode_rows,
    is_adapter_name,
    length_limit,
    load_adapter_scorer,
    load_scorer,
    read_score_scale,
    reads_end_token,
    score_token_ids,
)
from onetrunk.types import as_completion
from onetrunk.utils.files import digest

logger = logging.getLogger(__name__)


class RewardModelJudge(ScoringJudge):
    """Judges by the scores of a sequence-classification model with one label (see `Judge`).

    Each different completion of a prompt is scored once per call, so equal completions tie exactly. Texts that are
    too long lose their beginning, as they do when a reward model scores for PPO.

    Args:
        model: a sequence-classification model with one label; set to eval mode.
        tokenizer: the model's.
        scale: the mean and spread of its scores: rating = sigmoid((score - mean) / std); None: sigmoid(score).
        batch_size: texts per forward.
        name: the judge's name in reports; None takes the last part of the model's path.

    Raises:
        ValueError: not a scalar reward model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        scale: ScoreScale | None = None,
        batch_size: int = 16,
        name: str | None = None,
    ):
        check_scorer(model)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.scale, self.batch_size = scale, batch_size
        self.max_length = length_limit(model, tokenizer)
        self.name = model_name(name or model.name_or_path) or type(model).__name__
        self.num_shortened = 0
        self.identity: dict[str, Any] = {
            "kind": "reward model",
            "model": scorer_fingerprint(model),
            "reads": digest([tokenizer("The cat sat, twice!")["input_ids"], tokenizer.chat_template])[:16],
            "end_token": reads_end_token(model),
            "scale": None if scale is None else [scale.mean, scale.std],
        }

    def _verdict(self, first: float | None, second: float | None) -> Verdict:
        if first is None or second is None:
            return Verdict(None, "a score is not finite")
        return Verdict(logistic(first - second), details={"scores": [first, second]})

    def _rating(self, score: float | None) -> Rating:
        if score is None:
            return Rating(None, "the score is not finite")
        centred = score if self.scale is None else (score - self.scale.mean) / self.scale.std
        return Rating(logistic(centred), details={"score": score})

    def _scores(self, rows: Sequence[Single], principle: Principle) -> list[float | None]:
        """Return the score of each row, None for one that is not finite."""
        # Sorted, so that the order of a pair changes no batch, and so not a bit of a score.
        keys = [digest([row.prompt, row.text] if row.stopped else [row.prompt, row.text, False]) for row in rows]
        by_key = dict(sorted(zip(keys, rows, strict=True), key=lambda entry: entry[0]))
        unique = list(by_key.values())
        token_ids, num_shortened = encode_rows(
            self.tokenizer,
            [row.prompt for row in unique],
            [as_completion(row.prompt, row.text) for row in unique],
            self.max_length,
            reads_end_token(self.model),
            self.name,
            [row.stopped for row in unique],
        )
        if num_shortened and not self.num_shortened:
            logger.warning(
                f"judge {self.name}: {num_shortened} of {len(unique)} texts had more than {self.max_length} tokens and"
                " lost their beginning; later ones are only counted, in num_shortened"
            )
        self.num_shortened += num_shortened
        self.usage.prompt_tokens += sum(map(len, token_ids))
        scores = score_token_ids(self.model, token_ids, self.batch_size).tolist()
        finite = {key: score if math.isfinite(score) else None for key, score in zip(by_key, scores, strict=True)}
        return [finite[key] for key in keys]


def load_reward_judge(
    name: str, *, device: torch.device | str | None = None, batch_size: int = 16
) -> RewardModelJudge:
    """Return the reward model at `name` as a judge, with the score scale saved next to it, if any.

    `name` is the folder or Hub name of a sequence-classification model with one label, or of an adapter of one.

    Raises:
        RuntimeError: nothing loadable there.
        ValueError: a model or an adapter without a trained score head, or with several labels.
    """
    path = Path(name).expanduser()
    source = str(path) if path.exists() else name
    if is_adapter_name(name):
        model, tokenizer = load_adapter_scorer(name, device=device)
    else:
        model = load_scorer(name, device=device)
        tokenizer = read_tokenizer(source, "tokenizer of the reward model")
    scale = read_score_scale(source)
    return RewardModelJudge(model, tokenizer, scale=scale, batch_size=batch_size, name=Path(source).name)
