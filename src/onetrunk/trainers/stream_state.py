"""What a checkpoint keeps of the experience stream: its place, its controllers and the rollout in use.

JSON for numbers, safetensors for tensors; nothing is pickled.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onetrunk.files import atomic_write_json, load_tensors, read_json, save_tensors
from onetrunk.ops.advantages import AdaptiveKLController, FixedKLController
from onetrunk.rewards.normalize import RunningMoments
from onetrunk.trainers.run_settings import check_settings
from onetrunk.types import Experience, Pack

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
