"""Metrics of a run, gathered on the device as they arise and reduced over the processes once per log.

Each kind adds up in its own way:

- Stats of an optimizer step are sums over this process's tokens divided by the GLOBAL token count of the step
  (ops/losses.py): they add over packs and processes, and average over steps. Names ending in `_max` take the largest.
- Metrics of a rollout are global numbers already: they average over rollouts; names ending in `_max` take the largest.
- What a reward function logs belongs to its process: it averages over calls and processes.

A metric that is NaN in a rollout or a call was not measured there, and has no part in the mean.
"""

from __future__ import annotations

import math
import resource
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onetrunk.ops.advantages import kl_estimate
from onetrunk.ops.losses import effective_share, importance_sums, outside_dis_bounds
from onetrunk.ops.masking import Moments, masked_moments, masked_sum, merge_moments, widest_dtype
from onetrunk.parallel.groups import RowGroups
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.packs import RolloutPack
from onetrunk.ppo.rollout import ScoredRollout
from onetrunk.rewards.reward import turn_sums
from onetrunk.rollouts.episodes.rows import EpisodeCounts
from onetrunk.types import Experience, Rollout

STEP_NAMES = {
    "policy/loss": "policy/loss",
    "policy/clip_fraction": "policy/clip_fraction",
    "policy/masked_below": "policy/masked_below",
    "policy/masked_above": "policy/masked_above",
    "policy/approx_kl": "kl/approx",
    "policy/entropy": "policy/entropy",
    "kl/loss": "kl/loss",
}
PHASES = ("generate", "score", "update")
# Turns that have a metric each.
NUM_TURNS = 8
# The largest staleness that has a metric of its own.
OLDEST = 16


class MetricLog:
    """What was measured since the last log.

    Args:
        of_rollout: gets the same measurements; the alarms flush it at the end of every rollout.
    """

    def __init__(self, accelerator: Accelerator, of_rollout: MetricLog | None = None):
        self.accelerator = accelerator
        self.of_rollout = of_rollout
        self._clear()

    def _clear(self) -> None:
        self._pending: list[tuple[str, Tensor]] = []
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._rollouts: dict[str, list[float]] = defaultdict(list)
        self._local: dict[str, list[float]] = defaultdict(list)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._num_steps = 0
        self._num_skipped = 0
        self._num_tokens = 0.0

    def add_stats(self, room: str, stats: dict[str, Tensor]) -> None:
        """Add the stats of one pack; keys ending in `_max` are maxima, all others sums over the global count."""
        wide = widest_dtype(self.accelerator.device)
        self._pending += [(f"{room}/{key}", value.detach().to(wide)) for key, value in stats.items()]

    def end_step(self, skipped: bool) -> None:
        """Count an optimizer step and add the stats of its packs. Every process calls it.

        A skipped step trained nothing. Its stats still count (the KL that exceeded `target_kl`), unless it measured
        nothing or numbers that are not finite.
        """
        stats = self._pending if not skipped or self._is_finite_everywhere() else None
        self._add_step(stats, skipped)
        if self.of_rollout is not None:
            self.of_rollout._add_step(stats, skipped)
        self._pending = []

    def _add_step(self, stats: list[tuple[str, Tensor]] | None, skipped: bool) -> None:
        self._num_skipped += skipped
        self._num_steps += stats is not None
        for name, value in stats or ():
            if name.endswith("_max"):
                self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)
            else:
                self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _is_finite_everywhere(self) -> bool:
        # The processes must agree, because `flush` reduces over what each of them added.
        is_finite = bool(self._pending) and all(bool(v.isfinite().all()) for _, v in self._pending)
        flag = torch.tensor([is_finite], dtype=torch.float32, device=self.accelerator.device)
        return bool(self.accelerator.gather(flag).min())

    def add_rollout(self, metrics: dict[str, float]) -> None:
        """Add metrics of one rollout, equal on every process."""
        self._num_tokens += metrics.pop("num_tokens", 0.0)
        if self.of_rollout is not None:
            self.of_rollout.add_rollout(metrics)
        for name, value in metrics.items():
            self._rollouts[name].append(value)

    def add_own(self, name: str, value: float) -> None:
        """Add a metric of this process alone; reward functions call it as `log_metric`."""
        self._local[name].append(float(value))

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add the duration of one of PHASES."""
        self._seconds[phase] += seconds

    def flush(self) -> dict[str, float]:
        """Return the metrics since the last flush by their public names, and clear them. Every process calls it."""
        metrics = {name: _reduced(name, values) for name, values in self._rollouts.items()}
        # Processes may have logged under different names, so the names are gathered too.
        own: dict[str, list[float]] = defaultdict(list)
        for local in gather_object([dict(self._local)]):
            for name, values in local.items():
                own[name] += values
        metrics |= {name: _reduced("", values) for name, values in own.items()}
        stats = self._step_numbers()
        metrics |= {public: stats[n] for n, public in STEP_NAMES.items() if n in stats}
        metrics |= {name: stats[name] for name in sorted(self._maxima)}
        if self._num_skipped:
            metrics["policy/skipped_steps"] = float(self._num_skipped)
        metrics |= {f"time/{phase}_s": s for phase, s in self._seconds.items() if s}
        if self._num_tokens:
            metrics["throughput/completion_tokens_per_s"] = self._num_tokens / max(1e-9, sum(self._seconds.values()))
        metrics["memory/peak_gib"] = peak_gib(self.accelerator.device)
        self._clear()
        return metrics

    def _step_numbers(self) -> dict[str, float]:
        """Return the means and the maxima over the steps, of all processes; one copy from the device."""
        names, parts = [*sorted(self._sums), *sorted(self._maxima)], []
        if self._sums:
            sums = torch.stack([self._sums[name] for name in sorted(self._sums)])
            parts.append(RowGroups(self.accelerator).sum(sums) / max(1, self._num_steps))
        if self._maxima:
            maxima = torch.stack([self._maxima[name] for name in sorted(self._maxima)])
            parts.append(self.accelerator.gather(maxima[None]).amax(dim=0))
        return dict(zip(names, torch.cat(parts).tolist(), strict=True)) if parts else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured since the last flush, as JSON values; call it between two steps."""
        return {
            "sums": {name: value.item() for name, value in self._sums.items()},
            "maxima": {name: value.item() for name, value in self._maxima.items()},
            "rollouts": dict(self._rollouts),
            "own": dict(self._local),
            "seconds": dict(self._seconds),
            "counts": [self._num_steps, self._num_skipped, self._num_tokens],
            "of_rollout": None if self.of_rollout is None else self.of_rollout.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._clear()
        device = self.accelerator.device
        self._sums, self._maxima = _tensors(state["sums"], device), _tensors(state["maxima"], device)
        self._rollouts.update(state["rollouts"])
        self._local.update(state["own"])
        self._seconds.update(state["seconds"])
        self._num_steps, self._num_skipped, self._num_tokens = state["counts"]
        if self.of_rollout is not None:
            self.of_rollout.load_state_dict(state["of_rollout"])


def without_steps(state: dict[str, Any]) -> dict[str, Any]:
    """Return a MetricLog's state for other processes than those that saved it.

    Metrics of rollouts are global numbers and stay. Sums over steps, of which each process had a part, begin at 0.
    """
    begun = {"sums": {}, "maxima": {}, "own": {}, "counts": [0, 0, state["counts"][2]]}
    of_rollout = state["of_rollout"]
    return {**state, **begun, "of_rollout": None if of_rollout is None else without_steps(of_rollout)}


def _reduced(name: str, values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, or the largest of a name that ends in `_max`; NaN for none."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return math.nan
    return max(known) if name.endswith("_max") else sum(known) / len(known)


def _tensors(numbers: dict[str, float], device: torch.device) -> dict[str, Tensor]:
    wide = widest_dtype(device)
    return {name: torch.tensor(value, device=device, dtype=wide) for name, value in numbers.items()}


def peak_gib(device: torch.device) -> float:
    """Return the peak memory of this process so far in GiB: on `device` if that is a GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def rollout_metrics(
    scored: ScoredRollout, packs: Sequence[RolloutPack], accelerator: Accelerator, counted: Tensor | None = None
) -> dict[str, float]:
    """Return the metrics of a rollout by their public names, equal on every process; the README explains each.

    `sampling/logprob_gap_k3` estimates KL(sampler || trainer). `num_tokens` are the completion tokens. `kl/ref` is a
    mean of sums over tokens of weight * k1, with the weights of the loss if there are any, so that older rows and
    truncated samples count by the policy's probabilities. They are not divided by their mean: the mean of truncated
    samples is the share of the vocabulary that was left, which belongs to the KL.

    Args:
        packs: their packs with policy and reference outputs, as far as they are wanted.
        counted: [n] bool, False for rows that another process counts too; None: all count.
    """
    device = accelerator.device
    total, lengths = scored.scores.total, scored.lengths.float()
    counts = torch.ones_like(lengths) if counted is None else counted.float()
    stopped = torch.tensor(scored.rollout.stopped, dtype=torch.float32)
    has_kl = bool(packs) and packs[0].output.ref_logprobs is not None
    has_policy = bool(packs) and packs[0].output.logprobs is not None
    policy_columns = torch.zeros(4, len(lengths), device=device)
    for item in packs if has_policy else ():
        sampled, places = item.sampler_logprobs(scored.rollout), torch.tensor(item.rows)
        policy_columns[:, places.to(device, non_blocking=True)] = _policy_columns(item, sampled)
    rows, turns = zip(*scored.rollout.sampled_turns, strict=True)
    ids, sizes = pad_sequence([torch.tensor(ids) for ids in turns], True), torch.tensor([len(ids) for ids in turns])
    # A tool is called by the same words in turn after turn.
    ngrams = [torch.bincount(torch.tensor(rows), count).float() for count in repeated_ngrams(ids, sizes)]
    columns = [counts, total, lengths, stopped, *ngrams, *_turn_columns(scored), *scored.scores.by_function.values()]
    columns = torch.stack(columns).to(device, non_blocking=True)
    # One copy from the device: all that follows is computed on the CPU.
    rows = RowGroups(accelerator).gather(torch.cat([policy_columns, columns]).T.contiguous()).cpu()
    columns = rows[rows[:, 4] > 0].unbind(dim=1)
    kl, gap_sums, gap_maxima, gap_k3, _, total, lengths, stopped, repeated, windows, is_dense, *rest = columns
    by_turn, by_function = rest[:NUM_TURNS], rest[NUM_TURNS:]
    finite = total[total.isfinite()]
    metrics = {
        "score/mean": _finite_mean(total),
        "score/std": finite.std().item() if len(finite) > 1 else 0.0,
        "reward/unscored_fraction": (len(total) - len(finite)) / len(total),
        "completion/length": lengths.mean().item(),
        "completion/stopped_fraction": stopped.mean().item(),
        "completion/repeated_ngrams": (repeated.sum() / windows.sum().clamp(min=1)).item(),
        "num_tokens": lengths.sum().item(),
    }
    for name, scores in zip(scored.scores.by_function, by_function, strict=True):
        metrics[f"score/{name}"] = _finite_mean(scores)
    for turn, rewards in enumerate(by_turn if is_dense.any() else ()):
        if rewards.isfinite().any():
            metrics[f"reward/turn_{turn}"] = _finite_mean(rewards)
    if has_kl:
        metrics["kl/ref"] = kl.mean().item()
    if has_policy:
        metrics["sampling/logprob_gap_mean"] = (gap_sums.sum() / lengths.sum()).item()
        metrics["sampling/logprob_gap_max"] = gap_maxima.max().item()
        metrics["sampling/logprob_gap_k3"] = (gap_k3.sum() / lengths.sum()).item()
    return metrics


def episode_metrics(
    scored: ScoredRollout, accelerator: Accelerator, counted: Tensor | None = None
) -> dict[str, float]:
    """Return what happened in the episodes of a rollout, equal on every process; {} if none were played.

    Numbers are means per episode; `tool_errors` is a share of the calls, `turn_limit` (episodes that ended because
    they had `max_turns` turns), `length_limit` (those that the limit of tokens ended) and `failed` of the episodes,
    `summaries_cut` (at max_turn_length) of the summaries. `summary_tokens` is the mean length of a summary.
    `time/tools_s` is the time in which a process only waited for answers, `time/answer_s` the time from the end of a
    turn to its answer.

    Args:
        counted: [n] bool, False for rows that another process counts too; None: all count.
    """
    played = scored.rollout.episodes
    if played is None:
        return {}
    rows = []
    for episode, stopped in zip(played, scored.stopped.tolist(), strict=True):
        ended = stopped or episode.failure is not None or episode.counts.turns_at_limit or episode.counts.truncated
        rows.append([*astuple(episode.counts), not ended])
    numbers = torch.tensor(rows, dtype=torch.float64)
    numbers = numbers if counted is None else numbers[counted]
    local = torch.cat([numbers.sum(0), torch.ones(1)]).to(accelerator.device, widest_dtype(accelerator.device))
    *totals, at_length, processes = RowGroups(accelerator).sum(local).tolist()
    counts = EpisodeCounts(*totals)
    return {
        "episode/turns": counts.turns / counts.episodes,
        "episode/turns_cut": counts.turns_cut / counts.episodes,
        "episode/turn_limit": counts.turns_at_limit / counts.episodes,
        "episode/length_limit": at_length / counts.episodes,
        "episode/failed": counts.failed_episodes / counts.episodes,
        "episode/tool_calls": counts.tool_calls / counts.episodes,
        "episode/tool_errors": counts.tool_errors / max(1, counts.tool_calls),
        "episode/observation_tokens": counts.observation_tokens / counts.episodes,
        **_compaction_metrics(scored.rollout, counts),
        "time/tools_s": counts.waited_seconds / processes,
        "time/answer_s": counts.tool_seconds / max(1, counts.turns),
    }


def _compaction_metrics(rollout: Rollout, counts: EpisodeCounts) -> dict[str, float]:
    """Return how often contexts were compacted; {} if they cannot be."""
    if rollout.restarts is None:
        return {}
    return {
        "episode/compactions": counts.compactions / counts.episodes,
        "episode/summary_tokens": counts.summary_tokens / max(1, counts.summaries),
        "episode/summaries_cut": counts.summaries_cut / max(1, counts.summaries),
    }


def value_metrics(
    experiences: Sequence[Experience], observed: Sequence[Tensor], plain: Sequence[Tensor], accelerator: Accelerator
) -> dict[str, float]:
    """Return how well the values of a rollout predicted it, before any step on it; over all tokens that train.

    `value/explained_variance` is 1 - Var(observed returns - values) / Var(observed returns): 0 for a constant, below
    0 for values that are worse than one, NaN for returns that do not vary. The returns of the fit do not measure the
    values, because with lam below 1 they contain them. `value/variance_ratio` is the variance of the advantages
    divided by their variance under a critic of zeros with the same lam: 1 for zeros. Below 1 the critic takes noise
    out of the gradient.

    Args:
        observed: [R, C] per experience, the returns with lam 1.
        plain: [R, C] per experience, the advantages under a critic of zeros.
    """
    wide, columns = widest_dtype(accelerator.device), []
    for experience, returns, advantages in zip(experiences, observed, plain, strict=True):
        mask, of_values = experience.loss_mask, experience.value_tokens
        errors = returns.to(wide) - experience.old_values
        columns.append([(returns, of_values), (errors, of_values), (experience.advantages, mask), (advantages, mask)])
    parts = ([(x.to(wide), mask) for x, mask in column] for column in zip(*columns, strict=True))
    returns, errors, advantages, plain = torch.stack([global_moments(part, accelerator)[2] for part in parts]).tolist()
    return {
        "value/explained_variance": 1 - errors / returns if returns else math.nan,
        "value/variance_ratio": advantages / plain if plain else 1.0,
    }


def importance_metrics(packs: Sequence[RolloutPack], accelerator: Accelerator) -> dict[str, float]:
    """Return the effective sample size and the clipped weights as shares of the tokens that train, all processes."""
    local = torch.stack([importance_sums(item.importance, item.loss_mask).sum(1) for item in packs]).sum(0)
    weights, squares, clipped, num_tokens = RowGroups(accelerator).sum(local).unbind()
    shares = effective_share(weights, squares, num_tokens), clipped / num_tokens.clamp(min=1)
    names = "sampling/effective_sample_size", "sampling/clipped_weights"
    return dict(zip(names, torch.stack(shares).tolist(), strict=True))


def dis_metrics(
    packs: Sequence[RolloutPack],
    scored: ScoredRollout,
    ages: Tensor,
    bounds: tuple[float, float],
    accelerator: Accelerator,
) -> dict[str, float]:
    """Return the share of tokens that policy_objective dis masks before the first step, by the staleness of their row.

    Args:
        ages: [n] of the rows, in rollouts; those above OLDEST count as OLDEST.
        bounds: dis_epsilon_low and dis_epsilon_high.
    """
    device = accelerator.device
    totals = torch.zeros(2, OLDEST + 1, dtype=widest_dtype(device), device=device)
    ages = ages.ceil().long().clamp(0, OLDEST)
    for item in packs:
        ratio = (item.output.logprobs - item.sampler_logprobs(scored.rollout)).exp()
        below, above = outside_dis_bounds(ratio, *bounds)
        counts = torch.stack([((below | above) & item.loss_mask).sum(1), item.loss_mask.sum(1)])
        totals.index_add_(1, ages[item.rows].to(device), counts.to(totals.dtype))
    columns = RowGroups(accelerator).sum(totals).T.tolist()
    return {f"sampling/masked_at_staleness_{age}": masked / n for age, (masked, n) in enumerate(columns) if n}


def _policy_columns(item: RolloutPack, sampler_logprobs: Tensor) -> Tensor:
    """Return [4, R]: the KL to the reference (0 without one), sum and maximum of the logprob gap, the sum of its k3.

    `sampler_logprobs` [R, C] are float64, because k3 is a difference of numbers near 1.
    """
    mask, output = item.pack.completion_mask, item.output
    kl = torch.zeros(item.pack.num_rows, device=mask.device)
    if output.ref_logprobs is not None:
        kl = kl_estimate(output.logprobs, output.ref_logprobs, "k1")
        kl = masked_sum(kl if item.importance is None else kl * item.importance.weights, mask, dim=1)
    gaps = (output.logprobs - sampler_logprobs).abs() * mask
    k3 = masked_sum(kl_estimate(sampler_logprobs, output.logprobs.double(), "k3"), mask, dim=1)
    return torch.stack([kl.float(), gaps.sum(dim=1).float(), gaps.amax(dim=1).float(), k3.float()])


def _turn_columns(scored: ScoredRollout) -> list[Tensor]:
    """Return [n] columns: 1 where rewards are dense, and the reward of each turn; NaN without such a turn or score.

    Every process has them, because the rewards of one may be dense and those of another not.
    """
    by_turn = torch.full((NUM_TURNS, len(scored.rollout)), torch.nan)
    for row in scored.scores.total.isfinite().nonzero().flatten().tolist():
        sums = turn_sums(scored.arrivals(row))[:NUM_TURNS]
        by_turn[: len(sums), row] = torch.tensor(sums)
    is_dense = float(scored.scores.by_token is not None)
    return [torch.full((len(scored.rollout),), is_dense), *by_turn]


def _finite_mean(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.mean().item() if len(finite) else float("nan")


def global_moments(parts: Sequence[tuple[Tensor, Tensor]], accelerator: Accelerator) -> Moments:
    """Return (count, mean, m2) of the counted entries of all parts (x, mask) over all processes."""
    local = torch.stack(merge_moments([masked_moments(x, mask) for x, mask in parts])).to(accelerator.device)
    return merge_moments([tuple(row) for row in RowGroups(accelerator).gather(local[None])])


def repeated_ngrams(ids: Tensor, lengths: Tensor, n: int = 4) -> tuple[Tensor, Tensor]:
    """Return how many n-grams of each row occurred before in that row, and how many n-grams it has.

    Windows are numbered by pairs, so equal numbers mean equal tokens: no hash, no collision. Both counts are 0 for a
    row of fewer than n tokens.

    Args:
        ids: [R, C] int64, padded on the right with anything.
        lengths: [R] tokens of each row.
        n: tokens of a window, 1 or more.
    """
    num_rows, width = ids.shape
    totals = (lengths - n + 1).clamp(min=0)
    if width < n or not num_rows:
        return torch.zeros_like(totals), totals
    numbers = tokens = _numbered(ids)
    for shift in range(1, n):
        numbers = _numbered(numbers[:, :-1] * (tokens.max() + 1) + tokens[:, shift:])
    rows = torch.arange(num_rows, device=ids.device)[:, None].expand_as(numbers)
    is_window = torch.arange(numbers.shape[1], device=ids.device) < totals[:, None]
    num_windows = numbers.max() + 1
    distinct = torch.unique(rows[is_window] * num_windows + numbers[is_window]) // num_windows
    return totals - torch.bincount(distinct, minlength=num_rows), totals


def _numbered(codes: Tensor) -> Tensor:
    """Return codes numbered from 0 without gaps, equal where `codes` are; products of two numbers fit int64."""
    return torch.unique(codes, return_inverse=True)[1]


def staleness_metrics(rollout: Rollout, iteration: int, config: PPOConfig, ranks: RowGroups) -> dict[str, float]:
    """Return how many rollouts the policy was trained on since rows were sampled; {} if they have no versions."""
    if rollout.policy_versions is None:
        return {}
    ages = row_ages(rollout, iteration, config)
    ages = ranks.gather(ages.to(ranks.accelerator.device, non_blocking=True)).cpu()
    return {"sampling/staleness": ages.mean().item(), "sampling/staleness_max": ages.max().item()}


def row_ages(rollout: Rollout, iteration: int, config: PPOConfig) -> Tensor:
    """Return [n]: on how many rollouts the policy was trained since each row was sampled; 0 without versions."""
    if rollout.policy_versions is None:
        return torch.zeros(len(rollout))
    return iteration - torch.tensor(rollout.policy_versions) / config.steps_per_rollout
