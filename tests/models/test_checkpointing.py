"""Activation checkpointing with several adapters in one graph: the recompute runs under the adapter of its forward."""

import contextlib

import pytest
import torch

from onetrunk.models.base_model import decoder_layers
from tests.models import branches
from tests.models.branches import ALL_ROLES, FEW, a_pack, a_trunk, counted, loss_of, same, step_gradients
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
