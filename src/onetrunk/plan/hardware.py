"""The devices of a plan: `hardware.yaml`, a file of the user's, and pools such as 8xH100-80GB+4xL40S.

Rates say how fast a device works. Those of training were fitted to the step times of six programs
(`scripts/plan/measurements.py`; README.md has the errors); `plan --calibrate` measures those of this machine.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from onetrunk.utils.files import read_yaml

FILE = Path(__file__).with_name("hardware.yaml")
GIB = 2**30
# Share of the on-demand price, where a device has no price of its own there; hardware.yaml names the sources.
MARKETS = {"on_demand": 1.0, "spot": 0.5, "reserved": 0.7}
# Most GPUs of one machine, where --nodes does not say how they are divided.
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Rates:
    """Efficiencies and overheads of a device: shares of its peak, and times that no peak explains.

    A GPU computes while its host launches the next kernels, so a forward takes as long as the slower of the two: the
    FLOPs over a share of the peak, or a constant time per layer. On a CPU both add up.

    Args:
        matmul: share of the peak that large products reach.
        attention: share that the products of attention reach.
        hidden_half, tokens_half: width and tokens of a forward at which half of `matmul` is reached; 0: always all.
        launch_s: least seconds in which the host launches an operation of torch; a lower bound of every phase.
        layer_s: seconds of launches per layer of a checkpointed forward with its backward; a forward alone: a third.
        adapter_layer_s: the same of the adapters of a layer, on all of its matrices.
        unpack_bytes: bytes of memory traffic that the unpacking of one quantised weight takes as long as.
        decode_matmul: share of the peak that the products of a decoded token reach.
        decode_layer_s, decode_step_s: seconds per layer, and per step, of a decoded token in this process.
        served_layer_s, served_step_s, served_row_s: of a server with CUDA graphs per layer, per step, and per row and
            step (draws, logprobs, text); the last was set to the one published throughput of a server.
        forward_s: seconds of a forward with its backward beyond its layers.
        row_s: seconds per row and decoded token (draws, bookkeeping).
        step_s: seconds of an optimizer step (clipping, Adam).
        token_s: seconds per token of scoring and of each pass of the update, beyond products (PPO arithmetic).
        bandwidth: share of the memory bandwidth that decoding reaches.
        link: share of the bandwidth between devices that collectives reach.
        runtime_gib: memory of a process before it has a model.
    """

    matmul: float = 0.478
    attention: float = 0.478
    hidden_half: float = 0.0
    tokens_half: float = 0.0
    launch_s: float = 0.000005
    layer_s: float = 0.00413
    adapter_layer_s: float = 0.00516
    unpack_bytes: float = 23.9
    decode_matmul: float = 0.50
    decode_layer_s: float = 0.001
    decode_step_s: float = 0.0
    served_layer_s: float = 0.00004
    served_step_s: float = 0.002
    served_row_s: float = 0.00004
    forward_s: float = 0.0
    row_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0
    bandwidth: float = 0.65
    link: float = 0.7
    runtime_gib: float = 0.7

    @property
    def is_calibrated(self) -> bool:
        """Whether the values were measured on the machine."""
        return self != Rates()

    def saturation(self, hidden: int, tokens: float) -> float:
        """Return the share of its best rate that a product of `tokens` rows and `hidden` columns reaches."""
        return hidden / (hidden + self.hidden_half) * tokens / (tokens + self.tokens_half)


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU core; units and sources are in hardware.yaml.

    Args:
        kernels: share of the usual efficiency that current kernels reach on it.
        is_cpu: counts memory of the machine, and has no GPU runtime.
        rates: what `plan --calibrate` measured, or the usual efficiencies of a GPU.
    """

    name: str
    memory_gib: float
    tflops: float
    bandwidth_gb_s: float
    link_gb_s: float
    network_gb_s: float
    host_gib: float
    usd_per_hour: float
    usd_per_hour_spot: float | None = None
    usd_per_hour_reserved: float | None = None
    kernels: float = 1.0
    is_cpu: bool = False
    rates: Rates = field(default_factory=Rates)

    def price(self, market: str) -> float:
        """Return dollars per hour of one device on a market of MARKETS."""
        own = {"spot": self.usd_per_hour_spot, "reserved": self.usd_per_hour_reserved}.get(market)
        return self.usd_per_hour * MARKETS[market] if own is None else own


# Numbers that a formula divides by.
ABOVE_ZERO = {
    "memory_gib", "tflops", "bandwidth_gb_s", "link_gb_s", "network_gb_s", "host_gib", "kernels", "matmul",
    "attention", "decode_matmul", "bandwidth", "link",
}  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """Devices of one kind, on machines of `per_node` each."""

    device: Device
    count: int
    per_node: int

    def __str__(self) -> str:
        return f"{self.count}x{self.device.name}"


@dataclass(frozen=True)
class Catalog:
    """Devices by name, and the prices of what is not a device."""

    devices: Mapping[str, Device]
    storage_usd_per_gb_month: float
    transfer_usd_per_gb: float


@functools.cache
def load_catalog(user_file: str | None = None) -> Catalog:
    """Return the known devices, with those of a user's file added or changed."""
    content, devices = _content(FILE), {}
    user = {} if user_file is None else _content(Path(os.path.expanduser(user_file)))
    for path, values in ((FILE, content), (user_file, user)):
        for name, numbers in values.get("devices", {}).items():
            devices[name] = _device(name, numbers, devices.get(name), f"{path}: device {name}")
    prices = {key: content[key] for key in ("storage_usd_per_gb_month", "transfer_usd_per_gb")}
    return Catalog(devices, **prices | {key: float(user[key]) for key in prices if key in user})


def _content(path: Path) -> dict[str, Any]:
    content, _ = read_yaml(path)
    known = ("sources", "devices", "storage_usd_per_gb_month", "transfer_usd_per_gb")
    if not isinstance(content, dict) or set(content) - set(known) or not isinstance(content.get("devices", {}), dict):
        raise ValueError(f"{path} must have the keys {', '.join(known)}, of which devices maps names to values")
    return content


def _device(name: str, values: Any, known: Device | None, place: str) -> Device:
    numbers = _numbers(Device, values, place)
    if "rates" in numbers:
        numbers["rates"] = Rates(**_numbers(Rates, numbers["rates"], f"{place}: rates"))
    if known is not None:
        return replace(known, **numbers)
    missing = [f.name for f in fields(Device)[1:8] if f.name not in numbers]
    if missing:
        raise ValueError(f"{place} is new and lacks {', '.join(missing)}")
    return Device(name, **numbers)


def _numbers(kind: type, values: Any, place: str) -> dict[str, Any]:
    """Return the fields of a Device, or of its Rates, that a mapping of a hardware file has."""
    names = [f.name for f in fields(kind) if f.name != "name"]
    if not isinstance(values, dict):
        raise ValueError(f"{place} is {values!r}; give a mapping with {', '.join(names)}")
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            raise ValueError(f"{place} has {key}; {f'did you mean {near[0]}' if near else 'expected ' + str(names)}?")
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        if key != "rates" and (not is_number or value < 0 or (value == 0 and key in ABOVE_ZERO)):
            raise ValueError(f"{place}: {key} is {value!r}; give a number above 0")
    return dict(values)


def find_device(name: str, catalog: Catalog) -> Device:
    """Return a device by its name, in any spelling that only one has: h100, H100-80GB, RTX 4090."""

    def plain(text: str) -> str:
        return re.sub(r"nvidia|rtx|[^a-z0-9]", "", text.lower())

    wanted, names = plain(name), list(catalog.devices)
    # The memory may be left out.
    fits = [full for full in names if wanted == plain(full)] or [
        full for full in names if wanted == plain(full.partition("-")[0])
    ]
    if len(fits) == 1:
        return catalog.devices[fits[0]]
    if fits:
        raise ValueError(f"{name!r} may be {' or '.join(fits)}; write one of them")
    near = difflib.get_close_matches(name.upper(), names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"unknown GPU {name!r}: {hint}Known: {', '.join(names)}; add yours with --hardware_file")


def devices_like(gpu: str, catalog: Catalog) -> list[Device]:
    """Return the devices that a name of torch may mean, such as NVIDIA A100-SXM4-80GB; of several memories, all."""
    plain = gpu.replace(" ", "")
    return [device for name, device in catalog.devices.items() if name.partition("-")[0] in plain]


def parse_pools(text: str, nodes: int | None, catalog: Catalog) -> tuple[Pool, ...]:
    """Return the pools in a text such as "8xH100-80GB+4xL40S".

    Args:
        nodes: machines that each have these counts; None: the counts are of all machines, eight devices to each.
    """
    pools: list[Pool] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?(\S.*?)\s*", part)
        if match is None or match[1] == "0":
            raise ValueError(f"--hardware {text!r}: {part!r} is not COUNTxNAME; write for example 8xH100-80GB+4xL40S")
        device, count = find_device(match[2], catalog), int(match[1] or 1)
        if device.name in (pool.device.name for pool in pools):
            raise ValueError(f"--hardware {text!r} names {device.name} twice; write one count")
        pools.append(Pool(device, count * (nodes or 1), count if nodes else min(count, GPUS_PER_NODE)))
    return tuple(pools)
