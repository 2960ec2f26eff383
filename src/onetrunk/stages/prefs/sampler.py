"""The sampler of a run: loads the policy (or the critic) and identifies it by fingerprints."""

from __future__ import annotations

import hashlib

import torch
from peft import PeftModel
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList

from onetrunk.feedback.ledger import Ledger
from onetrunk.feedback.overlap import StopFlag
from onetrunk.feedback.sampling import TextSampler
from onetrunk.models.base import load_base, repair_padding, stop_token_ids
from onetrunk.models.build import build_trunk
from onetrunk.models.sources import base_fingerprint, is_adapter
from onetrunk.ppo.setup import policy_tokenizer, tokens_of
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.prefs.arguments import PrefsArguments


def load_sampler(
    name: str,
    args: PrefsArguments,
    model_args: ModelArguments,
    ledger: Ledger | None,
    max_length: int,
    stop: StopFlag | None = None,
) -> TextSampler:
    """Load the model or adapter at `name` as a sampler.

    Args:
        ledger: for the completions.
        max_length: longest completion, in tokens.
        stop: checked after every token; sampling ends with its exception.
    """
    from trl import get_quantization_config

    kwargs = model_args.init_kwargs()
    if name != model_args.model_name_or_path:
        kwargs.pop("revision", None)  # It belongs to the policy, and this is a critic.
    tokenizer = policy_tokenizer(name, None, kwargs)
    quantization = get_quantization_config(model_args)
    if is_adapter(name, kwargs.get("revision")):
        model: nn.Module = build_trunk(name, quantization_config=quantization, model_init_kwargs=kwargs)
    else:
        model = load_base(name, quantization_config=quantization, **kwargs)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    repair_padding(tokenizer, base.config)
    stops = {*stop_token_ids(tokenizer, base.generation_config), *tokens_of(args.stop_tokens or [], tokenizer)}
    params = SamplingParams(
        max_completion_length=max_length,
        temperature=args.temperature,
        stop_token_ids=tuple(sorted(stops)),
        pad_token_id=tokenizer.pad_token_id,
    )
    checks = LogitsProcessorList([StopCheck(stop)]) if stop is not None else None
    model = model.to(policy_device(args.use_cpu))
    return TextSampler(
        backend=LocalBackend(model, max_rows=args.max_rollout_rows, logits_processor=checks),
        tokenizer=tokenizer,
        params=params,
        identity=_identity(model),
        seed=args.seed,
        ledger=ledger,
        chat_template_kwargs=args.chat_template_kwargs or {},
    )


def policy_device(use_cpu: bool) -> torch.device:
    """Return the accelerator of this process; the CPU if there is none or `use_cpu` is set."""
    accelerator = None if use_cpu else torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")


class StopCheck(LogitsProcessor):
    """Leaves the logits unchanged, and raises after the next token once the flag is set."""

    def __init__(self, stop: StopFlag):
        self.stop = stop

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.stop.check()
        return scores


@torch.no_grad()
def _identity(model: nn.Module) -> dict[str, str | None]:
    """Return fingerprints of a model's base and of the adapter that samples, if there is one."""
    if not isinstance(model, PeftModel):
        return {"base": base_fingerprint(model), "adapter": None}
    adapter = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if ".lora_" in name and ".default" in name:
            adapter.update(f"{name} {list(parameter.shape)}".encode())
            adapter.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return {"base": base_fingerprint(model.get_base_model()), "adapter": adapter.hexdigest()[:16]}


def positions_left(sampler: TextSampler) -> int | None:
    """Return the longest prompt of this sampler in tokens; None if its model has no limit."""
    limit = getattr(sampler.backend.model.config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else limit - sampler.params.max_completion_length
