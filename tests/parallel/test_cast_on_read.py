"""Weights that are cast when they are read: the numbers of a copy, without the memory of one."""

import copy

import pytest
import torch

from onetrunk.models.base_model import load_base
from onetrunk.models.build import build_trunk
from onetrunk.models.loading import base_fingerprint, base_marks
from onetrunk.parallel.sharding import LateCast, cast_now, cast_when_sharded, casting_later
from tests.parallel import cast_on_read_worker
from tests.places import found_by_ranks
from tests.tiny import tiny_model

IDS = torch.arange(3, 20)[None]


def saved(folder, family="llama", dtype=torch.bfloat16, **settings):
    tiny_model(family, **settings).to(dtype).save_pretrained(folder)
    return str(folder)


def both(load):
    """Return what `load` returns with a copy of the weights, and with late casts."""
    torch.manual_seed(0)
    whole = load()
    torch.manual_seed(0)
    with casting_later():
        return whole, load()


def late(model):
    return {name for name, p in model.named_parameters() if isinstance(p, LateCast)}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_late_cast_base_is_the_base_in_every_number_that_is_read(family, tmp_path):
    name = saved(tmp_path, family)
    whole, found = both(lambda: load_base(name, dtype="float32"))
    assert late(found) == {n for n, p in found.named_parameters() if p.ndim > 1}
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert torch.equal(found(input_ids=IDS).logits, whole(input_ids=IDS).logits)
    assert base_fingerprint(found) == base_fingerprint(whole) and base_marks(found) == base_marks(whole)
    expected, trunk = both(lambda: build_trunk(name, model_init_kwargs={"dtype": "float32"}))
    cast_now(trunk)
    assert not late(trunk)
    for (key, one), (other_key, other) in zip(expected.named_parameters(), trunk.named_parameters(), strict=True):
        assert key == other_key and torch.equal(one, other) and one.requires_grad == other.requires_grad
    ends = [m.get_base_model() for m in (expected, trunk)]
    tied = [m.get_output_embeddings().weight is m.get_input_embeddings().weight for m in ends]
    assert tied[0] == tied[1] == (family != "llama")


def test_a_late_cast_can_be_written_to_and_copied_without_a_change_of_the_file():
    stored = torch.arange(6.0).reshape(2, 3).bfloat16()
    parameter = torch.nn.Parameter(LateCast(stored, torch.float32))
    copied = copy.deepcopy(parameter)
    assert type(copied) is torch.nn.Parameter and torch.equal(copied, stored.float()) and copied.requires_grad
    with torch.no_grad():
        parameter.mul_(1.5)
        copied.zero_()
    assert torch.equal(parameter + 0, stored.float() * 1.5)
    assert torch.equal(torch.cat([parameter, parameter]), stored.float().repeat(2, 1) * 1.5)
    assert torch.equal(stored, torch.arange(6.0).reshape(2, 3).bfloat16())


def test_the_block_is_for_launches_that_shard_a_base(launch_env, tmp_path):
    name, world = saved(tmp_path), {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}
    found = []
    for env, quantization in ((world, None), ({**world, "WORLD_SIZE": "1"}, None), ({}, None), (world, object())):
        launch_env(**env)
        with cast_when_sharded(quantization):
            found.append(bool(late(load_base(name, dtype="float32"))))
    assert found == [True, False, False, False]


@pytest.mark.slow
@pytest.mark.multi_process
def test_no_process_holds_the_whole_base_in_another_precision_than_its_file(tmp_path):
    name = saved(tmp_path / "base", "mistral", **cast_on_read_worker.SHAPE)
    for found in found_by_ranks(cast_on_read_worker.work, tmp_path, 2, name):
        # Private bytes above those before, in shares of the base in float32: half of it stays. In between come one
        # layer or the embedding, whole (1/12 each), and what the allocator has not returned.
        assert 0.45 < found["late"]["end"] < 0.6
        assert found["late"]["peak"] < 0.75
        # The usual way: a copy of the base, and then the half.
        assert found["at once"]["peak"] > 0.95
        assert found["late"]["weights"] == found["at once"]["weights"]
