"""The state of an ExperienceStream in a checkpoint, and which settings of a run may differ when it resumes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from torch import Tensor

from onetrunk.checkpoints.resume_settings import (
    allow_steering,
    is_free,
    keep_optimizer_settings,
    require_same,
    rows_digest,
)
from onetrunk.data.sharded import ShardedRows
from onetrunk.models.adapters import POLICY
from onetrunk.models.loading import base_fingerprint
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.advantages import KLController, RunningMoments
from onetrunk.parallel.groups import RowGroups
from onetrunk.ppo.config import PPOConfig
from onetrunk.rewards.combine import OWN_COLUMNS, RewardSet
from onetrunk.rewards.reward import content_of, reward_name
from onetrunk.types import Experience, Pack, Places
from onetrunk.utils.files import atomic_write_json, load_tensors, read_json, read_number, reading_content, save_tensors
from onetrunk.utils.import_path import USER_MODULE

if TYPE_CHECKING:
    from onetrunk.rollouts.episodes.environments import Episodes

STATE_FILE = "experience_stream.json"
# A process's share of the rollout in use.
BUFFER_FILE = "experience_buffer_{rank}.safetensors"

# Which settings may differ between a checkpoint and the run that resumes from it. Every setting that is not listed
# here, nor free in checkpoints/resume_settings.py, steers the run: a change needs allow_config_change.
SETTINGS = {
    # Never: the position in the run depends on them, or the kind of controller.
    "place": "rollout_batch_size num_generations num_ppo_epochs num_minibatches shuffle_dataset"
    " seed data_seed kl_target".split(),
    # Only between two rollouts: the rollout in use was sampled and scored under them.
    "rollout": ["temperature", "kl_in_loss", "beta", "policy_objective"],
    # Without effect: the optimizer's state, which the checkpoint holds, keeps them.
    "optimizer": "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon".split(),
    # Never: they scale the policy's adapter, so its weights would mean another policy. They come from its config.
    "adapter": ["lora_alpha", "use_rslora"],
}
# What resuming rejects or keeps, also with allow_config_change; an alarm that advises one of them says so.
NEW_RUN = {*SETTINGS["place"], *SETTINGS["optimizer"], *SETTINGS["adapter"], "lora_target_modules"}
# Always: the batch arithmetic of PPO does not depend on them; nor on num_processes, over which `load_buffer` deals the
# rollout in use again.
FREE_IN_PPO = frozenset(
    "per_device_train_batch_size microbatch_tokens padding_free max_rollout_rows trunk_cache rollout_backend".split()
)


@dataclass
class StreamState:
    """The position of the stream.

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


def save_state(
    folder: str | Path,
    state: StreamState,
    settings: dict[str, Any],
    kl_controller: KLController,
    score_moments: RunningMoments,
) -> None:
    """Write `experience_stream.json`; `settings` are the `run_settings` of the run."""
    content = {
        "stream": asdict(state),
        "settings": settings,
        "kl_controller": kl_controller.state_dict(),
        "score_moments": score_moments.state_dict(),
    }
    atomic_write_json(Path(folder) / STATE_FILE, content)


def load_state(folder: str | Path, kl_controller: KLController, score_moments: RunningMoments) -> StreamState:
    """Read `experience_stream.json`; restores the controllers too."""
    content, state = _read_state(folder)
    kl_controller.load_state_dict(content["kl_controller"])
    score_moments.load_state_dict(content["score_moments"])
    return state


def check_state(folder: str | Path, settings: dict[str, Any], allow_changes: bool = False) -> None:
    """Check whether a run with the `run_settings` `settings` may be resumed from a checkpoint."""
    content, state = _read_state(folder)
    path = Path(folder) / STATE_FILE
    check_settings(path, content["settings"], settings, in_rollout=state.slot > 0, is_allowed=allow_changes)


def _read_state(folder: str | Path) -> tuple[dict[str, Any], StreamState]:
    path = Path(folder) / STATE_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: {folder} is not a checkpoint of onetrunk's PPOTrainer; pass one of its"
            " checkpoint-* folders"
        )
    content = read_json(path)
    with reading_content(path):
        state = StreamState(**content["stream"])
        for name, kind in {"iteration": int, "slot": int, "beta": float}.items():
            read_number(getattr(state, name), kind)
        return content, state


def save_buffer(folder: str | Path, experiences: list[Experience], rank: int) -> None:
    """Write the experiences of the rollout in use; no file if there are none."""
    tensors: dict[str, Tensor] = {}
    for number, experience in enumerate(experiences):
        for name, tensor in _tensors(experience).items():
            tensors[f"{number:06d}.{name}"] = tensor.cpu().contiguous()
    if tensors:
        save_tensors(Path(folder) / BUFFER_FILE.format(rank=rank), tensors)


def load_buffer(
    folder: str | Path, rank: int, num_processes: int, needs_equal_counts: bool = False
) -> list[Experience]:
    """Return this process's share of the rollout in use, on the CPU.

    Another number of processes than the one that wrote the checkpoint deals the packs again, and so does a sharded
    base (`needs_equal_counts`) if the processes wrote different numbers of packs. The rows of a minibatch stay
    together and keep their width, so that its gradient changes only in the order of sums.
    """
    written = num_writers(folder)
    if written == num_processes and not needs_equal_counts:
        return _read_buffer(folder, rank)
    shares = [_read_buffer(folder, writer) for writer in range(written)]
    counts = {tuple(sorted(experience.pack.minibatch for experience in share)) for share in shares}
    if written == num_processes and len(counts) == 1:
        return shares[rank]
    return deal_packs([experience for share in shares for experience in share], rank, num_processes)


def num_writers(folder: str | Path) -> int:
    """Return the number of processes that wrote a checkpoint; a group that divides the base counts as one."""
    return written_settings(folder)["num_processes"]


def processes_per_row(layout: dict[str, Any]) -> int:
    """Return how many consecutive processes work on the same rows, from the settings of a run."""
    return layout["tensor_parallel"] * layout["training_stages"]


def written_settings(folder: str | Path) -> dict[str, Any]:
    """Return the `run_settings` of the run that wrote a checkpoint."""
    return read_json(Path(folder) / STATE_FILE)["settings"]


def deal_packs(experiences: Sequence[Experience], rank: int, num_processes: int) -> list[Experience]:
    """Return one process's share of packs: equally many of each minibatch, for which large packs are cut in two."""
    share = []
    for minibatch in sorted({experience.pack.minibatch for experience in experiences}):
        packs = [experience for experience in experiences if experience.pack.minibatch == minibatch]
        while len(packs) % num_processes and any(experience.pack.num_rows > 1 for experience in packs):
            largest = max(range(len(packs)), key=lambda i: packs[i].pack.num_rows)
            packs[largest : largest + 1] = halve(packs[largest])
        while len(packs) % num_processes:  # Single rows of a compacted episode: one more trains nothing.
            packs.append(replace(packs[0], loss_mask=torch.zeros_like(packs[0].loss_mask)))
        share += packs[rank::num_processes]
    return share


def halve(experience: Experience) -> list[Experience]:
    """Cut an experience of two or more rows in two, at the same width."""
    half = -(-experience.pack.num_rows // 2)
    parts = [_rows(replace(experience, states=None), rows) for rows in (slice(None, half), slice(half, None))]
    if experience.states is None:
        return parts
    lengths = [int(part.pack.attention_mask.sum()) for part in parts]
    return [replace(part, states=s) for part, s in zip(parts, experience.states.split(lengths), strict=True)]


def _rows(record: Any, rows: slice) -> Any:
    changes = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Places):
            changes[field.name] = None  # Found again among these rows.
        elif is_dataclass(value):
            changes[field.name] = _rows(value, rows)
        elif isinstance(value, Tensor):
            changes[field.name] = value[rows]
    return replace(record, **changes)


def _read_buffer(folder: str | Path, rank: int) -> list[Experience]:
    path = Path(folder) / BUFFER_FILE.format(rank=rank)
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, but the checkpoint was saved in the middle of a rollout; pass another one"
        )
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_tensors(path).items():
        number, name = key.split(".", 1)
        groups.setdefault(number, {})[name] = tensor
    return [_experience(groups[number]) for number in sorted(groups)]


def _tensors(experience: Experience) -> dict[str, Tensor]:
    values: dict[str, Any] = {
        f"pack.{f.name}": getattr(experience.pack, f.name) for f in fields(Pack) if f.name != "places"
    }
    values |= {f.name: getattr(experience, f.name) for f in fields(Experience) if f.name != "pack"}
    return {name: torch.as_tensor(value) for name, value in values.items() if value is not None}


def _experience(tensors: dict[str, Tensor]) -> Experience:
    of_pack: dict[str, Any] = {n.removeprefix("pack."): t for n, t in tensors.items() if n.startswith("pack.")}
    of_pack["minibatch"] = int(of_pack["minibatch"])
    return Experience(Pack(**of_pack), **{n: t for n, t in tensors.items() if not n.startswith("pack.")})


def run_settings(
    config: PPOConfig,
    dataset: Dataset | ShardedRows,
    ranks: RowGroups,
    model: TrunkModel,
    rewards: RewardSet,
    episodes: Episodes | None = None,
) -> dict[str, Any]:
    """Return the settings that `check_settings` compares, as JSON values; `dataset` holds the training prompts."""
    names = [*SETTINGS["place"], *SETTINGS["rollout"], *SETTINGS["optimizer"]]
    settings = {name: getattr(config, name) for name in names} | ranks.layout
    is_streamed = isinstance(dataset, ShardedRows)
    settings["prompts"] = rows_digest(dataset if is_streamed else dataset.select_columns(["prompt_ids"]))
    base, adapter = model.get_base_model(), model.peft_config[POLICY]
    settings |= {"base": base_fingerprint(base), "base_name": base.config.name_or_path}
    settings |= {name: getattr(adapter, name) for name in SETTINGS["adapter"]}
    steering: dict[str, Any] = {"reward_funcs": [reward_path(function) for function in rewards.functions]}
    steering |= {f"reward_funcs.{name}": content for name, content in rewards.contents.items()}
    sources = {} if episodes is None else episodes.sources
    # Their names too: what only one of two runs has is not compared.
    steering |= {"episodes": sorted(sources), **{name: content_of(source) for name, source in sources.items()}}
    if is_streamed:
        steering["row_contents"] = dataset.contents
    else:
        reads_all = episodes is not None and episodes.has_environment
        columns = rewards.columns_read(dataset.column_names)
        columns = [n for n in dataset.column_names if n not in OWN_COLUMNS] if reads_all else columns
        steering |= {f"reward_columns.{name}": rows_digest(dataset.select_columns([name])) for name in columns}
    for name, value in config.to_dict().items():
        if name not in settings and name not in FREE_IN_PPO and not is_free(name):
            steering[name] = value
    # As the file returns it: tuples are lists there.
    return json.loads(json.dumps({**settings, "steering": steering}, default=str))


def reward_path(function: Callable[..., Any]) -> str:
    """Return the name and module of a reward function; of a file its name, without the folder."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):  # an instance of a class with __call__
        return f"{type(function).__module__}.{type(function).__qualname__} {reward_name(function)}"
    # A function made by exec has no module.
    module, code = function.__module__ or "", getattr(function, "__code__", None)
    if code is not None and module.startswith(USER_MODULE):
        return f"{Path(code.co_filename).name}:{function.__qualname__}"
    return f"{module}.{function.__qualname__}".lstrip(".")


def check_settings(
    path: Path, written: dict[str, Any], current: dict[str, Any], in_rollout: bool, is_allowed: bool = False
) -> None:
    """Check the `run_settings` of a resumed run against its checkpoint, by the table `SETTINGS`."""
    changeable = {"base_name", "steering", "num_processes", "training_stages", *SETTINGS["optimizer"]}
    between = [] if in_rollout else list(SETTINGS["rollout"])
    if current["kl_target"] is not None and not in_rollout:
        # An adaptive beta continues from the checkpoint: another initial value would have no effect.
        between.remove("beta")
    require_same(path, written, current, [name for name in current if name not in {*changeable, *between}])
    keep_optimizer_settings(path, written, current, SETTINGS["optimizer"], is_allowed)
    steered, steers = dict(written["steering"]), dict(current["steering"])
    for name in between:
        steered[name], steers[name] = written.get(name), current[name]
    allow_steering(path, steered, steers, is_allowed)
