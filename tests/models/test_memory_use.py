"""Activations in host memory: the same gradients, and the weights stay where they are."""

import contextlib

import pytest
import torch

from onetrunk.models.speedups.memory_use import offloaded_activations
from tests.models.branches import ALL_ROLES, a_pack, a_trunk, gradients, loss_of, step_gradients


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
