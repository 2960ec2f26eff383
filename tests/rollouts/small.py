"""Prompts, keys and models that the tests of the local backend share."""

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from onetrunk.rollouts import LocalBackend, SamplingParams
from tests.tiny import VOCAB_SIZE, tiny_model

# 1 to 20 tokens: past the sliding windows of 8 already in the prompt, in the completion, and not at all
PROMPTS = [[5, 9, 11], list(range(20, 40)), [7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [60, 61, 62, 63, 12, 13]]
KEYS = [(0, 0, row) for row in range(len(PROMPTS))]
# Of a llama that vLLM serves: heads of 32 are the smallest that it computes on a CPU, and blocks have 128 positions.
SERVED_SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32, "initializer_range": 0.06}
SERVED_SIZES["max_position_embeddings"] = 512
MANY_KEYS = [(1, 0, row) for row in range(3 * len(PROMPTS))]


def tiny(family="llama"):
    """A tiny model that no token stops but those of SamplingParams."""
    if family != "hybrid":
        return tiny_model(family, eos_token_id=None)
    # Every second layer is a convolution over the last 3 tokens, whose state is cached instead of keys and values.
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
    special = {"eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.25}
    torch.manual_seed(0)
    return Lfm2ForCausalLM(Lfm2Config(vocab_size=VOCAB_SIZE, **sizes, **layers, **special)).eval()


def shapes_of(model):
    """Record rows and columns of every forward, and the columns that its mask covers."""
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append((*kwargs["input_ids"].shape, kwargs["attention_mask"].shape[1])),
        with_kwargs=True,
    )
    return shapes


def generate(model, params, prompts=PROMPTS, keys=KEYS, **settings):
    return LocalBackend(model, **settings).generate(prompts, params, keys[: len(prompts)])


def logprobs_of(model, rollout, temperature):
    """Return the logprobs of a rollout's tokens by a forward over each unpadded row, adapters as they are."""
    rows = []
    for prompt, completion in zip(rollout.prompt_ids, rollout.completion_ids, strict=True):
        ids = torch.tensor(prompt + completion, device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
        rows.append((logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].cpu())
    return rows


def assert_same(rollout, other, order=None):
    """Ids are equal; logprobs to 5e-5, what float32 rounding differs by between batch shapes."""
    order = range(len(rollout)) if order is None else order
    for row, other_row in zip(range(len(rollout)), order, strict=True):
        assert rollout.completion_ids[row] == other.completion_ids[other_row]
        assert rollout.stopped[row] == other.stopped[other_row]
        torch.testing.assert_close(
            rollout.sampler_logprobs[row], other.sampler_logprobs[other_row], atol=5e-5, rtol=1e-5
        )


def mixed_params(**settings):
    """Sampling with stop tokens common enough that some rows stop early and others reach the limit."""
    return SamplingParams(max_completion_length=16, stop_token_ids=tuple(range(8, 14)), **settings)
