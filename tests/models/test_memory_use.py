"""Peaks of memory by hand, and what is not counted."""

import torch
from torch import nn

from onetrunk.models.speedups.memory_use import peak_bytes

KILO = 1000 * 4  # bytes of 1,000 float32


def test_the_peak_is_what_stands_at_once_and_not_what_was_made_in_all():
    def one_after_the_other():
        for _ in range(5):
            torch.zeros(1000)

    def together():
        return [torch.zeros(1000) for _ in range(5)]

    assert peak_bytes(one_after_the_other) <= 2 * KILO  # the name is bound anew before the old tensor goes
    assert peak_bytes(together) == 5 * KILO
    assert peak_bytes(lambda: None) == 0


def test_views_and_what_was_there_before_cost_nothing():
    given = torch.zeros(1000)

    def views():
        x = torch.ones(1000)
        return x.view(10, 100), x[:5], given.view(10, 100), given.add_(1)

    assert peak_bytes(views) == KILO


def test_a_layer_costs_what_it_returns_and_its_weights_are_not_counted():
    layer = nn.Linear(100, 50, bias=False)
    x = torch.randn(20, 100)
    assert peak_bytes(lambda: layer(x)) == 20 * 50 * 4
