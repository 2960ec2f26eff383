"""What a reward is computed from, as a short text. A resumed run compares it, so that no reward changes unnoticed.

A function is known by its name and the sha256 of its source file, a model by its weights and tokenizer, a server by
its address and the model's name. Imports and values in closures are not followed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from onetrunk.judges.judge import digest
from onetrunk.judges.rubric import source_identity
from onetrunk.models.loading import scorer_fingerprint, tensors_digest
from onetrunk.models.reward_model import ScoreAdapter
from onetrunk.rewards.ensemble import EnsembleReward
from onetrunk.rewards.judge_reward import COLUMN, JudgeReward, PairwiseReward
from onetrunk.rewards.model import SAMPLE_TEXTS, ModelReward, TrunkReward
from onetrunk.rewards.remote import RemoteReward
from onetrunk.rewards.reward import without_partials

OURS = (ModelReward, EnsembleReward, TrunkReward, RemoteReward, JudgeReward, PairwiseReward)
# Keys of an adapter's config that do not change what it computes.
PASSING_IN_ADAPTERS = ("base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping")


def content_of(reward: Callable[..., Any]) -> str:
    """Return what a reward function is computed from: the same text in every process, until something changes."""
    if type(reward) in OURS:
        return _content_of_ours(reward)
    about = source_identity(reward)
    inner = inspect.unwrap(without_partials(reward))
    sources = [about["source"], source_identity(inner)["source"]]
    if inspect.isfunction(inner) and inner.__module__ == "__main__":
        with contextlib.suppress(OSError):  # Typed into a console.
            sources = [_short(inspect.getsource(inner))]  # The script also holds the settings of the run.
    # As a digest, because some settings are secrets.
    own = f"{about['name']}, sha256 {_short([sources, about['settings']])}"
    return f"{_content_of_ours(reward)}, {own}" if isinstance(reward, OURS) else own


def _content_of_ours(reward: Any) -> str:
    if isinstance(reward, ModelReward):
        tokenizer = reward.tokenizer
        tokens = _short([tokenizer(list(SAMPLE_TEXTS))["input_ids"], tokenizer.chat_template, tokenizer.pad_token_id])
        return f"{scorer_fingerprint(reward.model)}, tokenizer sha256 {tokens}, max_length {reward.max_length}"
    if isinstance(reward, EnsembleReward):
        scales = [[scale.mean, scale.std] for scale in reward.scales]
        return f"ensemble, sha256 {_short([[content_of(m) for m in reward.members], scales, reward.penalty])}"
    if isinstance(reward, TrunkReward):
        return f"adapter, sha256 {_adapter_digest(reward.adapter)}"
    if isinstance(reward, RemoteReward):
        return f"server {reward.server.url}, model {reward.model or 'not named'}"
    numbers = [reward.beta, reward.floor] if isinstance(reward, PairwiseReward) else []
    judge = _short([reward.judge.identity, numbers])
    return f"judge, sha256 {judge}, constitution {reward.constitution.version[:16]}"


def _adapter_digest(adapter: ScoreAdapter) -> str:
    config = {name: value for name, value in adapter.config.to_dict().items() if name not in PASSING_IN_ADAPTERS}
    ordered = {name: sorted(value) if isinstance(value, set) else str(value) for name, value in config.items()}
    weights = tensors_digest({**adapter.weights, **{f"head.{key}": t for key, t in adapter.head.items()}})
    return _short([ordered, weights, adapter.pad_token_id])


def _short(value: Any) -> str:
    return digest(value)[:16]


def columns_read(reward: Callable[..., Any], columns: Sequence[str]) -> list[str]:
    """Return the columns of the dataset that a reward function reads: those it names; with `**kwargs`, all of them."""
    if isinstance(reward, OURS):
        return [name for name in columns if name == COLUMN and isinstance(reward, PairwiseReward)]
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):
        return list(columns)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [name for name in columns if takes_all or name in parameters]
