"""Two processes that sample from one vLLM server."""

from pathlib import Path

import pytest
import torch.distributed as dist

from onetrunk.rollouts.vllm import VLLMBackend
from tests.places import CPU, found_by_ranks, join_group
from tests.ppo.support import base_model
from tests.rollouts.small import PROMPTS
from tests.rollouts.stub_vllm import StubVLLM
from tests.rollouts.test_vllm import PARAMS, PATIENT, assert_sampled_from, policy, shaken
from tests.servers.stub import wait_until


def work(rank, folder, url):
    """Return the rows of the last of three versions, and the error of a publication that fails."""
    join_group(CPU, folder, rank, 2)
    model, backend, error = policy(), VLLMBackend(url, Path(folder) / "adapters", policy=PATIENT), ""
    for version in range(3):
        backend.sync(shaken(model, version), version)
        rollout = backend.generate(PROMPTS, PARAMS, [(version, rank, row) for row in range(len(PROMPTS))])
        assert_sampled_from(model, rollout)
    if rank == 0:  # Only the first process reads the adapter's config.
        model.peft_config["default"].save_pretrained = None
    try:
        backend.sync(shaken(model, 9), 9)
    except (TypeError, RuntimeError) as raised:
        error = str(raised)
    dist.barrier()
    backend.close()
    return {"version": rollout.policy_version, "rows": rollout.completion_ids, "error": error}


@pytest.mark.slow
@pytest.mark.multi_process
def test_with_two_processes_the_first_publishes_and_both_sample(tmp_path):
    with StubVLLM(base_model()) as stub:
        first, second = found_by_ranks(work, tmp_path, 2, stub.url)
        wait_until(lambda: not stub.adapters)
    assert first["version"] == second["version"] == 2 and first["rows"] != second["rows"]
    loads = [name.split("-", 2)[2] for kind, name in stub.events if kind == "load"]
    assert loads == ["1-policy-v0", "2-policy-v1", "3-policy-v2"] and not stub.missing
    # What fails on the first process fails on all of them, instead of leaving them waiting.
    assert "process 0, which does this for the others, failed" in second["error"] and first["error"]
