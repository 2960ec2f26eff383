"""Where a test of several processes runs: on CPUs with gloo, or on as many GPUs with nccl, where there are enough."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.processes import ON_CPUS, ROOT, environment, finished, free_port

CPU, GPU = "cpu", "cuda"
# Of a run that is repeated: the same bits on CPUs; on GPUs some sums have no fixed order.
REPEATED: dict[str, dict[str, float]] = {CPU: {}, GPU: {"atol": 2e-5, "rtol": 1e-4}}
BACKENDS = {CPU: "gloo", GPU: "nccl"}
# Processes that are forked from a server that has imported what tests need: 8 CPU seconds less for each of them.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.checkpoints.crash_runs", "tests.frozen", "tests.device.runs"])


def places(processes: int) -> list[Any]:
    """Return the two places as parameters of a test; that of the GPUs is skipped where there are fewer."""
    return [CPU, on_gpus(GPU, processes=processes)]


def on_gpus(*values: Any, processes: int = 2) -> Any:
    """Return a parameter set of a test that needs a GPU for each process."""
    return pytest.param(*values, marks=pytest.mark.gpu(processes))


def join_group(place: str, folder: str, rank: int, world_size: int) -> torch.device:
    """Make this process one of a group that meets in a file of `folder`; return its device."""
    torch.set_num_threads(1)
    device = torch.device(place, rank) if place == GPU else torch.device(place)
    if place == GPU:
        torch.cuda.set_device(device)
    store = f"file://{folder}/store"
    # With a device the group of NCCL is made at once, not in the first operation.
    bound = {"device_id": device} if place == GPU else {}
    dist.init_process_group(BACKENDS[place], init_method=store, rank=rank, world_size=world_size, **bound)
    return device


def found_by_ranks(work: Callable[..., Any], folder: Path, processes: int, *args: Any) -> list[Any]:
    """Run `work(rank, str(folder), *args)` in so many processes; return what each returned, by way of JSON."""
    torch.multiprocessing.start_processes(_report, (str(folder), work, *args), processes, start_method="forkserver")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def _report(rank: int, folder: str, work: Callable[..., Any], *args: Any) -> None:
    found = work(rank, folder, *args)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def launch(
    place: str, config: str, processes: int, script: str | Path, *words: Any, code: int | None = 0, cwd: Any = None
) -> subprocess.CompletedProcess[str]:
    """Run a script on one process, or on several by accelerate with a shipped config; `code` as in `python`."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "accelerate.commands.launch", "--config_file", f"{ROOT}/accelerate_configs/{config}.yaml"]
        command += ["--num_processes", str(processes), "--main_process_port", "0"]
    return finished([*command, script, *words], code, cwd=cwd, env=launch_environment(place, processes))


@contextlib.contextmanager
def started_pair(folder: Path, words: list[str], **variables: str) -> Iterator[list[subprocess.Popen]]:
    """Start Python on two processes in `folder`, without a launcher that would end the second one with the first.

    What still runs at the end of the block is killed.
    """
    env = {**launch_environment(CPU, 2), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **variables}
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(folder)])
    running = []
    for rank in "01":
        with open(folder / f"log-{rank}.txt", "w") as log:
            own = {**env, "RANK": rank, "LOCAL_RANK": rank}
            running.append(subprocess.Popen([sys.executable, *words], cwd=folder, env=own, stdout=log, stderr=log))
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def finish_pair(folder: Path, words: list[str], **variables: str) -> None:
    """Run Python on two processes to their end, which must be a good one."""
    with started_pair(folder, words, **variables) as running:
        codes = [process.wait() for process in running]
    assert codes == [0, 0], (folder / "log-0.txt").read_text()[-3000:] + (folder / "log-1.txt").read_text()[-3000:]


def launch_environment(place: str, processes: int) -> dict[str, str]:
    """Return the environment of a launch, in which as many GPUs are visible: one process rejects several."""
    variables = environment(**ON_CPUS)
    if place != CPU:
        del variables["ACCELERATE_USE_CPU"]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(processes)))
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:processes])
    return variables
