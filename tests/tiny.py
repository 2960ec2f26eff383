"""Tiny models and tokenizers for the tests, built from configs with fixed seeds; nothing is downloaded.

A family keeps what makes it different: sliding windows short enough to bite, tied and untied heads, soft-capping and
logit scales that matter, and dropout at the family's own default (GPT-2: .1). Weights are drawn wide (std .25): a
wrong mask, position or scale shows. Ids 0, 1 and 2 are padding, end and beginning. A 4-bit base needs hidden_size=64.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 64
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
ROLE_TOKENS = ("<system>", "<user>", "<assistant>")
WORDS = tuple(
    "a the cat dog bird fish tree house river stone sun moon star rain wind snow red green blue white black big small "
    "old new fast slow warm cold good bad sings runs sleeps eats sees finds likes wants gives makes and or not in on "
    "under over with how please yes no . , ? !".split()
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '> ' + message['content'] + (' <eos> ' if message['role'] == 'assistant' else ' ') }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.25,
}
_GROUPED = {"num_key_value_heads": 2, "intermediate_size": 64}
_QWEN = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, **_GROUPED}
_GEMMA = {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8, **_GROUPED}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, **_GROUPED},
    "qwen2": {"tie_word_embeddings": True, **_QWEN},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 8, **_QWEN},
    "gemma2": {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0, **_GEMMA},
    "gemma3": {
        "model_type": "gemma3_text", "layer_types": ("sliding_attention", "full_attention"),
        "final_logit_softcapping": None, **_GEMMA,
    },
    "mistral": {"sliding_window": 8, "tie_word_embeddings": False, **_GROUPED},
    "phi3": {"sliding_window": 8, "tie_word_embeddings": False, **_GROUPED},
    "gpt2": {},
    "granite": {"logits_scaling": 4.0, "tie_word_embeddings": True, **_GROUPED},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True, **_GROUPED},
}  # fmt: skip
FAMILIES = tuple(_FAMILIES)
"""Every family that `tiny_model` builds, besides `moe` and `hybrid`."""
_MAMBA = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "num_hidden_layers": 3}
_FAMILIES |= {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, **_GROUPED},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, **_MAMBA,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8, **_MAMBA,
    },
}  # fmt: skip


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a 4-layer causal language model, in eval mode, equal for equal arguments; overrides: config fields."""
    settings = {"model_type": family, **_COMMON, **_FAMILIES[family], **overrides}
    if "layer_types" in settings:
        pattern, depth = settings["layer_types"], settings["num_hidden_layers"]
        settings["layer_types"] = [pattern[i % len(pattern)] for i in range(depth)]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


def moe() -> PreTrainedModel:
    """Build a mixture of experts of two layers, whose experts are parameters without modules."""
    return tiny_model("qwen3_moe", num_hidden_layers=2)


def hybrid(family: str) -> PreTrainedModel:
    """Build a model of Mamba and attention layers: nemotron_h or falcon_h1."""
    return tiny_model(family)


def tiny_tokenizer(
    vocab_size: int = VOCAB_SIZE, chat_template: str | None = None, pad: bool = True
) -> PreTrainedTokenizerFast:
    """Build a word tokenizer: special tokens, roles, then WORDS and w0 w1 ... up to `vocab_size`.

    Without `pad` it has no padding token; the id stays in the vocabulary.
    """
    names = (*SPECIAL_TOKENS, *ROLE_TOKENS, *WORDS, *(f"w{i}" for i in range(vocab_size)))[:vocab_size]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        pad_token="<pad>" if pad else None,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
