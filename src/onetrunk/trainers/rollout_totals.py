"""What the optimizer steps of one rollout measured, all processes together, however often the run logs.

Knows names and numbers; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from onetrunk.ops.losses import explained_variance_from_stats
from onetrunk.ops.masking import widest_dtype

# Figures of sampling, and stats of the steps, that are kept; of the value's all but maxima.
SAMPLED = (
    "kl/ref",
    "sampling/logprob_gap_mean",
    "completion/length",
    "completion/stopped_fraction",
    "completion/repeated_ngrams",
)
TRAINED = ("policy/entropy", "policy/clip_fraction")


class RolloutTotals:
    """Sums over the steps of the rollout in use, and the figures of its completions."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._figures: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._num_steps = self._num_measured = self._num_skipped = 0

    def add_figures(self, figures: dict[str, float]) -> None:
        """Take the figures of a rollout, equal on every process."""
        self._figures |= {name: figures[name] for name in SAMPLED if name in figures}

    def end_step(self, stats: Iterable[tuple[str, Tensor]], is_measured: bool, is_skipped: bool) -> None:
        """Take an optimizer step.

        Args:
            stats: of its packs, as MetricLog has them.
            is_measured: False leaves the stats out.
            is_skipped: the weights stayed as they were.
        """
        self._num_steps += 1
        self._num_skipped += is_skipped
        self._num_measured += is_measured
        for name, value in stats if is_measured else ():
            if name in TRAINED or (name.startswith("value/") and not name.endswith("_max")):
                self._sums[name] = self._sums[name] + value if name in self._sums else value

    def finish(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the figures of the rollout by their public names, and start anew. Every process calls it.

        Steps average; `policy/skipped_fraction` is the share of steps that left the weights alone.
        """
        figures = dict(self._figures)
        if self._sums:
            own = torch.stack([self._sums[name] for name in sorted(self._sums)])
            means = accelerator.reduce(own, reduction="sum").cpu() / max(1, self._num_measured)
            stats = dict(zip(sorted(self._sums), means, strict=True))
            figures |= {name: stats[name].item() for name in TRAINED if name in stats}
            of_value = {n.removeprefix("value/"): v for n, v in stats.items() if n.startswith("value/")}
            if of_value:
                figures["value/explained_variance"] = explained_variance_from_stats(of_value).item()
        if self._num_steps:
            figures["policy/skipped_fraction"] = self._num_skipped / self._num_steps
        self._clear()
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Return what has been taken since the rollout began, in terms of JSON."""
        return {
            "figures": self._figures,
            "sums": {name: value.item() for name, value in self._sums.items()},
            "counts": [self._num_steps, self._num_measured, self._num_skipped],
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` returned."""
        self._figures = dict(state["figures"])
        wide = widest_dtype(device)
        self._sums = {n: torch.tensor(value, device=device, dtype=wide) for n, value in state["sums"].items()}
        self._num_steps, self._num_measured, self._num_skipped = state["counts"]
