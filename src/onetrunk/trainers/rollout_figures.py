"""The figures of one rollout over all processes: scores, KL, lengths.

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
    that occurred before in the same completion; `num_tokens` counts completion tokens.

    Args:
        scored: n rows of this process.
        packs: their packs; none where no KL is wanted.
        pack_rows: the rows that each pack holds.
        outputs: policy and reference of each pack.
        accelerator: gathers over the processes, which have n rows each.
        counted: [n] bool, False for rows that another process counts too; all count where None.
    """
    device = accelerator.device
    total, lengths = scored.scores.total, scored.lengths.float()
    counts = torch.ones_like(lengths) if counted is None else counted.float()
    stopped = torch.tensor(scored.rollout.stopped, dtype=torch.float32)
    has_kl = bool(outputs) and outputs[0].ref_logprobs is not None
    kl = torch.zeros_like(lengths).to(device)
    for pack, rows, output in zip(packs, pack_rows, outputs, strict=True) if has_kl else ():
        of_tokens = kl_estimate(output.logprobs, output.ref_logprobs, "k1")
        kl[torch.tensor(rows, device=device)] = masked_sum(of_tokens, pack.completion_mask, dim=1).float()
    ids = pad_rows([torch.tensor(ids) for ids in scored.rollout.completion_ids])
    ngrams = [figure.float() for figure in repeated_ngrams(ids, scored.lengths)]
    columns = [counts, total, lengths, stopped, kl, *ngrams, *scored.scores.by_function.values()]
    rows = accelerator.gather(torch.stack([column.to(device) for column in columns], dim=1))
    _, total, lengths, stopped, kl, repeated, windows, *by_function = rows[rows[:, 0] > 0].unbind(dim=1)
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
    return figures


def _finite_mean(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.mean().item() if len(finite) else float("nan")


def global_moments(parts: Sequence[tuple[Tensor, Tensor]], accelerator: Accelerator) -> Moments:
    """Return (count, mean, m2) of the counted entries of all parts (x, mask) over all processes."""
    own = torch.stack(merge_moments([masked_moments(x, mask) for x, mask in parts])).to(accelerator.device)
    return merge_moments([tuple(row) for row in accelerator.gather(own[None])])
