"""What a launch asks for: how its processes share the frozen base, and which of them work on the same rows.

An accelerate config asks for shards, copies and tensor parallelism (`launch_layout`), the settings of PPO for the
stages of a pipeline (`train_in_stages`). Both hold for the whole process, from before a model is loaded.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from onetrunk.utils.options import reject_deepspeed

USE_FSDP, USE_PARALLELISM = (f"ACCELERATE_USE_{name}" for name in ("FSDP", "PARALLELISM_CONFIG"))
# Set by `train_in_stages`.
_training = {"stages": 1}


@dataclass(frozen=True)
class Layout:
    """How the processes of a launch share the frozen base.

    Args:
        replicas: copies of the base, each of which equally many consecutive processes hold together. Only gradients
            of what trains cross between copies.
        tensor: processes that divide every matrix and run each forward together (tensor parallelism); 1: the base is
            sharded.
    """

    replicas: int = 1
    tensor: int = 1


@functools.cache
def launch_layout() -> Layout | None:
    """Return the layout that the accelerate config of this launch asks for; None: every process holds the whole base.

    The request is taken over from accelerate, which would otherwise wrap the model itself: call this before a model
    is loaded and before an Accelerator exists. The answer holds for the whole process.
    """
    reject_deepspeed()
    sizes = _parallelism_sizes()
    for name in ("CP_SIZE", "SP_SIZE"):
        if sizes[name] > 1:
            raise ValueError(
                f"parallelism_config_{name.lower()} is {sizes[name]}; only 1 is supported: lower"
                " max_completion_length, or set activation_checkpointing"
            )
    if sizes["TP_SIZE"] > 1:
        return _tensor_layout(sizes)
    if not _is_set(USE_FSDP):
        return None
    _check_fsdp_options()
    for name in (USE_FSDP, USE_PARALLELISM, "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ[name] = "false"
    replicas, shards, world_size = sizes["DP_REPLICATE_SIZE"], sizes["DP_SHARD_SIZE"], launched_processes()
    if world_size % replicas or shards not in (1, world_size // replicas):
        raise ValueError(
            f"parallelism_config asks for {replicas} replicas of {shards} shards and {world_size} processes run;"
            " dp_replicate_size x dp_shard_size must be the number of processes"
        )
    return Layout(replicas)


def train_in_stages(stages: int) -> None:
    """Say that groups of consecutive processes train as the stages of a pipeline from now on; 1: they do not.

    Call it before a model is loaded. It holds for the whole process, as the layout of the launch does.
    """
    _training["stages"] = stages


def training_stages() -> int:
    """Return the number of processes that train together as the stages of a pipeline; 1: there is no pipeline."""
    return _training["stages"]


def group_size() -> int:
    """Return how many consecutive processes work on the same rows: by tensor parallelism, or as training stages."""
    layout = launch_layout()
    return (1 if layout is None else layout.tensor) * training_stages()


def check_stage_launch(what: str, stages: int | None, world_size: int, otherwise: str) -> None:
    """Raise ValueError unless the processes of a launch form pipelines.

    Args:
        what: the setting that asks for pipelines.
        stages: processes of a pipeline; None: all.
        otherwise: how to do without.
    """
    stages = stages or world_size
    if world_size == 1 or world_size % stages:
        raise ValueError(
            f"{what} forms pipelines of {max(2, stages)} processes and {world_size} run; launch a multiple of that"
            f" number: onetrunk ppo --num_processes {max(2, stages)} --accelerate_config pipelined ..., or"
            f" {otherwise}"
        )


def check_stage_layout(what: str, otherwise: str) -> None:
    """Raise ValueError if the launch shards or divides the base, whose layers training stages divide."""
    layout = launch_layout()
    if layout is not None:
        how = "divides every matrix (tensor parallelism)" if layout.tensor > 1 else "shards them (fsdp_config)"
        raise ValueError(
            f"{what} divides the layers of the base over the processes, and the launch {how}; launch with"
            f" accelerate_configs/pipelined.yaml, or {otherwise}"
        )


def reject_tensor_parallelism(setting: str, why: str) -> None:
    """Raise ValueError if the launch divides the layers over its processes; `why` also says what to change."""
    layout = launch_layout()
    if layout is not None and layout.tensor > 1:
        raise ValueError(f"{setting} is not supported with tensor parallelism, {why}")


def launched_processes() -> int:
    """Return the number of processes of the launch, also before they have joined a group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _tensor_layout(sizes: dict[str, int]) -> Layout:
    tensor, world_size = sizes["TP_SIZE"], launched_processes()
    if _is_set(USE_FSDP) or sizes["DP_SHARD_SIZE"] > 1:
        raise ValueError(
            f"parallelism_config_tp_size is {tensor} and the config also shards (fsdp_config or dp_shard_size); choose"
            " one of the two: accelerate_configs/tensor_parallel.yaml or fsdp2.yaml"
        )
    replicas = sizes["DP_REPLICATE_SIZE"]
    if world_size % tensor or replicas not in (1, world_size // tensor):
        raise ValueError(
            f"parallelism_config asks for groups of {tensor} processes ({replicas} groups) and {world_size} processes"
            " run; the number of processes must be a multiple of tp_size, and dp_replicate_size 1 or their quotient"
        )
    os.environ[USE_PARALLELISM] = "false"
    return Layout(world_size // tensor, tensor)


def _is_set(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


def _parallelism_sizes() -> dict[str, int]:
    names = ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE")
    is_used = _is_set(USE_PARALLELISM)
    return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name}", "1")) if is_used else 1 for name in names}


def _check_fsdp_options() -> None:
    """Raise ValueError for an option of the FSDP section that would be ignored."""
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("fsdp_version 1 is not supported; set fsdp_version: 2, as accelerate_configs/fsdp2.yaml does")
    advice = {
        ("FSDP_OFFLOAD_PARAMS", "true"): "load the base in 4 bit, or shard it over more processes",
        ("FSDP_ACTIVATION_CHECKPOINTING", "true"): "set activation_checkpointing in the trainer's settings",
        ("FSDP_RESHARD_AFTER_FORWARD", "false"): "set it to true, or launch with accelerate_configs/ddp.yaml",
    }
    for (name, value), remedy in advice.items():
        if os.environ.get(name, "").lower() == value:
            raise ValueError(f"{name.lower()}: {value} is not supported; {remedy}")
