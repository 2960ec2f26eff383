"""Logprobs of the labels of TRL's SFTTrainer over a head that tensor parallelism has divided.

TRL computes them from the whole weight of the head, which it gathers in every forward. Here each process keeps its
rows of the vocabulary, and the processes exchange a few numbers per token (ops/vocab_parallel.py).
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onetrunk.models.base_model import backbone, output_head
from onetrunk.ops.vocab_parallel import logprobs_and_top1, vocab_shard


class FusedOutput(NamedTuple):
    """What the loss and the metrics of SFTTrainer read of a forward; all [B, T - 1], 0 where no token is learnt."""

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    label_mask: Tensor


def keep_head_divided(base: PreTrainedModel) -> None:
    """Let the fused forward of TRL (`model(..., fused_lm_head=True)`) of a divided base leave its head divided.

    A forward without `fused_lm_head` stays
    as it is, and so does a base with a head that is whole.
    """
    if vocab_shard(output_head(base).weight) is None:
        return
    whole = base.forward

    # The signature is read by `generate` and by Trainer.
    @functools.wraps(whole)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        return label_logprobs(self, *args, **kwargs) if fused_lm_head else whole(*args, **kwargs)

    base.forward = MethodType(forward, base)


def label_logprobs(base: PreTrainedModel, *args: Any, labels: Tensor, **kwargs: Any) -> FusedOutput:
    """Return the logprobs of the labels, each predicted from the tokens before it.

    Args:
        base: with a divided head.
        labels: [B, T]; -100 where a token is not learnt.
        *args, **kwargs: of the decoder.
    """
    hidden = backbone(base)(*args, **{**kwargs, "use_cache": False}).last_hidden_state[:, :-1]
    targets = labels[:, 1:].to(hidden.device)
    mask = targets != -100
    head = output_head(base)
    weight, bias = (None if tensor is None else tensor.to_local() for tensor in (head.weight, head.bias))
    with torch.autocast(hidden.device.type, enabled=False):
        found = logprobs_and_top1(
            hidden[mask].to(weight.dtype),
            weight,
            targets[mask],
            vocab_shard(head.weight),
            bias=bias,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
        )
    # Connected to the model also where no label counts, so that every process runs a backward.
    spread = [flat.new_zeros(mask.shape).masked_scatter(mask, flat) for flat in found]
    return FusedOutput(*spread, mask)
