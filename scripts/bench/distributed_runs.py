"""Launches the processes that `scripts/bench_distributed.py` measures, through the shipped accelerate configs.

Imports neither torch nor a trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.processes import HERE, ROOT

WORKER = HERE / "distributed_worker.py"
QUICK = "--shape tiny --prompt 8 --completion 8 --rollout 4 --microbatch 2 --epochs 2 --small_reward".split()
# Two packs of two rows on each process: enough for the counts, which do not depend on the size.
FACTS = (
    "--shape base --layers 8 --prompt 16 --completion 8 --rollout 4 --microbatch 2 --epochs 2 --small_reward".split()
)
# One pack of 512 tokens per process and epoch: a step of a second, in which 6 MiB of gradients are reduced.
SCALING = "--shape base --layers 8 --rollout 4 --microbatch 4 --epochs 2 --iterations 3 --small_reward".split()
ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONPATH": str(ROOT / "src"),
}
# Of a failed launch: accelerate's own report of it is the last 20.
LOG_LINES = 40
# torchrun gives its processes 30 s before it kills them.
ENDS_WITHIN_S = 60.0
# How a saved base is loaded: dtype of the files, and options of the process that loads it.
LOADS = {
    "in the dtype of its files": ("float32", ("--dtype", "float32")),
    "converted from bfloat16 to float32": ("bfloat16", ("--dtype", "float32")),
    "quantised to 4 bit": ("float32", ("--dtype", "float32", "--nf4")),
}


@dataclass(frozen=True)
class Launch:
    """A launch of the worker.

    Args:
        config: name of an accelerate config; None: a plain process.
        processes: how many.
        what: what the worker measures.
        options: of the worker.
    """

    config: str | None
    processes: int
    what: str
    options: tuple[str, ...]

    def command(self, folder: str) -> list[str]:
        """Return the command after the interpreter."""
        worker = [str(WORKER.relative_to(ROOT)), self.what, folder, *self.options]
        if self.config is None:
            return worker
        config = ["--config_file", f"accelerate_configs/{self.config}.yaml", "--num_processes", str(self.processes)]
        return ["-m", "accelerate.commands.launch", *config, "--main_process_port", "0", *worker]

    def shown(self) -> str:
        """Return the command as a reader can type it at the repository's root."""
        return " ".join(["ACCELERATE_USE_CPU=true python", *self.command("FOLDER")])


@contextlib.contextmanager
def running(launch: Launch, folder: Path) -> Iterator[subprocess.Popen]:
    """Start a launch; at the end of the block none of its processes is left."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, **ENVIRONMENT}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *launch.command(str(folder))], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            # torchrun puts each process into a session of its own, and ends them when it is asked to end itself.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_WITHIN_S)
            process.kill()
            process.wait()


def results_of(process: subprocess.Popen, launch: Launch, folder: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Wait for a launch, and return what each of its processes wrote.

    Raises:
        RuntimeError: it failed, took too long, or ran with another number of processes.
    """
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{launch.shown()} took more than {timeout_s:.0f} s; raise --timeout_s") from error
    if code:
        last = "\n".join((folder / "log").read_text().strip().splitlines()[-LOG_LINES:])
        raise RuntimeError(f"{launch.shown()} failed with code {code}:\n{last}")
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(launch.processes)]
    sizes = {result["world_size"] for result in found}
    if sizes != {launch.processes}:
        raise RuntimeError(f"{launch.shown()} ran as {sorted(sizes)} processes, expected {launch.processes}")
    return found


def run_together(launches: Sequence[Launch], timeout_s: float) -> list[list[dict[str, Any]]]:
    """Run launches at the same time; return what the processes of each wrote."""
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        places = [Path(folder) / str(number) for number in range(len(launches))]
        started = [stack.enter_context(running(*pair)) for pair in zip(launches, places, strict=True)]
        return [results_of(*run, timeout_s) for run in zip(started, launches, places, strict=True)]


def fact_launches(counts: Sequence[int], quick: bool) -> dict[str, Launch]:
    """Return the launches whose memory and collective operations are measured."""
    options = (*(QUICK if quick else FACTS), "--layer_choices", "all", "top-1" if quick else "top-2")
    launches = {}
    for count in counts:
        if count == 1:
            launches["1 process"] = Launch(None, 1, "facts", options)
            continue
        for config in ("ddp", "fsdp2"):
            launches[f"{config}, {count} processes"] = Launch(config, count, "facts", options)
    return launches


def load_and_shard(quick: bool, timeout_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the memory of two processes that load and shard a saved base, for each entry of LOADS."""
    shape = tuple((QUICK if quick else FACTS)[:2])
    if quick:
        shape += ("--layers", "4")
    found: dict[str, Any] = {}
    for name, (dtype, options) in LOADS.items():
        with TemporaryDirectory() as place:
            folder = Path(place)
            save = Launch(None, 1, "save", (*shape, "--saved_dtype", dtype))
            with running(save, folder) as process:
                saved = results_of(process, save, folder, timeout_s)[0]
            launch = Launch("fsdp2", 2, "loading", (*shape, *options))
            say(f"    {launch.shown()}")
            with running(launch, folder) as process:
                ranks = results_of(process, launch, folder, timeout_s)
            found[name] = {"file_mib": saved["result"]["bytes"] / 2**20, "ranks": ranks, "command": launch.shown()}
    return found


def usable_cores() -> list[int]:
    """Return the first two cores that this process may use.

    Raises:
        RuntimeError: there are fewer, or processes cannot be pinned here.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise RuntimeError("processes cannot be pinned to cores on this system; leave the part scaling out (--parts)")
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise RuntimeError("scaling needs two cores, and this process may use one; leave the part out (--parts)")
    return cores


def scaling_launches(quick: bool) -> dict[str, list[Launch]]:
    """Return the launches of a round, in order; those of one entry run at the same time.

    "two alone" are two runs that do not communicate: what the cores lose to each other without any code of ours.
    """
    first, second = usable_cores()
    options = ((*QUICK, "--iterations", "2") if quick else tuple(SCALING)) + ("--adapter_layers", "all")

    def launch(config: str | None, processes: int, *cores: int) -> Launch:
        pinned = ("--cores", ",".join(map(str, cores)))
        return Launch(config, processes, "seconds", (*options, *pinned))

    return {
        "one": [launch(None, 1, first)],
        "two alone": [launch(None, 1, first), launch(None, 1, second)],
        "ddp": [launch("ddp", 2, first, second)],
        "fsdp2": [launch("fsdp2", 2, first, second)],
    }
