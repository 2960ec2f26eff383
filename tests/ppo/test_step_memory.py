"""What a run takes at its peak depends on the largest pack, not on how often a rollout is trained on."""

import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.ppo.support import make_trainer


class Watch(TorchDispatchMode):
    """Counts the bytes of the tensors that operators return, until the last tensor on a storage is gone."""

    def __init__(self):
        super().__init__()
        self.tensors, self.sizes, self.now, self.peak = Counter(), {}, 0, 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        given = {place(t) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)} - set(self.sizes)
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and place(tensor) not in given:
                self.add(place(tensor), tensor.untyped_storage().nbytes())
                weakref.finalize(tensor, self.drop, place(tensor))
        return result

    def add(self, key, size):
        if key not in self.sizes:
            self.sizes[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
        self.tensors[key] += 1

    def drop(self, key):
        self.tensors[key] -= 1
        if self.tensors[key] == 0 and key in self.sizes:
            self.now -= self.sizes.pop(key)


def place(tensor):
    return tensor.untyped_storage().data_ptr()


def peak_of_a_run(folder, **settings):
    trainer = make_trainer(folder, check_memory=False, num_rollouts=2, **settings)
    with Watch() as watch:
        trainer.train()
    return watch.peak


TOP = {"adapter_layers": "top-1", "trunk_cache": "device"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, TOP])
def test_the_peak_is_flat_in_the_number_of_epochs(tmp_path, settings):
    one = peak_of_a_run(tmp_path / "one", num_ppo_epochs=1, **settings)
    many = peak_of_a_run(tmp_path / "many", num_ppo_epochs=4, **settings)
    assert one > 100_000
    # The second rollout is of another policy: completions of other lengths.
    assert many == pytest.approx(one, rel=0.1)
