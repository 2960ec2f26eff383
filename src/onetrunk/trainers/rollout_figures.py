"""The figures of one rollout over all processes: scores, KL, lengths, and the sampler's distance from the trainer.

Knows scored rollouts and pack outputs; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from onetrunk.models.pack_output import PackOutput
from onetrunk.ops.advantages import kl_estimate
from onetrunk.ops.masking import Moments, masked_moments, masked_sum, merge_moments
from onetrunk.ops.packing import pad_rows
from onetrunk.ops.repetition import repeated_ngrams
from onetrunk.trainers.sampling import ScoredRollout
from onetrunk.types import Pack


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
