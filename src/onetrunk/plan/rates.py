"""How fast a device works: shares of its peak, and times that no peak explains. The one table behind all seconds.

The default values of training were fitted to the step times of six programs (`scripts/plan/measurements.py`;
README.md has the errors). `plan --calibrate` measures the values of this machine and writes them into a hardware file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Efficiencies and overheads of a device.

    A GPU computes while its host launches the next kernels, so a forward takes as long as the slower of the two: the
    FLOPs over a share of the peak, or a constant time per layer. On a CPU both add up.

    Args:
        matmul: share of the peak that large products reach.
        attention: share that the products of attention reach.
        hidden_half, tokens_half: width and tokens of a forward at which half of `matmul` is reached; 0: always all.
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
        working_set: bytes of activations that the measured software holds, over those of the formula.
    """

    matmul: float = 0.478
    attention: float = 0.478
    hidden_half: float = 0.0
    tokens_half: float = 0.0
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
    working_set: float = 1.0

    @property
    def is_calibrated(self) -> bool:
        """Whether the values were measured on the machine."""
        return self != Rates()

    @classmethod
    def read(cls, values: Any, place: str) -> Rates:
        """Return the rates in a mapping of a hardware file; raises ValueError for what cannot be one."""
        known = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or set(values) - set(known):
            raise ValueError(f"{place}: rates must map names of {', '.join(known)} to numbers")
        for name, value in values.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if (
                not is_number
                or value < 0
                or (value == 0 and name in ("matmul", "decode_matmul", "attention", "bandwidth", "link"))
            ):
                raise ValueError(f"{place}: {name} of rates is {value!r}; give a number above 0")
        return cls(**{name: float(value) for name, value in values.items()})

    def as_values(self) -> dict[str, float]:
        """Return the mapping that `read` takes."""
        return asdict(self)

    def matmul_share(self, hidden: int, tokens: float) -> float:
        """Return the share of the peak that the products of a forward of `tokens` tokens reach."""
        return self.matmul * self._saturation(hidden, tokens)

    def decode_share(self, hidden: int, rows: float) -> float:
        """Return the share of the peak that the products of one decoded token of `rows` rows reach."""
        return self.decode_matmul * self._saturation(hidden, rows)

    def _saturation(self, hidden: int, tokens: float) -> float:
        return hidden / (hidden + self.hidden_half) * tokens / (tokens + self.tokens_half)


def non_negative_fit(rows: Sequence[Sequence[float]], targets: Sequence[float], floor: float) -> list[float]:
    """Return coefficients of at least 0 that make the least sum of absolute errors, by reweighted least squares.

    The sum of absolute errors lets a few points of another kind be wrong, where least squares would bend the rest.

    Args:
        rows: the features of each point.
        targets: of each point.
        floor: errors below it count as equal.
    """
    import numpy as np  # Here: a plan that does not fit anything needs no numpy.

    features, target = np.array(rows, dtype=float), np.array(targets, dtype=float)
    # Columns of equal size, or a small number of a large unit would be taken for none.
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    features = features / scale
    weights, solution = np.ones(len(target)), np.zeros(features.shape[1])
    for _ in range(200):
        root = np.sqrt(weights)[:, None]
        kept = list(range(features.shape[1]))
        while True:
            values = np.linalg.lstsq(features[:, kept] * root, target * root[:, 0], rcond=None)[0]
            if not kept or values.min() >= -1e-12:
                break
            kept.pop(int(values.argmin()))
        solution = np.zeros(features.shape[1])
        solution[kept] = np.maximum(values, 0)
        weights = 1 / np.maximum(np.abs(features @ solution - target), floor)
    return [float(value) for value in solution / scale]
