"""A reward model as a judge: how much higher it scores one completion than the other.

It was trained on P(first better) = sigmoid(score of first - score of second), and is asked for just that. Of a
principle it knows nothing: it answers the same under each. Knows scores; loading and scoring are `models/scorer.py`.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.judges.base import Pair, Principle, Rating, Verdict, digest
from onetrunk.judges.rubric import logistic
from onetrunk.models.loading import read_tokenizer
from onetrunk.models.score_adapter import is_adapter_name, load_adapter_scorer, read_score_adapter
from onetrunk.models.scorer import (
    ScoreScale,
    adapter_tokenizer,
    check_scorer,
    encode_rows,
    length_limit,
    load_scorer,
    read_score_scale,
    reads_end_token,
    score_token_ids,
)
from onetrunk.models.sources import base_fingerprint
from onetrunk.types import Prompt

logger = logging.getLogger(__name__)


class RewardModelJudge:
    """Judges by the scores of a sequence-classification model with one label; see `judges/base.py`.

    Each different completion of a prompt is scored once a call, so equal completions tie exactly. Texts that are too
    long lose their beginning, as where a reward model scores for PPO.

    Args:
        model: with one label; set to eval mode.
        tokenizer: its own.
        scale: of its scores, which centres ratings: rating = sigmoid((score - mean) / std); None: sigmoid(score).
        batch_size: texts of one forward.
        name: for reports; None takes the last part of the model's path.

    Raises:
        ValueError: a model that is no scalar reward model, or a batch size below 1.
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
        if batch_size < 1:
            raise ValueError(f"the judge's batch_size is {batch_size}; set it to 1 or more")
        check_scorer(model)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.scale, self.batch_size = scale, batch_size
        self.max_length = length_limit(model, tokenizer)
        last = (name or model.name_or_path).rstrip("/").rpartition("/")[2]
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "-", last)[:96] or type(model).__name__
        self.num_shortened = 0
        self.identity: dict[str, Any] = {
            "kind": "reward model",
            "model": base_fingerprint(model),
            "adapter": _adapter_fingerprint(model),
            "reads": digest([tokenizer("The cat sat, twice!")["input_ids"], tokenizer.chat_template])[:16],
            "end_token": reads_end_token(model),
            "scale": None if scale is None else [scale.mean, scale.std],
        }

    def compare(
        self, pairs: Sequence[Pair], principle: Principle, done: Callable[[int, Verdict], None] | None = None
    ) -> list[Verdict]:
        """Return a verdict per pair (see `Judge`); of a score that is not finite it abstains.

        Raises:
            ValueError: conversations, and a tokenizer without a chat template.
        """
        prompts = [pair.prompt for pair in pairs]
        scores = self._scores(
            [*prompts, *prompts],
            [p.first for p in pairs] + [p.second for p in pairs],
            [p.first_stopped for p in pairs] + [p.second_stopped for p in pairs],
        )
        verdicts = []
        for index in range(len(pairs)):
            first, second = scores[index], scores[index + len(pairs)]
            if first is None or second is None:
                verdicts.append(Verdict(None, "a score is not finite"))
            else:
                verdicts.append(Verdict(logistic(first - second), details={"scores": [first, second]}))
            if done is not None:
                done(index, verdicts[-1])
        return verdicts

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Callable[[int, Rating], None] | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion; raises as `compare`."""
        ratings = []
        for index, score in enumerate(self._scores(prompts, completions, stopped or [True] * len(prompts))):
            if score is None:
                ratings.append(Rating(None, "the score is not finite"))
            else:
                centred = score if self.scale is None else (score - self.scale.mean) / self.scale.std
                ratings.append(Rating(logistic(centred), details={"score": score}))
            if done is not None:
                done(index, ratings[-1])
        return ratings

    def _scores(
        self, prompts: Sequence[Prompt], completions: Sequence[str], stopped: Sequence[bool]
    ) -> list[float | None]:
        given = list(zip(prompts, completions, stopped, strict=True))
        keys = [digest([prompt, text] if is_stopped else [prompt, text, False]) for prompt, text, is_stopped in given]
        asked = dict(zip(keys, given, strict=True))
        if not asked:
            return []
        # In an order of their own: which completion stands first changes no batch, so not a bit of its score.
        order = sorted(asked)
        shown = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text, _ in (asked[key] for key in order)
        ]
        rows, num_shortened = encode_rows(
            self.tokenizer,
            [asked[key][0] for key in order],
            shown,
            self.max_length,
            reads_end_token(self.model),
            self.name,
            [asked[key][2] for key in order],
        )
        if num_shortened and not self.num_shortened:
            logger.warning(
                "judge %s: %d of %d texts had more than %d tokens and lost their beginning; said once, counted on in"
                " num_shortened",
                self.name,
                num_shortened,
                len(rows),
                self.max_length,
            )
        self.num_shortened += num_shortened
        scores = score_token_ids(self.model, rows, self.batch_size)
        found = dict(zip(order, scores.tolist(), strict=True))
        finite = dict(zip(order, scores.isfinite().tolist(), strict=True))
        return [found[key] if finite[key] else None for key in keys]


def load_reward_judge(
    name: str, *, device: torch.device | str | None = None, batch_size: int = 16
) -> RewardModelJudge:
    """Return the reward model at `name` as a judge, with the scale beside it where there is one.

    Args:
        name: folder or Hub name of a sequence-classification model with one label, or of an adapter of one.
        device: None leaves it on the CPU.
        batch_size: texts of one forward.

    Raises:
        FileNotFoundError, RuntimeError: nothing loadable there.
        ValueError: a model or an adapter without a trained score head, or with several labels.
    """
    path = Path(name).expanduser()
    source = str(path) if path.exists() else name
    if is_adapter_name(name):
        model = load_adapter_scorer(name, device=device)
        _forget_replaced_head(model)
        tokenizer = adapter_tokenizer(name)
        if tokenizer is None:
            tokenizer = read_tokenizer(read_score_adapter(name).base)
        else:
            model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    else:
        model = load_scorer(name, device=device)
        tokenizer = read_tokenizer(source, "tokenizer of the reward model")
    scale = read_score_scale(source)
    return RewardModelJudge(model, tokenizer, scale=scale, batch_size=batch_size, name=Path(source).name)


@torch.no_grad()
def _forget_replaced_head(model: PreTrainedModel) -> None:
    # PEFT keeps the head that the adapter's stands in for: random numbers, which would make an identity of each load.
    for name, parameter in model.named_parameters():
        if ".original_module." in name:
            parameter.zero_()


@torch.no_grad()
def _adapter_fingerprint(model: PreTrainedModel) -> str | None:
    """Return a hash of the LoRA weights in a model's layers, which its base's fingerprint leaves out."""
    found = hashlib.sha256()
    weights = [(name, p) for name, p in sorted(model.named_parameters()) if ".lora_" in name]
    for name, parameter in weights:
        found.update(f"{name} {list(parameter.shape)}".encode())
        found.update(parameter.float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16] if weights else None
