"""The devices that a plan may use: `hardware.yaml`, a file of the user's, and pools such as 8xH100-80GB+4xL40S."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from onetrunk.plan.rates import Rates
from onetrunk.utils.files import read_yaml

FILE = Path(__file__).with_name("hardware.yaml")
GIB = 2**30
MARKETS = ("on_demand", "spot", "reserved")
# Share of the on-demand price, where a device has no price of its own there; hardware.yaml names the sources.
MARKET_SHARES = {"on_demand": 1.0, "spot": 0.5, "reserved": 0.7}
# Most GPUs of one machine, where --nodes does not say how they are divided.
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU core; units and sources are in hardware.yaml.

    Args:
        kernels: share of the usual efficiency that current kernels reach on it.
        is_cpu: counts memory of the machine, and has no GPU runtime.
        rates: what `plan --calibrate` measured; None: the usual efficiencies of a GPU.
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
        return self.usd_per_hour * MARKET_SHARES[market] if own is None else own


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
    """Return the known devices, with those of a user's file added or changed.

    Raises:
        ValueError: a file or an entry in it cannot be used; the message names both.
    """
    content = _content(FILE)
    devices = {name: _device(name, values, None, FILE) for name, values in content["devices"].items()}
    prices = {key: content[key] for key in ("storage_usd_per_gb_month", "transfer_usd_per_gb")}
    if user_file is not None:
        path = Path(user_file).expanduser()
        if not path.is_file():
            raise ValueError(
                f"the hardware file {path} does not exist (working folder {Path.cwd()}); give a YAML file"
            )
        own = _content(path)
        for name, values in own.get("devices", {}).items():
            devices[name] = _device(name, values, devices.get(name), path)
        prices |= {key: _number(own[key], key, path, least=0.0) for key in prices if key in own}
    return Catalog(devices, **prices)


def _content(path: Path) -> dict[str, Any]:
    content, _ = read_yaml(path)
    known = ("sources", "devices", "storage_usd_per_gb_month", "transfer_usd_per_gb")
    if not isinstance(content, dict) or set(content) - set(known) or not isinstance(content.get("devices", {}), dict):
        raise ValueError(f"{path} must have the keys {', '.join(known)}, of which devices maps names to values")
    return content


def _number(value: Any, what: str, path: Path, least: float | None = None) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (least is None and value == 0):
        raise ValueError(f"{path}: {what} is {value!r}; give a number above 0")
    return float(value)


def _device(name: str, values: Any, known: Device | None, path: Path) -> Device:
    own = [f.name for f in fields(Device) if f.name != "name"]
    if not isinstance(values, dict) or set(values) - set(own):
        wrong = sorted(set(values) - set(own)) if isinstance(values, dict) else [repr(values)]
        near = difflib.get_close_matches(str(wrong[0]), own, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(own)}"
        raise ValueError(f"{path}: device {name} has {', '.join(map(str, wrong))}; {hint}")
    free = ("usd_per_hour", "usd_per_hour_spot", "usd_per_hour_reserved")
    read: dict[str, Any] = {}
    for key, value in values.items():
        if key == "is_cpu":
            read[key] = bool(value)
        elif key == "rates":
            read[key] = Rates.read(value, f"{path}: device {name}")
        else:
            read[key] = _number(value, f"{key} of device {name}", path, 0.0 if key in free else None)
    if known is not None:
        return replace(known, **read)
    needed = [f.name for f in fields(Device)[1:8]]
    missing = [key for key in needed if key not in read]
    if missing:
        raise ValueError(f"{path}: the new device {name} lacks {', '.join(missing)}")
    return Device(name, **read)


def find_device(name: str, catalog: Catalog) -> Device:
    """Return a device by its name, in any spelling that only one has: h100, H100-80GB, RTX 4090.

    Raises:
        ValueError: no device, or several; the message names them.
    """

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower().removeprefix("nvidia"))

    known = {plain(full): full for full in catalog.devices}
    wanted = plain(name)
    # The memory may be left out, and RTX.
    models = {full: plain(full.split("-")[0]) for full in known.values()}
    fits = [full for key, full in known.items() if key == wanted] or [
        full for full, model in models.items() if model in (wanted, f"rtx{wanted}")
    ]
    if len(fits) == 1:
        return catalog.devices[fits[0]]
    if fits:
        raise ValueError(f"{name!r} may be {' or '.join(fits)}; write one of them")
    near = [known[key] for key in difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"unknown GPU {name!r}: {hint}Known: {', '.join(catalog.devices)}; add yours with --hardware_file"
    )


def parse_pools(text: str, nodes: int | None, catalog: Catalog) -> tuple[Pool, ...]:
    """Return the pools in a text such as "8xH100-80GB+4xL40S".

    Args:
        text: counts and names, joined by a plus sign; without a count: one.
        nodes: machines that each have these counts; None: the counts are all there is, eight to a machine.
        catalog: of the devices.

    Raises:
        ValueError: a count or a name that cannot be used, or a device that is named twice.
    """
    pools: list[Pool] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?(\S.*?)\s*", part)
        if match is None or match[1] == "0":
            raise ValueError(f"--hardware {text!r}: {part!r} is not COUNTxNAME; write for example 8xH100-80GB+4xL40S")
        device, count = find_device(match[2], catalog), int(match[1] or 1)
        if device.name in (pool.device.name for pool in pools):
            raise ValueError(f"--hardware {text!r} names {device.name} twice; write one count")
        total = count * (nodes or 1)
        if total > 4096:
            raise ValueError(f"--hardware {text!r}: {total} devices; plans are made for at most 4096")
        pools.append(Pool(device, total, count if nodes else min(count, GPUS_PER_NODE)))
    return tuple(pools)
