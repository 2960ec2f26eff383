"""Two processes under DistributedDataParallel give the gradients of one."""

import pytest
import torch

from tests.models.branches import a_pack, gradients, loss_of, same
from tests.parallel import ddp_worker
from tests.places import run_ranks

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(ddp_worker.work, folder, ddp_worker.WORLD_SIZE)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ddp_worker.WORLD_SIZE)]


def one_process(case):
    """Return the mean over the ranks' rows, as DistributedDataParallel reduces, and the part of the first rank."""
    trunk, roles, parts = ddp_worker.build(case), ddp_worker.CASES[case][2], []
    for rows in ddp_worker.ROWS:
        trunk.zero_grad(set_to_none=True)
        loss_of(trunk(pack=a_pack(rows=rows), roles=roles)).backward()
        parts.append(gradients(trunk))
    return {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}, parts[0]


@pytest.mark.parametrize("case", ddp_worker.CASES)
def test_two_processes_give_the_gradients_of_one(ranks, case):
    first, second = (rank["gradients"][case] for rank in ranks)
    expected, alone = one_process(case)
    assert same(first, second)
    # DistributedDataParallel leaves zeros, not None, at what took no part on any rank.
    assert expected.keys() <= first.keys() and not any(first[name].any() for name in first.keys() - expected.keys())
    for name, gradient in expected.items():
        torch.testing.assert_close(first[name], gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max().item())
    assert not same({name: first[name] for name in alone}, alone)


@pytest.mark.parametrize("case", ["shared, value only", "adapter, value only"])
def test_a_value_update_leaves_the_policy_without_gradient(ranks, case):
    found = ranks[0]["gradients"][case]
    trained = {name for name, gradient in found.items() if gradient.any()}
    assert trained == {name for name in found if ".value." in name or "value_head" in name}
    assert any(".value." in name for name in trained) == case.startswith("adapter")
