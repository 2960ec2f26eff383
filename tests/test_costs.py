"""Bytes and FLOPs against hand-worked numbers and against the modules that they describe."""

import pytest
from torch import nn

from onetrunk.costs import (
    ModelShape,
    forward_flops,
    head_flops,
    kv_cache_bytes,
    reuse_saving,
    trunk_states_bytes,
)
from onetrunk.models.base import decoder_layers
from tests.tiny import FAMILIES, tiny_model

# 10 x 4 embedding, 2 query heads and 1 key head of size 2, three 4 x 6 matrices.
SHAPE = ModelShape(10, 4, 8, 6, 2, 1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_of_a_layer_are_those_of_its_matrices(family):
    model = tiny_model(family)
    shape = ModelShape.from_config(model.config.get_text_config())
    layer = decoder_layers(model)[0]
    counted = sum(p.numel() for name, p in layer.named_parameters() if p.dim() == 2)
    assert shape.layer_parameters == counted
    assert shape.num_layers == len(decoder_layers(model))
    assert shape.head_parameters == model.get_output_embeddings().weight.numel()
    assert isinstance(model.get_output_embeddings(), nn.Linear)


def test_hand_worked_numbers():
    assert SHAPE.layer_parameters == 4 * 2 * 2 * (2 + 1) + 3 * 4 * 6 == 120
    assert trunk_states_bytes(SHAPE, tokens=5, itemsize=2) == 5 * 4 * 2
    assert kv_cache_bytes(SHAPE, tokens=5, itemsize=2) == 2 * 5 * 8 * 1 * 2 * 2
    assert head_flops(SHAPE, tokens=3) == 2 * 3 * 40
    # Attention over 7 tokens: scores and sums, 2 products of 2 heads x 2 x 7 multiply-adds each.
    assert forward_flops(SHAPE, tokens=3, layers=2, context=7) == 3 * 2 * (2 * 120 + 4 * 7 * 2 * 2)


def test_what_reuse_saves_by_hand():
    # 6 of 8 layers below the cut, 4 epochs, half of the tokens completions: lower 720, upper 240, head 20.
    above = 4 * (1 + 4) * (240 + 20)
    assert reuse_saving(SHAPE, 6, 4, 0.5) == pytest.approx(1 - (above + 2 * 720) / (above + 5 * 2 * 720))
    assert reuse_saving(SHAPE, 0, 4, 0.5) == 0
