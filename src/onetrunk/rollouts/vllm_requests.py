"""What vLLM is asked for, and what its answer must be, for a server and for the engine in this process.

A completion counts only if it names the model that was asked, repeats the prompt, and has one logprob for each token
up to a stop token or the length limit. Anything else is an error, never a sample. That vLLM has the trainer's base
model is checked by the logprobs of a few sampled tokens: the same weights have many names, and other weights the same.

Adapters reach it as files. Every version has a new name and a new folder: vLLM keys its prefix cache by name and keeps
the weights of a name, so a name or a folder that is used again would sample from old weights without any error. Names
carry a nonce of the run, because a resumed run repeats the numbers of versions. A folder is deleted only after the
server has let go of it: the engine dies if it reads a loaded adapter again and its files are gone.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from torch import Tensor, nn

from onetrunk.models.adapters import ADAPTER_FILE, POLICY, REFERENCE, adapter_parameters, find_tuner_layers, is_active
from onetrunk.models.adapters import role as in_role
from onetrunk.ops.packing import make_pack
from onetrunk.parallel.groups import staged
from onetrunk.parallel.sharding import gathered
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.decoding import Completion, require_rows
from onetrunk.servers.errors import CallError
from onetrunk.types import RowKey, to_device
from onetrunk.utils.files import load_tensors, save_tensors
from onetrunk.utils.options import VLLM_RANKS
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
        raise CallError("an answer of another form than a completion") from None
    if reported != model:
        raise CallError(f"an answer of the model {reported!r} where {model!r} was asked")
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
        raise CallError(f"a completion of {len(token_ids)} tokens that goes on after its end")
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


# Where the adapters of a run are published. Trainer pushes no path that begins with an underscore to the Hub.
ADAPTERS_FOLDER = "_adapters"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROLES = ("policy", "reference")
# Modules that vLLM keeps without LoRA.
HEADS = {"lm_head", "embed_tokens", "embed_out", "wte", "score"}


@dataclass(frozen=True)
class Published:
    """An adapter on disk, as the servers know it.

    Args:
        folder: absolute; holds adapter_config.json and adapter_model.safetensors.
        role: "policy" or "reference".
    """

    name: str
    folder: str
    role: str
    version: int


def active_adapter(model: nn.Module) -> str | None:
    """Return the adapter that samples, None if the bare base does; ValueError if layers disagree."""
    layers = getattr(model, "tuner_layers", None) or find_tuner_layers(model)
    if not layers or all(is_active(layer, None) for layer in layers):
        return None
    names = {name for layer in layers for name in layer.active_adapters}
    if len(names) != 1 or any(layer.disable_adapters for layer in layers):
        raise ValueError(f"adapters {sorted(names)} are active together; a server samples from one of them")
    return names.pop()


def published_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which adapters are published: the base's dtype, or float32 if it is quantised."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    return base.dtype if base.dtype in DTYPES else torch.float32


def served_rank(rank: int) -> int:
    """Return the smallest rank that vLLM reserves memory for and that an adapter of `rank` fits in; ValueError."""
    if rank > VLLM_RANKS[-1]:
        raise ValueError(f"the adapter has rank {rank}, and vLLM serves ranks up to {VLLM_RANKS[-1]}; lower lora_r")
    return next(served for served in VLLM_RANKS if served >= rank)


def adapter_tensors(model: PeftModel, adapter: str) -> dict[str, Tensor]:
    """Return the weights of an adapter under PEFT's names, on the CPU, in `published_dtype`."""
    dtype = published_dtype(model)
    own = {name: parameter.detach() for name, parameter in adapter_parameters(model, adapter).items()}
    tensors = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter, save_embedding_layers=False)
    return {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}


class AdapterFolder:
    """A folder of this process below `root`, in which each published adapter has a folder of its own.

    Args:
        root: folder of the run, which no other process uses at the same time; the servers can read it too.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = Path(root).resolve()
        self.nonce = secrets.token_hex(6)
        self.path = self.root / self.nonce
        self._num_written = 0

    def write(self, model: PeftModel, adapter: str, role: str, version: int) -> Published:
        """Write an adapter into a new folder, which gets its name only when it is whole."""
        self._num_written += 1
        final = self.path / f"{self._num_written}-{role}-v{version}"
        partial = final.with_name(f".{final.name}.partial")
        partial.mkdir(parents=True)
        save_tensors(partial / ADAPTER_FILE, adapter_tensors(model, adapter))
        config = copy.deepcopy(model.peft_config[adapter])
        config.inference_mode = True
        config.save_pretrained(str(partial))
        partial.rename(final)
        return Published(f"onetrunk-{self.nonce}-{final.name}", str(final), role, version)

    def is_leftover(self, folder: str) -> bool:
        """Return whether a killed process of this run has published an adapter in a folder."""
        owner = Path(folder).parent
        return owner.parent == self.root and owner != self.path

    def delete_leftovers(self) -> None:
        """Delete what killed processes of this run have written; no server may have it any more."""
        for path in self.root.glob("[0-9a-f]" * 12):
            if path != self.path:
                shutil.rmtree(path, ignore_errors=True)

    def delete(self) -> None:
        """Delete all that this process has written; no server may have it any more."""
        shutil.rmtree(self.path, ignore_errors=True)


def is_same_adapter(published: Published, model: PeftModel, adapter: str) -> bool:
    """Return whether the published weights equal the model's, bit for bit."""
    tensors = adapter_tensors(model, adapter)
    written = load_tensors(Path(published.folder) / ADAPTER_FILE)
    return tensors.keys() == written.keys() and all(torch.equal(tensors[name], written[name]) for name in tensors)


def role_of(adapter: str | None) -> str:
    """Return the role that an active adapter plays."""
    return "reference" if adapter in (None, REFERENCE) else "policy"


def reference_adapter(model: nn.Module) -> str | None:
    """Return the adapter of the reference; None if it is the bare base."""
    # A trunk says which of the two it is: it may keep a copy of its initial adapter that nobody asks for.
    has_adapter = getattr(model, "has_reference_adapter", REFERENCE in getattr(model, "peft_config", {}))
    return REFERENCE if has_adapter else None


def servable_adapters(model: nn.Module, roles: Sequence[str] = ROLES) -> dict[str, str]:
    """Return the adapter of each role; a role that the bare base plays has none."""
    policy = active_adapter(model)
    if role_of(policy) != "policy":  # An evaluation of the reference: the policy is PEFT's "default".
        policy = POLICY if POLICY in getattr(model, "peft_config", {}) else None
    by_role = {"policy": policy, "reference": reference_adapter(model)}
    adapters = {role: by_role[role] for role in roles if by_role[role] is not None}
    for adapter in adapters.values():
        check_servable(model.peft_config[adapter], f"the adapter {adapter!r}")
    return adapters


def check_servable(config: LoraConfig, what: str = "the adapter") -> None:
    """Raise ValueError for a LoRA adapter that vLLM does not serve, or would serve as another one."""
    problems = {
        "is DoRA (use_dora), whose magnitudes vLLM does not load": config.use_dora,
        f"has modules_to_save {config.modules_to_save}": config.modules_to_save,
        "adapts parameters (target_parameters), which has not been tried with vLLM": config.target_parameters,
        f"has a bias ({config.bias!r})": config.bias != "none" or config.lora_bias,
    }
    targets = config.target_modules if isinstance(config.target_modules, (list, set, tuple)) else []
    heads = sorted(HEADS & set(targets))
    problems[f"adapts {', '.join(heads)}, where vLLM has no LoRA"] = heads
    patterned = [name for name in ("rank_pattern", "alpha_pattern") if getattr(config, name)]
    problems[f"has {' and '.join(patterned)}, which some versions of vLLM ignore"] = patterned
    for problem, holds in problems.items():
        if holds:
            raise ValueError(
                f"{what} {problem}, so no vLLM server can sample from it; train a plain LoRA adapter, or sample in"
                " this process (leave the rollout backend out)"
            )
