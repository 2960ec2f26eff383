"""Activations: recomputed under the adapter of their forward, with several in one graph; or kept in host memory."""

import contextlib

import pytest
import torch

from onetrunk.models.base_model import decoder_layers
from onetrunk.models.speedups.memory_use import offloaded_activations
from tests.models import branches
from tests.models.branches import ALL_ROLES, FEW, a_pack, a_trunk, counted, gradients, loss_of, same, step_gradients
from tests.tiny import tiny_model


@pytest.mark.parametrize("family", FEW)
def test_checkpointing_changes_no_bit_of_outputs_and_gradients(family):
    trunk = a_trunk(family).train()
    plain = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    trunk.activation_checkpointing_enable()
    assert same(plain, step_gradients(trunk, a_pack(), roles=ALL_ROLES))
    assert plain[1] and all("default" in name for name in plain[1])


def test_below_the_cut_nothing_is_recomputed():
    trunk = a_trunk(adapter_layers="top-1").train()
    trunk.activation_checkpointing_enable()
    with counted(decoder_layers(trunk)) as counts:
        step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert counts == [1, 1, 1, 3]  # the policy twice, the reference has no backward


def test_the_backward_leaves_the_role_as_it_was():
    trunk = a_trunk().train()
    trunk.activation_checkpointing_enable()
    expected = step_gradients(trunk, a_pack())
    trunk.zero_grad(set_to_none=True)
    output = trunk(pack=a_pack())
    flags = {name: p.requires_grad for name, p in trunk.named_parameters()}
    with trunk.as_role("reference"):  # sampling between forward and backward, say
        loss_of(output).backward()
        ids = a_pack().input_ids[:1, :5]
        off = trunk(input_ids=ids).logits
    assert same(branches.gradients(trunk), expected[1])
    assert flags == {name: p.requires_grad for name, p in trunk.named_parameters()}
    assert torch.equal(off, tiny_model("llama")(input_ids=ids).logits)


@pytest.mark.parametrize("setting", [{"use_reentrant": True}, {"context_fn": contextlib.nullcontext}])
def test_settings_that_recompute_under_the_wrong_adapter_are_refused(setting):
    with pytest.raises(ValueError, match="under the wrong adapter; leave both out"):
        a_trunk().activation_checkpointing_enable(activation_checkpointing_kwargs=setting)


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", False), ("gemma2", True)])
def test_offloading_does_not_change_the_gradients(family, checkpointing):
    trunk = a_trunk(family).train()
    if checkpointing:
        trunk.activation_checkpointing_enable()
    _, plain = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    trunk.zero_grad(set_to_none=True)
    with offloaded_activations(trunk, least_bytes=0):
        output = trunk(pack=a_pack(), roles=ALL_ROLES)
    loss_of(output).backward()
    # A copy may lie otherwise in memory, and a product then adds in another order.
    found = gradients(trunk)
    assert found.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)


def test_what_is_saved_moves_and_weights_and_small_tensors_do_not():
    layer = torch.nn.Linear(64, 64)
    hidden = torch.randn(8, 64, requires_grad=True)
    activations = offloaded_activations(layer, least_bytes=0)
    with activations:
        output = torch.relu(layer(hidden)).sum()
    # The input of the product and what the ReLU needs; not the weight.
    assert activations.num_moved == 2
    output.backward()
    activations = offloaded_activations(layer, least_bytes=8 * 64 * 4 + 1)
    with activations:
        torch.relu(layer(hidden)).sum().backward()
    assert activations.num_moved == 0


@pytest.mark.gpu
def test_a_gpu_holds_less_while_the_backward_waits():
    layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU())] * 8).cuda()
    hidden = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    held = []
    for offloads in (False, True):
        before = torch.cuda.memory_allocated()
        with offloaded_activations(layers) if offloads else contextlib.nullcontext():
            output = layers(hidden).sum()
        held.append(torch.cuda.memory_allocated() - before)
        output.backward()
    assert held[1] < held[0] / 4
