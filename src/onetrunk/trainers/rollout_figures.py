"""The figures of one rollout over all processes: scores, KL, lengths.

Knows scored rollouts and pack outputs; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from onetrunk.models.trunk_model import PackOutput
from onetrunk.ops.advantages import kl_estimate
from onetrunk.ops.masking import masked_sum
from onetrunk.trainers.sampling import ScoredRollout
from onetrunk.types import Pack


def rollout_figures(
    scored: ScoredRollout, packs: Sequence[Pack], outputs: Sequence[PackOutput], accelerator: Accelerator
) -> dict[str, float]:
    """Return the metrics of a rollout by their public names, equal on every process.

    `score/*` are means over the completions that have a score (raw, before penalties); `kl/ref` is the k1 estimate
    summed over a completion's tokens, mean over completions; `num_tokens` counts completion tokens.
    """
    device = accelerator.device
    lengths = scored.lengths.float()
    stopped = torch.tensor(scored.rollout.stopped, dtype=torch.float32)
    by_function = [scored.scores.by_function[name] for name in scored.scores.by_function]
    own = torch.stack([scored.scores.total, lengths, stopped, *by_function], dim=1).to(device)
    rows = accelerator.gather(own)
    total = rows[:, 0]
    figures = {
        "score/mean": _finite_mean(total),
        "score/std": total[total.isfinite()].std().nan_to_num().item() if total.isfinite().sum() > 1 else 0.0,
        "completion/length": rows[:, 1].mean().item(),
        "completion/stopped_fraction": rows[:, 2].mean().item(),
        "num_tokens": rows[:, 1].sum().item(),
    }
    for i, name in enumerate(scored.scores.by_function):
        figures[f"score/{name}"] = _finite_mean(rows[:, 3 + i])
    if outputs and outputs[0].ref_logprobs is not None:
        own_kl = torch.stack([_kl_sum(p, o) for p, o in zip(packs, outputs, strict=True)]).sum().reshape(1)
        figures["kl/ref"] = accelerator.gather(own_kl).sum().item() / len(rows)
    return figures


def _kl_sum(pack: Pack, output: PackOutput) -> Tensor:
    return masked_sum(kl_estimate(output.logprobs, output.ref_logprobs, "k1"), pack.completion_mask)


def _finite_mean(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.mean().item() if len(finite) else float("nan")
