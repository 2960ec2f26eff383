"""Metrics of a run: gathered on the device as they arise, reduced over processes once per log.

Four kinds, by how they add up. Step stats are sums over this process's tokens divided by the GLOBAL count of the
optimizer step (ops/losses.py): packs and processes add, steps average. Maxima take the largest. Rollout figures are
already global numbers: rollouts average, except that names ending in `_max` take the largest. What a reward function
logs is this process's own: calls and processes average. Knows names and numbers; no model.
"""

from __future__ import annotations

import resource
import sys
from collections import defaultdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from onetrunk.ops.losses import explained_variance_from_stats
from onetrunk.ops.masking import widest_dtype
from onetrunk.trainers.rollout_totals import RolloutTotals

STEP_NAMES = {
    "policy/loss": "policy/loss",
    "policy/clip_fraction": "policy/clip_fraction",
    "policy/approx_kl": "kl/approx",
    "policy/entropy": "policy/entropy",
    "kl/loss": "kl/loss",
    "value/loss": "value/loss",
    "value/clip_fraction": "value/clip_fraction",
}
PHASES = ("generate", "score", "update")


class MetricLog:
    """What has been measured since the last log.

    Args:
        accelerator: reduces over the processes.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.totals = RolloutTotals()
        self._clear()

    def _clear(self) -> None:
        self._pending: list[tuple[str, Tensor]] = []
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._rollouts: dict[str, list[float]] = defaultdict(list)
        self._own: dict[str, list[float]] = defaultdict(list)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._num_steps = 0
        self._num_skipped = 0
        self._num_tokens = 0.0

    def add_stats(self, room: str, stats: dict[str, Tensor]) -> None:
        """Add the stats of one pack; keys ending in `_max` are maxima, all others sums over the global count."""
        wide = widest_dtype(self.accelerator.device)
        self._pending += [(f"{room}/{key}", value.detach().to(wide)) for key, value in stats.items()]

    def drop_step(self) -> None:
        """Forget the stats of the packs of an optimizer step that is made again."""
        self._pending = []

    def end_step(self, skipped: bool) -> None:
        """Count an optimizer step and take in the stats of its packs.

        A skipped step trained nothing; what it measured counts all the same (the KL that exceeded `target_kl`), unless
        it measured nothing or numbers that are not finite. Every process calls it.
        """
        self._num_skipped += skipped
        is_measured = not skipped or self._is_finite_everywhere()
        self._num_steps += is_measured
        self.totals.end_step(self._pending, is_measured, skipped)
        for name, value in self._pending if is_measured else []:
            if name.endswith("_max"):
                self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value
            else:
                self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._pending = []

    def _is_finite_everywhere(self) -> bool:
        # The processes must agree: `flush` reduces what each of them took in.
        own = bool(self._pending) and all(bool(v.isfinite().all()) for _, v in self._pending)
        everyone = self.accelerator.gather(torch.tensor([own], dtype=torch.float32, device=self.accelerator.device))
        return bool(everyone.min())

    def add_rollout(self, figures: dict[str, float]) -> None:
        """Add figures of one rollout, equal on every process."""
        self._num_tokens += figures.pop("num_tokens", 0.0)
        self.totals.add_figures(figures)
        for name, value in figures.items():
            self._rollouts[name].append(value)

    def add_own(self, name: str, value: float) -> None:
        """Add a figure of this process alone; reward functions call it as `log_metric`."""
        self._own[name].append(float(value))

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add the duration of a phase: generate, score or update."""
        self._seconds[phase] += seconds

    def flush(self) -> dict[str, float]:
        """Return the metrics since the last flush by their public names, and start anew. Every process calls it."""
        figures = {
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in self._rollouts.items()
        }
        figures |= self._own_means()
        names = sorted(self._sums)
        sums = self._reduced([self._sums[n] for n in names])
        stats = {n: sums[i] / max(1, self._num_steps) for i, n in enumerate(names)}
        figures |= {public: stats[n].item() for n, public in STEP_NAMES.items() if n in stats}
        value_stats = {n.removeprefix("value/"): v for n, v in stats.items() if n.startswith("value/")}
        if value_stats:
            figures["value/explained_variance"] = explained_variance_from_stats(value_stats).item()
        for name in sorted(self._maxima):
            figures[name] = self.accelerator.gather(self._maxima[name].reshape(1)).max().item()
        if self._num_skipped:
            figures["policy/skipped_steps"] = float(self._num_skipped)
        figures |= {f"time/{phase}_s": s for phase, s in self._seconds.items() if s}
        if self._num_tokens:
            figures["throughput/completion_tokens_per_s"] = self._num_tokens / max(1e-9, sum(self._seconds.values()))
        figures["memory/peak_gib"] = peak_gib()
        self._clear()
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return what has been measured since the last flush, in terms of JSON; call it between two steps."""
        tensors = {"sums": self._sums, "maxima": self._maxima}
        return {
            **{name: {key: value.item() for key, value in own.items()} for name, own in tensors.items()},
            "rollouts": dict(self._rollouts),
            "own": dict(self._own),
            "seconds": dict(self._seconds),
            "counts": [self._num_steps, self._num_skipped, self._num_tokens],
            "totals": self.totals.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._clear()
        device = self.accelerator.device
        for name, own in (("sums", self._sums), ("maxima", self._maxima)):
            wide = widest_dtype(device)
            own.update({key: torch.tensor(value, device=device, dtype=wide) for key, value in state[name].items()})
        self._rollouts.update(state["rollouts"])
        self._own.update(state["own"])
        self._seconds.update(state["seconds"])
        self._num_steps, self._num_skipped, self._num_tokens = state["counts"]
        if "totals" in state:
            self.totals.load_state_dict(state["totals"], device)

    def _own_means(self) -> dict[str, float]:
        # Processes may have logged under different names, so the names travel too.
        everyone: dict[str, list[float]] = defaultdict(list)
        for own in gather_object([dict(self._own)]):
            for name, values in own.items():
                everyone[name] += values
        return {name: sum(values) / len(values) for name, values in everyone.items()}

    def _reduced(self, values: list[Tensor]) -> Tensor:
        if not values:
            return torch.zeros(0)
        return self.accelerator.reduce(torch.stack(values), reduction="sum").cpu()


def peak_gib() -> float:
    """Return the peak memory of this process so far in GiB: of the accelerator where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
