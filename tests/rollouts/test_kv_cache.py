"""The cache with room gives the same bits as the one of transformers, and copies keys and values rarely."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from onetrunk.rollouts import LocalBackend, kv_cache, local
from onetrunk.rollouts.kv_cache import RoomyLayer, roomy_cache
from tests.rollouts.small import KEYS, MANY_KEYS, PROMPTS, generate, mixed_params, tiny
from tests.tiny import FAMILIES

FEW = 3


def states(tokens, rows=2, seed=0):
    torch.manual_seed(seed)
    return torch.randn(rows, 2, tokens, 4), torch.randn(rows, 2, tokens, 6)


def test_tokens_are_appended_rows_reordered_and_rows_dropped_as_in_a_plain_layer(monkeypatch):
    monkeypatch.setattr(kv_cache, "ROOM", FEW)
    ours, plain = RoomyLayer(), DynamicLayer()
    rows = 4
    for number, tokens in enumerate([5, 1, 1, 1, 1, 1, 7, 1]):
        new = states(tokens, rows, seed=number)
        for found, expected in zip(ours.update(*new), plain.update(*new), strict=True):
            assert torch.equal(found, expected)
        assert ours.get_seq_length() == plain.get_seq_length()
        if number in (1, 4):
            index = torch.tensor([2, 0, 1] if number == 1 else [1, 1, 0])
            rows = len(index)
            for layer in (ours, plain):
                layer.reorder_cache(index)
            assert torch.equal(ours.keys, plain.keys) and torch.equal(ours.values, plain.values)
    # What transformers does to the tensors themselves.
    for layer in (ours, plain):
        layer.batch_select_indices(torch.tensor([1]))
        layer.crop(-2)
    new = states(1, 1, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(ours.update(*new), plain.update(*new), strict=True))
    for layer in (ours, plain):
        layer.reset()
    new = states(2, 3, seed=10)
    assert all(torch.equal(a, b) for a, b in zip(ours.update(*new), plain.update(*new), strict=True))


def test_a_token_is_written_in_place_until_the_room_is_used_up(monkeypatch):
    monkeypatch.setattr(kv_cache, "ROOM", FEW)
    layer, places = RoomyLayer(), []
    layer.update(*states(4))
    for number in range(8):
        layer.update(*states(1, seed=number))
        places.append((layer.keys.data_ptr(), layer.values.data_ptr()))
    # Room for three tokens, then for the one that did not fit and three more.
    changes = [one != other for one, other in zip(places, places[1:], strict=False)]
    assert changes == [False, False, True, False, False, False, True]


@pytest.mark.parametrize("family", [*FAMILIES, "hybrid"])
def test_completions_and_logprobs_have_the_same_bits_as_with_the_cache_of_transformers(family, monkeypatch):
    model, params = tiny(family), mixed_params(temperature=1.3)
    monkeypatch.setattr(kv_cache, "ROOM", FEW)
    # 5 rows, then 2 at once.
    rollouts = [generate(model, params), LocalBackend(model, max_rows=2).generate(PROMPTS, params, KEYS)]
    monkeypatch.setattr(local, "roomy_cache", lambda config: DynamicCache(config=config))
    expected = [generate(model, params), LocalBackend(model, max_rows=2).generate(PROMPTS, params, KEYS)]
    assert len({len(ids) for ids in expected[0].completion_ids}) > 1
    for found, plain in zip(rollouts, expected, strict=True):
        assert found.completion_ids == plain.completion_ids
        assert all(torch.equal(*pair) for pair in zip(found.sampler_logprobs, plain.sampler_logprobs, strict=True))


def test_layers_with_a_window_are_those_of_transformers():
    layers = roomy_cache(tiny("gemma3").config).layers
    assert {type(layer).__name__ for layer in layers} == {"DynamicSlidingWindowLayer", "RoomyLayer"}
    assert {type(layer) for layer in roomy_cache(tiny("llama").config).layers} == {RoomyLayer}


class Concatenations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.dims = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default and result.dim() == 4:
            self.dims.append(args[1] if len(args) > 1 else 0)
        return result


def test_no_token_concatenates_keys_or_values():
    model, params = tiny(), mixed_params()
    with Concatenations() as ours:
        generate(model, params, PROMPTS * 3, MANY_KEYS)
    # Rotary positions join the halves of the last dimension.
    assert ours.dims and set(ours.dims) <= {-1, 3}
