"""One of two processes that sample from a vLLM server; the test starts them with torchrun."""

import sys

import torch
from torch import distributed as dist

from onetrunk.rollouts.vllm import VLLMBackend
from tests.rollouts.small import PROMPTS
from tests.rollouts.test_vllm import PARAMS, PATIENT, assert_sampled_from, policy, shaken


def main(url: str, folder: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, model = dist.get_rank(), policy()
    backend = VLLMBackend(url, folder, policy=PATIENT)
    for version in range(3):
        backend.sync(shaken(model, version), version)
        rollout = backend.generate(PROMPTS, PARAMS, [(version, rank, row) for row in range(len(PROMPTS))])
        assert_sampled_from(model, rollout)
    rows = [None, None]
    dist.all_gather_object(rows, list(rollout.completion_ids))
    assert rows[0] != rows[1]
    print(f"sampled from version {rollout.policy_version}", flush=True)
    # What fails on the first process fails on all of them, instead of leaving them waiting.
    backend._files.write = None
    try:
        backend.sync(shaken(model, 9), 9)
    except (TypeError, RuntimeError) as error:
        if rank == 1:
            assert "process 0, which does this for the others, failed" in str(error)
            print("the other process failed as well", flush=True)
    dist.barrier()
    backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
