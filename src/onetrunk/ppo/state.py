"""What a run is made of, as far as a checkpoint must know it: what may not change on resuming, and what is told.

Knows settings, rows, the base and what reward functions are computed from; no state.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from onetrunk.checkpoints.settings import (
    allow_steering,
    is_free,
    keep_optimizer_settings,
    require_base,
    require_same,
)
from onetrunk.models.adapters import POLICY
from onetrunk.models.sources import base_fingerprint
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.advantages import AdaptiveKLController, FixedKLController
from onetrunk.ppo.config import PPOConfig
from onetrunk.rewards.base import reward_name
from onetrunk.rewards.combine import RewardSet
from onetrunk.rewards.shaping import RunningMoments
from onetrunk.types import Experience, Pack
from onetrunk.utils.files import atomic_write_json, load_tensors, read_json, save_tensors

STATE_FILE = "experience_stream.json"


@dataclass
class StreamState:
    """Where the stream stands.

    Args:
        iteration: number of the rollout in use, from 0.
        slot: next optimizer step of that rollout, from 0; above 0 there is a buffer.
        skips_rest: True after a `target_kl` stop, until the rollout ends.
        beta: KL coefficient of the rollout in use.
    """

    iteration: int = 0
    slot: int = 0
    skips_rest: bool = False
    beta: float = 0.0


def kl_controller(beta: float, target: float | None, horizon: int) -> FixedKLController | AdaptiveKLController:
    """Return what holds the KL coefficient: adaptive where there is a target."""
    return FixedKLController(beta) if target is None else AdaptiveKLController(beta, target, horizon)


def save_state(
    folder: str | Path,
    state: StreamState,
    settings: dict[str, Any],
    kl_controller: FixedKLController | AdaptiveKLController,
    score_moments: RunningMoments,
) -> None:
    """Write `experience_stream.json`; `settings` are those that the place in the run rests on."""
    content = {
        "stream": asdict(state),
        "settings": settings,
        "kl_controller": kl_controller.state_dict(),
        "score_moments": score_moments.state_dict(),
    }
    atomic_write_json(Path(folder) / STATE_FILE, content)


def load_state(
    folder: str | Path,
    settings: dict[str, Any],
    kl_controller: FixedKLController | AdaptiveKLController,
    score_moments: RunningMoments,
    allow_changes: bool = False,
) -> StreamState:
    """Read `experience_stream.json`; the controllers take their state from it.

    Raises:
        ValueError: the file is missing, is not one of ours, or was written on another base or under other `settings`.
            With `allow_changes` those that only steer what comes may differ, and a warning says how.
    """
    path = Path(folder) / STATE_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: {folder} is no checkpoint of onetrunk's PPOTrainer; pass one of its"
            " checkpoint-* folders"
        )
    content = read_json(path)
    try:
        state = StreamState(**content["stream"])
        check_settings(path, content["settings"], settings, in_rollout=state.slot > 0, is_allowed=allow_changes)
        kl_controller.load_state_dict(content["kl_controller"])
        score_moments.load_state_dict(content["score_moments"])
        return state
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} does not hold the state of an experience stream ({error})") from error


def buffer_file(rank: int) -> str:
    """Return the name of the file with the rollout in use of a process."""
    return f"experience_buffer_{rank}.safetensors"


def save_buffer(folder: str | Path, experiences: list[Experience], rank: int) -> None:
    """Write the experiences of the rollout in use; nothing where there is none."""
    tensors: dict[str, Tensor] = {}
    for number, experience in enumerate(experiences):
        for name, tensor in _tensors(experience).items():
            tensors[f"{number:06d}.{name}"] = tensor.cpu().contiguous()
    if tensors:
        save_tensors(Path(folder) / buffer_file(rank), tensors)


def load_buffer(folder: str | Path, rank: int) -> list[Experience]:
    """Read what `save_buffer` wrote, on the CPU.

    Raises:
        ValueError: the file is missing (the checkpoint was written by another number of processes, or is incomplete),
            or was written by an earlier version.
    """
    path = Path(folder) / buffer_file(rank)
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, but the checkpoint lies in the middle of a rollout; resume on the number of processes"
            " that wrote it"
        )
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_tensors(path).items():
        number, name = key.split(".", 1)
        groups.setdefault(number, {})[name] = tensor
    if not all("pack.minibatch" in tensors for tensors in groups.values()):
        raise ValueError(
            f"{path} does not say which minibatch a pack belongs to: an earlier version wrote it. Resume from a"
            " checkpoint between two rollouts"
        )
    return [_experience(groups[number]) for number in sorted(groups)]


def _tensors(experience: Experience) -> dict[str, Tensor]:
    found: dict[str, Any] = {f"pack.{f.name}": getattr(experience.pack, f.name) for f in fields(Pack)}
    found |= {f.name: getattr(experience, f.name) for f in fields(Experience) if f.name != "pack"}
    return {name: torch.as_tensor(value) for name, value in found.items() if value is not None}


def _experience(tensors: dict[str, Tensor]) -> Experience:
    of_pack: dict[str, Any] = {n.removeprefix("pack."): t for n, t in tensors.items() if n.startswith("pack.")}
    of_pack["minibatch"] = int(of_pack["minibatch"])
    pack = Pack(**of_pack)
    return Experience(pack=pack, **{n: t for n, t in tensors.items() if not n.startswith("pack.")})


PLACE_SETTINGS = (
    "rollout_batch_size",
    "num_generations",
    "num_ppo_epochs",
    "num_minibatches",
    "shuffle_dataset",
    "seed",
    "data_seed",
)
# What the rollout in use was sampled and scored under; between two rollouts they may change.
ROLLOUT_SETTINGS = ("num_processes", "temperature", "kl_in_loss", "beta")
# Whether they are None decides the kind of controller and the optimizer's groups; their values may change.
OPTIONAL_SETTINGS = ("kl_target", "value_learning_rate")
# The optimizer keeps them in its own state, which comes from the checkpoint.
KEPT_SETTINGS = (
    "learning_rate",
    "value_learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
# Scale the policy's adapter: its weights would mean another policy.
ADAPTER_SETTINGS = ("lora_alpha", "use_rslora")
# Free in PPO, whose batch arithmetic does not rest on them.
FREE_IN_PPO = frozenset("per_device_train_batch_size microbatch_tokens max_rollout_rows trunk_cache".split())
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def run_settings(
    config: PPOConfig, dataset: Dataset, num_processes: int, model: TrunkModel, rewards: RewardSet
) -> dict[str, Any]:
    """Return what `check_settings` compares, in terms of JSON.

    Args:
        config: the settings.
        dataset: the training prompts, tokenized.
        num_processes: of the run.
        model: the trunk.
        rewards: the reward functions.
    """
    names = dict.fromkeys((*PLACE_SETTINGS, *ROLLOUT_SETTINGS[1:], *OPTIONAL_SETTINGS, *KEPT_SETTINGS))
    settings = {name: getattr(config, name) for name in names}
    settings |= {"num_processes": num_processes, "prompts": _fingerprint(dataset["prompt_ids"])}
    base, adapter = model.get_base_model(), model.peft_config[POLICY]
    settings |= {"base": base_fingerprint(base), "base_name": base.config.name_or_path}
    settings |= {name: getattr(adapter, name) for name in ADAPTER_SETTINGS}
    told: dict[str, Any] = {"reward_funcs": [reward_path(function) for function in rewards.functions]}
    told |= {f"reward_funcs.{name}": content for name, content in rewards.contents.items()}
    columns = rewards.columns_read(dataset.column_names)
    told |= {f"reward_columns.{name}": column_digest(dataset, name) for name in columns}
    for name, value in config.to_dict().items():
        if name not in settings and name not in FREE_IN_PPO and not is_free(name):
            told[name] = value
    # As it comes back from the file: tuples are lists there.
    return json.loads(json.dumps({**settings, "told": told}, default=str))


def reward_path(function: Callable[..., Any]) -> str:
    """Return what a reward function is called and where it comes from, without the folder of a file."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):
        return f"{type(function).__module__}.{type(function).__qualname__} {reward_name(function)}"
    # A function made by exec has no module.
    module, code = function.__module__ or "", getattr(function, "__code__", None)
    if code is not None and module.startswith("onetrunk_reward_"):
        return f"{Path(code.co_filename).name}:{function.__qualname__}"
    return f"{module}.{function.__qualname__}".lstrip(".")


def column_digest(dataset: Dataset, name: str) -> str:
    """Return how many rows a column has and a digest of what is in them."""
    digest = hashlib.sha256()
    for batch in dataset.select_columns([name]).with_format(None).iter(batch_size=1000):
        # Dates and the like as text; of an object without one its address must not count.
        text = json.dumps(batch[name], sort_keys=True, default=lambda value: ADDRESS.sub("", str(value)))
        digest.update(text.encode())
    return f"{len(dataset)} rows, sha256 {digest.hexdigest()[:16]}"


def _fingerprint(rows: Sequence[list[int]]) -> str:
    """Return how many rows there are and a digest of their token ids."""
    digest = hashlib.sha256()
    for ids in rows:
        digest.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
    return f"{len(rows)} rows, sha256 {digest.hexdigest()[:16]}"


def check_settings(
    path: Path, written: dict[str, Any], own: dict[str, Any], in_rollout: bool, is_allowed: bool = False
) -> None:
    """Refuse settings that the place in a run does not fit, and changed ones unless that is meant.

    Args:
        path: the file that `written` comes from.
        written: what `run_settings` said when the checkpoint was written.
        own: what it says now.
        in_rollout: True where the checkpoint lies in the middle of a rollout.
        is_allowed: `allow_config_change`.

    Raises:
        ValueError: names every setting that has to be as it was.
    """
    require_base(path, written, own)
    free = {"base_name", "told", *KEPT_SETTINGS} - set(OPTIONAL_SETTINGS)
    if not in_rollout:
        free |= set(ROLLOUT_SETTINGS)
    if own["kl_target"] is not None:
        # An adaptive beta goes on from the checkpoint: another start would say nothing.
        free.discard("beta")
    require_same(path, written, own, [n for n in own if n not in free and _differs(n, written.get(n), own[n])])
    keep_optimizer_settings(path, written, own, KEPT_SETTINGS, is_allowed)
    before, now = dict(written.get("told", {})), dict(own["told"])
    for name in (*OPTIONAL_SETTINGS[:1], *(() if in_rollout else ROLLOUT_SETTINGS)):
        before[name], now[name] = written.get(name), own[name]
    allow_steering(path, before, now, is_allowed)


def _differs(name: str, written: Any, own: Any) -> bool:
    if name in OPTIONAL_SETTINGS:
        return (written is None) != (own is None)
    return written != own
