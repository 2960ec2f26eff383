"""A checkpoint resumes on another number of processes, in the middle of a rollout too, and ends where one run ends."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from onetrunk.ppo.stream_state import STATE_FILE, deal_packs, halve, load_buffer, save_buffer
from onetrunk.types import Experience
from tests.models.branches import a_pack
from tests.places import CPU
from tests.ppo.launches import ALONE, Launch, Launches
from tests.ppo.support import assert_same

# Whole runs, with a checkpoint of each step, and the four processes that resume one.
RUNS = Launches("other_processes.py", {1: ALONE, 2: Launch("ddp"), "fsdp2": Launch("fsdp2"), 4: Launch("fsdp2", 4)})


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize(("before", "now"), [(2, 1), ("fsdp2", 4)])
def test_a_checkpoint_resumes_on_another_number_of_processes(before, now):
    # In the middle of a rollout.
    output = RUNS.folder(CPU, now, str(RUNS.folder(CPU, before) / "checkpoint-2"))
    assert [RUNS.facts(CPU, before, "facts")["world_size"], RUNS.facts(CPU, 1, "facts")["world_size"]] == [2, 1]
    resumed = json.loads((output / "facts-0.json").read_text())
    assert resumed["world_size"] == now
    for rank in range(now):
        # The same gradients with their sums in another order.
        weights = load_file(output / f"weights-{rank}.safetensors")
        assert_same(weights, RUNS.weights(CPU, 1, "weights"), atol=2e-5, rtol=1e-4)
    expected = RUNS.facts(CPU, 1, "facts")["history"]
    for number, (found, one) in enumerate(zip(resumed["history"], expected, strict=True)):
        assert found.keys() == one.keys()
        # The first log after the change has the metrics of its steps since then only.
        for key in one if number else ("score/mean", "kl/ref"):
            tolerance = 0.03 if key.endswith("clip_fraction") else 2e-4
            assert found[key] == pytest.approx(one[key], rel=2e-3, abs=tolerance), key


def experience(rows, minibatch):
    pack = replace(a_pack(rows=slice(0, rows)), minibatch=minibatch)
    values = torch.arange(pack.completion_mask.numel()).reshape(pack.completion_mask.shape).float()
    return Experience(pack, pack.completion_mask, values, values, values, values)


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_the_halves_of_an_experience_are_its_rows(rows):
    whole = experience(rows, 0)
    parts = halve(whole)
    assert [part.pack.num_rows for part in parts] == [-(-rows // 2), rows // 2]
    assert torch.equal(torch.cat([part.returns for part in parts]), whole.returns)
    assert torch.equal(torch.cat([part.pack.input_ids for part in parts]), whole.pack.input_ids)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_dealt_packs_have_every_row_once_and_equal_counts(num_processes):
    # Two writers; minibatch 0 has 4 + 4 rows, minibatch 1 has 1 + 3.
    packs = [experience(4, 0), experience(1, 1), experience(4, 0), experience(3, 1)]
    shares = [deal_packs(packs, rank, num_processes) for rank in range(num_processes)]
    for minibatch in (0, 1):
        counts = {sum(e.pack.minibatch == minibatch for e in share) for share in shares}
        assert len(counts) == 1
    rows = sorted(row.tolist() for share in shares for e in share for row in e.advantages)
    assert rows == sorted(row.tolist() for e in packs for row in e.advantages)
    widths = {e.pack.input_ids.shape[1] for share in shares for e in share}
    assert widths <= {e.pack.input_ids.shape[1] for e in packs}


def test_single_rows_that_cannot_be_cut_are_dealt_with_work_that_trains_nothing():
    packs = [experience(1, 0) for _ in range(3)]
    shares = [deal_packs(packs, rank, 2) for rank in range(2)]
    assert [[e.pack.num_rows for e in share] for share in shares] == [[1, 1], [1, 1]]
    assert sum(int(e.loss_mask.sum()) for share in shares for e in share) == sum(int(e.loss_mask.sum()) for e in packs)


def test_a_sharded_base_gets_equal_counts_of_packs_that_were_written_unequal(tmp_path):
    (tmp_path / STATE_FILE).write_text(json.dumps({"settings": {"num_processes": 2}}))
    written = [[experience(4, 0)], [experience(1, 0), experience(1, 0), experience(2, 0)]]
    for rank, packs in enumerate(written):
        save_buffer(tmp_path, packs, rank)
    assert [len(load_buffer(tmp_path, rank, 2)) for rank in range(2)] == [1, 3]
    shares = [load_buffer(tmp_path, rank, 2, needs_equal_counts=True) for rank in range(2)]
    assert [len(share) for share in shares] == [2, 2] and sum(e.pack.num_rows for s in shares for e in s) == 8
