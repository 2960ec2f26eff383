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
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from onetrunk.models.trunk import PackOutput
from onetrunk.ops.advantages import kl_estimate
from onetrunk.ops.losses import explained_variance_from_stats
from onetrunk.ops.masking import Moments, masked_moments, masked_sum, merge_moments, widest_dtype
from onetrunk.ops.packing import pad_rows
from onetrunk.ppo.sampling import ScoredRollout
from onetrunk.types import Pack

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


def rollout_figures(
    scored: ScoredRollout,
    packs: Sequence[Pack],
    pack_rows: Sequence[Sequence[int]],
    outputs: Sequence[PackOutput],
    accelerator: Accelerator,
    counted: Tensor | None = None,
) -> dict[str, float]:
    """Return the metrics of a rollout by their public names, equal on every process.

    `score/*` are means over the completions that have a score (raw, before penalties); `kl/ref` is the k1 estimate
    summed over a completion's tokens, mean over completions; `completion/repeated_ngrams` is the share of all 4-grams
    that occurred before in the same completion; `num_tokens` counts completion tokens. `sampling/logprob_gap_*`
    compare the sampler's logprobs with the trainer's own forward, per token: mean and largest difference, and the k3
    estimate of KL(sampler || trainer). Only rounding remains if the sampler is the policy that trains.

    Args:
        scored: n rows of this process.
        packs: their packs; none where no KL is wanted.
        pack_rows: the rows that each pack holds.
        outputs: policy and reference of each pack, as far as they are wanted.
        accelerator: gathers over the processes, which have n rows each.
        counted: [n] bool, False for rows that another process counts too; all count where None.
    """
    device = accelerator.device
    total, lengths = scored.scores.total, scored.lengths.float()
    counts = torch.ones_like(lengths) if counted is None else counted.float()
    stopped = torch.tensor(scored.rollout.stopped, dtype=torch.float32)
    has_kl = bool(outputs) and outputs[0].ref_logprobs is not None
    has_policy = bool(outputs) and outputs[0].logprobs is not None
    of_policy = torch.zeros(4, len(lengths), device=device)
    for pack, rows, output in zip(packs, pack_rows, outputs, strict=True) if has_policy else ():
        sampled = pad_rows([scored.rollout.sampler_logprobs[row].double().cpu() for row in rows]).to(device)
        of_policy[:, torch.tensor(rows, device=device)] = _policy_rows(pack, output, sampled)
    ids = pad_rows([torch.tensor(ids) for ids in scored.rollout.completion_ids])
    ngrams = [figure.float() for figure in repeated_ngrams(ids, scored.lengths)]
    columns = [counts, total, lengths, stopped, *of_policy, *ngrams, *scored.scores.by_function.values()]
    rows = accelerator.gather(torch.stack([column.to(device) for column in columns], dim=1))
    columns = rows[rows[:, 0] > 0].unbind(dim=1)
    _, total, lengths, stopped, kl, gap_sums, gap_maxima, gap_k3, repeated, windows, *by_function = columns
    finite = total[total.isfinite()]
    figures = {
        "score/mean": _finite_mean(total),
        "score/std": finite.std().item() if len(finite) > 1 else 0.0,
        "reward/unscored_fraction": 1 - len(finite) / len(total),
        "completion/length": lengths.mean().item(),
        "completion/stopped_fraction": stopped.mean().item(),
        "completion/repeated_ngrams": (repeated.sum() / windows.sum().clamp(min=1)).item(),
        "num_tokens": lengths.sum().item(),
    }
    for name, scores in zip(scored.scores.by_function, by_function, strict=True):
        figures[f"score/{name}"] = _finite_mean(scores)
    if has_kl:
        figures["kl/ref"] = kl.mean().item()
    if has_policy:
        mean_gap, mean_k3 = gap_sums.sum() / lengths.sum(), gap_k3.sum() / lengths.sum()
        gap = {"mean": mean_gap.item(), "max": gap_maxima.max().item(), "k3": mean_k3.item()}
        figures |= {f"sampling/logprob_gap_{name}": value for name, value in gap.items()}
    return figures


def _policy_rows(pack: Pack, output: PackOutput, sampler_logprobs: Tensor) -> Tensor:
    """Return [4, R]: the KL to the reference, then sum and maximum of the logprob gap, and the sum of its k3.

    Args:
        pack: R rows.
        output: the policy's logprobs, and those of the reference or None (a KL of 0).
        sampler_logprobs: [R, C], float64 because k3 is a difference of numbers near 1.
    """
    mask = pack.completion_mask
    kl = torch.zeros(pack.num_rows, device=mask.device)
    if output.ref_logprobs is not None:
        kl = masked_sum(kl_estimate(output.logprobs, output.ref_logprobs, "k1"), mask, dim=1)
    gaps = (output.logprobs - sampler_logprobs).abs() * mask
    k3 = masked_sum(kl_estimate(sampler_logprobs, output.logprobs.double(), "k3"), mask, dim=1)
    return torch.stack([kl.float(), gaps.sum(dim=1).float(), gaps.amax(dim=1).float(), k3.float()])


def _finite_mean(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.mean().item() if len(finite) else float("nan")


def global_moments(parts: Sequence[tuple[Tensor, Tensor]], accelerator: Accelerator) -> Moments:
    """Return (count, mean, m2) of the counted entries of all parts (x, mask) over all processes."""
    own = torch.stack(merge_moments([masked_moments(x, mask) for x, mask in parts])).to(accelerator.device)
    return merge_moments([tuple(row) for row in accelerator.gather(own[None])])


def repeated_ngrams(ids: Tensor, lengths: Tensor, n: int = 4) -> tuple[Tensor, Tensor]:
    """Return how many n-grams of each row occurred before in that row, and how many n-grams it has.

    Windows are numbered by pairs, so that equal numbers mean equal tokens: no hash, no collision.

    Args:
        ids: [R, C] int64, padded on the right with anything.
        lengths: [R] tokens of each row.
        n: tokens of a window, 1 or more.

    Returns:
        Two int64 tensors [R]; a row of fewer than n tokens has 0 of both.

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; a window has 1 token or more")
    num_rows, width = ids.shape
    totals = (lengths - n + 1).clamp(min=0)
    if width < n or not num_rows:
        return torch.zeros_like(totals), totals
    numbers = _numbered(ids)
    tokens = numbers
    for shift in range(1, n):
        numbers = _numbered(numbers[:, :-1] * (tokens.max() + 1) + tokens[:, shift:])
    rows = torch.arange(num_rows, device=ids.device)[:, None].expand_as(numbers)
    is_window = torch.arange(numbers.shape[1], device=ids.device) < totals[:, None]
    num_windows = numbers.max() + 1
    distinct = torch.unique(rows[is_window] * num_windows + numbers[is_window]) // num_windows
    return totals - torch.bincount(distinct, minlength=num_rows), totals


def _numbered(codes: Tensor) -> Tensor:
    """Return codes of the same shape from 0 on without gaps, equal where `codes` are: products of two fit int64."""
    return torch.unique(codes, return_inverse=True)[1]
