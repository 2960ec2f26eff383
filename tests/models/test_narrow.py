"""Feed-forward blocks at the positions that matter: the same outputs and gradients, fewer tokens."""

import contextlib

import pytest
import torch
from torch import nn

from onetrunk.models.base_model import decoder_layers
from onetrunk.models.speedups.merged import can_merge
from onetrunk.models.speedups.token_grid import TokenGrid, narrow_blocks
from onetrunk.rollouts import LocalBackend, SamplingParams
from tests.models.branches import ALL_ROLES, COMPLETIONS, PROMPTS, a_pack, a_trunk, step_gradients
from tests.rollouts.small import KEYS, assert_same, tiny
from tests.rollouts.small import PROMPTS as SAMPLED
from tests.tiny import FAMILIES, tiny_model


@contextlib.contextmanager
def block_tokens(trunk):
    """Collect the tokens of every forward of each layer's feed-forward block."""
    layers = decoder_layers(trunk.get_base_model())
    tokens = [[] for _ in layers]
    # Behind the hook that narrows.
    handles = [
        layer.mlp.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0].shape[:-1].numel()))
        for layer, seen in zip(layers, tokens, strict=True)
    ]
    yield tokens
    for handle in handles:
        handle.remove()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layers", ["all", "top-2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_blocks_that_run_everywhere(family, layers):
    trunk = a_trunk(family, value_head="adapter", adapter_layers=layers).train()
    narrow, narrow_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    with block_tokens(trunk) as tokens:
        step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    num_read = sum(len(c) + 1 for c in COMPLETIONS)
    assert set(tokens[-1]) == {num_read}
    assert set(tokens[0]) == {sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS))}
    trunk.narrow.detach()
    everywhere, gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    # Another number of rows may take another kernel of the matrix product: rounding of float32, no more.
    for name in ("logprobs", "entropy", "values", "next_values", "ref_logprobs"):
        torch.testing.assert_close(getattr(narrow, name), getattr(everywhere, name), atol=2e-5, rtol=1e-5)
    assert narrow_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(narrow_gradients[name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mistral"])
def test_prefill_runs_the_prompts_alone_and_samples_the_same(family):
    trunk = a_trunk(family, base=tiny(family))
    params = SamplingParams(max_completion_length=8, stop_token_ids=tuple(range(8, 14)))
    can_merge(trunk)  # Its proof, made once, is a forward too.
    with block_tokens(trunk) as tokens:
        rollout = LocalBackend(trunk).generate(SAMPLED, params, KEYS)
    assert tokens[0][0] == sum(map(len, SAMPLED)) and tokens[-1][0] == len(SAMPLED)
    trunk.narrow.detach()
    assert_same(rollout, LocalBackend(trunk).generate(SAMPLED, params, KEYS))


def test_positions_by_hand():
    positions = TokenGrid.padded(a_pack(rows=slice(1, 3))).positions()
    # Rows of 3 + 2 and 1 + 7 tokens, 8 wide; read from the last prompt token on.
    assert positions.shape == (2, 8)
    assert positions.real.tolist() == [0, 1, 2, 3, 4, *range(8, 16)]
    assert positions.read.tolist() == [2, 3, 4, *range(8, 16)]


class Mixing(nn.Module):
    """A block that looks at its neighbours."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden):
        return self.block(hidden) + hidden.roll(1, dims=1)


def test_a_block_that_mixes_positions_is_found_out_and_runs_everywhere():
    model = tiny_model("llama")
    whole = model(a_pack().input_ids).logits
    assert narrow_blocks(model).handles
    layer = decoder_layers(model)[1]
    layer.mlp = Mixing(layer.mlp)
    assert not narrow_blocks(model).handles
    assert not torch.equal(model(a_pack().input_ids).logits, whole)
