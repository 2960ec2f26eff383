"""The proof that an engine has the trainer's base model: by the logprobs of a few sampled tokens.

Names and paths prove nothing: the same weights have many, and other weights the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onetrunk.models.adapters import role as in_role
from onetrunk.ops.packing import make_pack
from onetrunk.parallel.groups import staged
from onetrunk.parallel.sharding import gathered
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.vllm_calls import Completed, Request
from onetrunk.types import to_device
from onetrunk.utils.randomness import derived_seed

logger = logging.getLogger(__name__)

# Prompts of pseudo-random tokens, at a temperature that tells raw logprobs from processed.
PROBE_PROMPTS, PROBE_PROMPT_LENGTH, PROBE_TOKENS = 8, 12, 8
PROBE_TEMPERATURE = 0.5
# Mean difference of a token's logprob at that temperature. bfloat16 against float32 measured .03; two bases differ by
# more than 1. A quantised base is further from the engine's one.
LARGEST_GAP, LARGEST_QUANTISED_GAP = 0.2, 0.8


def probe_requests(model: nn.Module, positions: int) -> list[Request]:
    """Return what an engine's base is asked: equally long prompts, within so many `positions` (0: no limit)."""
    vocab_size = model.config.get_text_config().vocab_size
    # vLLM ends a completion at its last position without an error.
    positions = positions or 2**31
    length = min(PROBE_PROMPT_LENGTH, positions // 2)
    params = SamplingParams(min(PROBE_TOKENS, positions - length), PROBE_TEMPERATURE)
    prompts = [[derived_seed(row, place) % vocab_size for place in range(length)] for row in range(PROBE_PROMPTS)]
    return [Request(prompt, params, seed, vocab_size=vocab_size) for seed, prompt in enumerate(prompts)]


def require_same_base(
    model: nn.Module, engine: str, root: str, requests: Sequence[Request], completed: Sequence[Completed]
) -> None:
    """Compare an engine's logprobs with those of the model's own forward, adapters off.

    Args:
        model: the policy, unwrapped. Its forward is collective if the base is sharded, or divided into stages.
        engine: its name in messages.
        root: what it has loaded, for messages.
        requests, completed: what its base was asked (`probe_requests`) and what it sampled.

    Raises:
        RuntimeError: another base model, or logprobs before temperature.
    """
    ids = torch.tensor([r.prompt_ids + c.token_ids for r, c in zip(requests, completed, strict=True)])
    length = len(requests[0].prompt_ids)
    quantised = getattr(model.config, "quantization_config", None) is not None
    limit = LARGEST_QUANTISED_GAP if quantised else LARGEST_GAP
    theirs = torch.tensor([c.logprobs for c in completed])
    processed, raw = (_base_logprobs(model, ids, length, t) for t in (PROBE_TEMPERATURE, 1.0))
    gap, raw_gap = ((ours - theirs).abs().mean().item() for ours in (processed, raw))
    if raw_gap < gap and raw_gap <= limit:
        raise RuntimeError(
            f"{engine} returns logprobs before temperature (they agree with ours to {raw_gap:.3f} per token,"
            f" and after it to {gap:.3f}); start it with --logprobs-mode processed_logprobs"
        )
    if not gap <= limit:
        raise RuntimeError(
            f"{engine} serves another base model: its logprobs of {theirs.numel()} tokens differ from those of"
            f" {model.config.name_or_path or 'the policy'!r} by {gap:.2f} per token, and at most {limit} is"
            f" rounding; it loaded {root}"
        )
    logger.info("%s: logprobs of the base agree to %.2g per token", engine, gap)


def _base_logprobs(model: nn.Module, ids: Tensor, length: int, temperature: float) -> Tensor:
    """Return the float32 logprobs of the tokens after prompts of `length` tokens under the bare base, on the CPU."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    stage = staged(model)
    if stage is not None:
        rows = ids.tolist()
        pack = make_pack([row[:length] for row in rows], [row[length:] for row in rows], pad_id=0)
        logprobs = stage.base_logprobs(to_device(pack, device), temperature).cpu()
        model.train(was_training)
        return logprobs
    with gathered(model), in_role(model, None), torch.no_grad():
        logits = model(input_ids=ids.to(device), use_cache=False).logits[:, length - 1 : -1]
    model.train(was_training)
    logprobs = (logits.float() / temperature).log_softmax(-1).cpu()
    return logprobs.gather(2, ids[:, length:, None])[:, :, 0]
