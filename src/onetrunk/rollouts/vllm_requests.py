"""What vLLM is asked for, and what its answer must be, for a server and for the engine in this process.

A completion counts only if it names the model that was asked, repeats the prompt, and has one logprob for each token
up to a stop token or the length limit. Anything else is an error, never a sample. That vLLM has the trainer's base
model is checked by the logprobs of a few sampled tokens: the same weights have many names, and other weights the same.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onetrunk.models.adapters import role as in_role
from onetrunk.ops.packing import make_pack
from onetrunk.parallel.groups import staged
from onetrunk.parallel.sharding import gathered
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.decoding import Completion, require_rows
from onetrunk.servers.errors import CallError
from onetrunk.types import RowKey, to_device
from onetrunk.utils.randomness import derived_seed

logger = logging.getLogger(__name__)

# Rounding of the server: the logprob of a token that is certain.
ROUNDING = 1e-3
# Prompts of pseudo-random tokens, at a temperature that tells raw logprobs from processed.
PROBE_PROMPTS, PROBE_PROMPT_LENGTH, PROBE_TOKENS = 8, 12, 8
PROBE_TEMPERATURE = 0.5
# Mean difference of a token's logprob at that temperature. bfloat16 against float32 measured .03; two bases differ by
# more than 1. A quantised base is further from the engine's one.
LARGEST_GAP, LARGEST_QUANTISED_GAP = 0.2, 0.8


@dataclass(frozen=True)
class Request:
    """One completion to ask for.

    Args:
        prompt_ids: token ids, not empty.
        seed: decides this row's draws; below 2**63.
        model: name of the adapter that samples; None: the server's base model.
        vocab_size: the token ids that the policy knows are below.
    """

    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    model: str | None = None
    vocab_size: int = sys.maxsize

    def body(self, base: str) -> dict[str, Any]:
        """Return the JSON to send. Every setting is given: a server would fill in what generation_config.json says."""
        return {
            "model": self.model or base,
            "prompt": self.prompt_ids,
            "max_tokens": self.params.max_completion_length,
            "temperature": self.params.temperature,
            "seed": self.seed,
            "stop_token_ids": list(self.params.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "top_p": self.params.top_p,
            "top_k": self.params.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens": 0,
            "n": 1,
            "stream": False,
        }


def requests_of(
    prompt_ids: Sequence[list[int]], params: SamplingParams, keys: Sequence[RowKey], model: str | None, vocab_size: int
) -> list[Request]:
    """Return a request per prompt, as `Request` has it; ValueError as in `require_rows`."""
    require_rows(prompt_ids, params, keys)
    return [
        Request(list(ids), params, derived_seed(*key), model, vocab_size)
        for ids, key in zip(prompt_ids, keys, strict=True)
    ]


def checked_completion(answer: Any, request: Request, model: str) -> Completion:
    """Return the completion in a parsed answer of `/v1/completions`, or in one of that form.

    Raises:
        CallError: of another model or prompt, incomplete, or of an unexpected form.
    """
    try:
        (choice,) = answer["choices"]
        reported, prompt_ids = answer["model"], choice.get("prompt_token_ids")
        token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    except (TypeError, KeyError, ValueError, AttributeError):
        raise CallError("an answer that is not a completion") from None
    if reported != model:
        raise CallError(f"an answer from model {reported!r}, but {model!r} was asked")
    if token_ids is None or prompt_ids is None:
        raise CallError("it returns no token ids; it needs vLLM 0.11 or later", "stop")
    if prompt_ids != request.prompt_ids:
        raise CallError("an answer to another prompt than the one that was sent")
    if not _are(token_ids, int) or not _are(logprobs, float):
        raise CallError("an answer without token ids or without logprobs")
    stops, most = request.params.stop_token_ids, request.params.max_completion_length
    stopped = bool(token_ids) and token_ids[-1] in stops
    unknown = [token for token in token_ids if not 0 <= token < request.vocab_size]
    if unknown:
        knows = f"and the policy knows {request.vocab_size} tokens"
        raise CallError(f"it serves another base model: it sampled the token {unknown[0]}, {knows}", "stop")
    if len(logprobs) != len(token_ids):
        raise CallError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
    if any(token in stops for token in token_ids[:-1]) or len(token_ids) > most:
        raise CallError(f"a completion of {len(token_ids)} tokens that continues after its end")
    if not token_ids or (not stopped and len(token_ids) < most):
        raise CallError(f"a completion that was cut off after {len(token_ids)} of {most} tokens")
    if not all(math.isfinite(logprob) and logprob <= ROUNDING for logprob in logprobs):
        raise CallError("logprobs that are not finite, or above 0")
    return Completion(
        token_ids, torch.tensor([min(logprob, 0.0) for logprob in logprobs], dtype=torch.float32), stopped
    )


def _are(values: Any, kind: type) -> bool:
    kinds = (int,) if kind is int else (int, float)
    return isinstance(values, Sequence) and all(type(value) in kinds for value in values)


def probe_requests(model: nn.Module, positions: int) -> list[Request]:
    """Return what an engine's base is asked: equally long prompts, within this many `positions` (0: no limit)."""
    vocab_size = model.config.get_text_config().vocab_size
    # vLLM ends a completion at its last position without an error.
    positions = positions or 2**31
    length = min(PROBE_PROMPT_LENGTH, positions // 2)
    params = SamplingParams(min(PROBE_TOKENS, positions - length), PROBE_TEMPERATURE)
    prompts = [[derived_seed(row, place) % vocab_size for place in range(length)] for row in range(PROBE_PROMPTS)]
    return [Request(prompt, params, seed, vocab_size=vocab_size) for seed, prompt in enumerate(prompts)]


def require_same_base(
    model: nn.Module, engine: str, root: str, requests: Sequence[Request], completed: Sequence[Completion]
) -> None:
    """Compare an engine's logprobs with the model's own forward, adapters off."""
    ids = torch.tensor([r.prompt_ids + c.token_ids for r, c in zip(requests, completed, strict=True)])
    length = len(requests[0].prompt_ids)
    quantised = getattr(model.config, "quantization_config", None) is not None
    limit = LARGEST_QUANTISED_GAP if quantised else LARGEST_GAP
    theirs = torch.stack([c.logprobs for c in completed])
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
