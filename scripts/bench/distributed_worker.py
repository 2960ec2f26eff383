"""One process of a launch that `scripts/bench_distributed.py` measures; it writes FOLDER/rank<number>.json.

    ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 \\
        scripts/bench/distributed_worker.py facts FOLDER --layer_choices all top-4

`facts` are memory and collective operations, `seconds` the phases by the clock and by the processor, `loading` the
memory while a saved base is loaded and sharded; `save` writes that base. `--rollout` counts the rows of one process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onetrunk_ppo
import torch
import transformers
from accelerate import PartialState
from collectives import WEIGHTS, Collectives
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig
from workload import LORA, PHASES, Meter, Workload

from onetrunk import PPOTrainer, __version__
from onetrunk.costs import ModelShape
from onetrunk.models.build import build_trunk
from onetrunk.parallel.layout import Layout
from onetrunk.parallel.sharding import gathered, shard_frozen
from onetrunk.plan.costs import Gathers, gathers

RANK, WORLD_SIZE = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
SMAPS = Path("/proc/self/smaps_rollup")


class HostMemory(threading.Thread):
    """Samples this process's memory: anonymous pages, which it alone holds, and its share of mapped files.

    Attributes:
        peaks: {phase: {"anonymous", "files"}} in MiB, each the largest of its samples.

    Args:
        phase: the first phase.
        interval_s: between two samples.
    """

    def __init__(self, phase: str = "init", interval_s: float = 0.05):
        super().__init__(daemon=True)
        self.phase = phase
        self.interval_s = interval_s
        self.peaks: dict[str, dict[str, float]] = {}
        self._ends = threading.Event()

    @staticmethod
    def now() -> dict[str, float]:
        """Return the memory in MiB."""
        lines = dict(line.split(":", 1) for line in SMAPS.read_text().splitlines()[1:])
        mib = {name: int(lines[name].split()[0]) / 1024 for name in ("Pss_Anon", "Pss_File")}
        return {"anonymous": round(mib["Pss_Anon"], 1), "files": round(mib["Pss_File"], 1)}

    def run(self) -> None:
        while not self._ends.wait(self.interval_s):
            self._note(self.now())

    def _note(self, found: dict[str, float]) -> None:
        peak = self.peaks.setdefault(self.phase, found)
        self.peaks[self.phase] = {name: max(value, peak[name]) for name, value in found.items()}

    def enter(self, phase: str) -> None:
        """End the phase in progress, however short it was, with a sample, and begin another."""
        self._note(self.now())
        self.phase = phase

    def end(self) -> None:
        """Stop sampling."""
        self._ends.set()
        self.join()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name a phase; it has at least a sample at its end."""
        before, self.phase = self.phase, phase
        try:
            yield
            self._note(self.now())
        finally:
            self.phase = before


def at_rest() -> dict[str, float]:
    """Return the memory after everything that is free has gone back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return HostMemory.now()


class TwoClocks(Meter):
    """Keeps the seconds of the clock next to those of the processor.

    Attributes:
        wall: seconds of each phase, for each iteration.
    """

    def __init__(self) -> None:
        super().__init__("cpu")
        self.wall: list[dict[str, float]] = []
        self._wall_start = 0.0

    def enter(self, phase: str) -> None:
        """End the phase in progress and begin another."""
        if phase == self.phase:
            return
        now = time.perf_counter()
        if self.phase in PHASES:
            self.wall[-1][self.phase] = self.wall[-1].get(self.phase, 0.0) + now - self._wall_start
        if phase == "generate":
            self.wall.append({})
        self._wall_start = now
        super().enter(phase)


class Inside:
    """Notes, from within the decode loop, the bytes of the frozen weights that this process then holds whole."""

    def __init__(self) -> None:
        self.whole_bytes = 0

    def attach(self, trainer: PPOTrainer) -> None:
        """Be asked before every token."""
        trainer.sampler.backend.poll = lambda: self._note(trainer)

    def _note(self, trainer: PPOTrainer) -> None:
        if not self.whole_bytes:
            self.whole_bytes = sum(p.nbytes for p in frozen_weights(trainer) if not isinstance(p, DTensor))


def build(given: Any, folder: str, meter: Meter) -> tuple[Workload, PPOTrainer]:
    """Return the workload of this process and the trainer of all processes."""
    work = Workload.from_options(given)
    # The lengths are forced for the rows of this process; the settings are for those of all.
    whole = replace(work, rollout=work.rollout * WORLD_SIZE)
    return work, onetrunk_ppo.build_trainer(whole, folder, given, onetrunk_ppo.Marks(work, meter))


def frozen_weights(trainer: PPOTrainer) -> list[Tensor]:
    """Return the frozen weights without the value head, which is fitted apart."""
    named = trainer.model.named_parameters()
    return [p for name, p in named if not p.requires_grad and "value_head" not in name]


def frozen_bytes(trainer: PPOTrainer) -> int:
    """Return the bytes of frozen weights that this process holds between forwards."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in frozen_weights(trainer))


def facts(given: Any) -> list[dict[str, Any]]:
    """Return memory and collective operations of one iteration, measured and by the formulas of costs.py."""
    return [facts_of(given, layers) for layers in given.layer_choices]


def held_bytes(shape: ModelShape, itemsize: float, shards: int, *, is_gathered: bool = False) -> int:
    """Return the bytes of the frozen base that each of `shards` processes holds.

    Args:
        shape: of the base.
        itemsize: bytes of a weight.
        shards: processes that hold one copy together; 1: the base is not sharded.
        is_gathered: while a rollout is sampled, where a process holds the whole base next to its share.
    """
    whole = math.ceil(shape.parameters * itemsize)
    share = math.ceil(whole / shards)
    return share + (whole if is_gathered and shards > 1 else 0)


def facts_of(given: Any, adapter_layers: str) -> dict[str, Any]:
    """Return the facts with adapters on some layers; the iteration is the second one."""
    given.adapter_layers, given.iterations = adapter_layers, 2
    meter, inside = Meter("cpu"), Inside()
    with TemporaryDirectory() as folder:
        work, trainer = build(given, folder, meter)
        inside.attach(trainer)
        rest = at_rest()
        memory = HostMemory()
        counter = Collectives(lambda: f"{len(meter.iterations)} {meter.phase}")
        enter = meter.enter

        def entering(phase: str) -> None:
            enter(phase)
            memory.enter(phase)

        meter.enter = entering
        memory.start()
        with counter:
            trainer.train()
        memory.end()
    measured = {phase: counter.table().get(f"2 {phase}", {}) for phase in PHASES}
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    state = trainer.optimizer.state.values()
    shape = ModelShape.from_config(work.config())
    shards = WORLD_SIZE if any(isinstance(p, DTensor) for p in trainer.model.parameters()) else 1
    frozen, itemsize = frozen_bytes(trainer), trainer.model.get_base_model().dtype.itemsize
    facts = {
        "adapter_layers": adapter_layers,
        "frozen": frozen,
        "frozen_formula": held_bytes(shape, itemsize, shards),
        "frozen_in_rollout": inside.whole_bytes + (frozen if shards > 1 else 0),
        "frozen_in_rollout_formula": held_bytes(shape, itemsize, shards, is_gathered=True),
        "trained": sum(p.nbytes for p in trained),
        "optimizer": sum(t.nbytes for entry in state for t in entry.values() if t.dim()),
        "anonymous_mib": {"rest": rest["anonymous"]} | {p: memory.peaks[p]["anonymous"] for p in PHASES},
        "optimizer_steps": work.epochs * given.num_minibatches,
        "collectives": measured,
    }
    expected = gathers_by_formula(given, work, trainer) if shards > 1 else {}
    facts["gathers_formula"] = {
        phase: [found.layers + found.outer, found.num_bytes(shape, itemsize)] for phase, found in expected.items()
    }
    facts["gathers"] = {phase: measured[phase].get(WEIGHTS, [0, 0]) for phase in expected}
    return facts


def gathers_by_formula(given: Any, work: Workload, trainer: PPOTrainer) -> dict[str, Gathers]:
    """Return what costs.py says that an iteration of the trainer gathers."""
    plan, is_kept = trainer.trunk_plan, trainer.trunk_plan.cache is not None
    return gathers(
        ModelShape.from_config(work.config()),
        trainer.model.cut,
        packs=-(-work.rollout // work.microbatch),
        epochs=work.epochs,
        lower_layers="sampling" if plan.sampled else "scoring" if is_kept else "every",
    )


def seconds(given: Any) -> dict[str, Any]:
    """Return the seconds of every iteration but the first, by the clock and by the processor."""
    meter = TwoClocks()
    with TemporaryDirectory() as folder:
        _, trainer = build(given, folder, meter)
        trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return {"wall": meter.wall[1:], "cpu": meter.iterations[1:], "trained": trained}


def save(given: Any) -> dict[str, Any]:
    """Write the base of the workload next to the results; return its bytes."""
    model = Workload.from_options(given).policy().to(getattr(torch, given.saved_dtype))
    model.save_pretrained(Path(given.folder) / "base")
    return {"bytes": sum(p.nbytes for p in model.parameters())}


def loading(given: Any) -> dict[str, Any]:
    """Return the memory of this process, in MiB beyond that of its imports, as it loads and shards a saved base."""
    state = PartialState(cpu=True)
    start = at_rest()
    memory, base, config = HostMemory(), Path(given.folder) / "base", LoraConfig(**LORA)
    dtype = {"dtype": getattr(torch, given.dtype)}
    quantization = None
    if given.nf4:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype["dtype"]
        )
    memory.start()
    with memory.during("load"):
        trunk = build_trunk(str(base), config, quantization_config=quantization, model_init_kwargs=dtype)
    loaded = at_rest()
    state.wait_for_everyone()
    with memory.during("shard"):
        line = shard_frozen(trunk, Layout(), state.device)
    sharded = at_rest()
    state.wait_for_everyone()
    with memory.during("gather"), gathered(trunk):
        state.wait_for_everyone()
    memory.end()
    rows = {"loaded": loaded, "sharded": sharded} | {f"peak: {phase}": memory.peaks[phase] for phase in memory.peaks}
    rows.pop("peak: init", None)
    beyond = {row: {name: round(mib - start[name], 1) for name, mib in found.items()} for row, found in rows.items()}
    return {"memory": beyond, "is_sharded": line is not None}


WHAT = {"facts": facts, "seconds": seconds, "loading": loading, "save": save}


def parse(arguments: list[str]) -> Any:
    """Return the options: those of onetrunk_ppo.py, and what a launch needs besides."""
    parser = onetrunk_ppo.parser(__doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("folder")
    parser.add_argument("--layer_choices", nargs="+", default=["all"], help="facts: each as adapter_layers takes it")
    parser.add_argument("--cores", help="number of the core of each process, separated by commas")
    parser.add_argument("--saved_dtype", default="float32", help="save: of the files")
    return parser.parse_args(arguments)


def main() -> None:
    given = parse(sys.argv[1:])
    if given.cores:
        # Threads that start later inherit it, those of gloo included.
        os.sched_setaffinity(0, {int(given.cores.split(",")[RANK])})
    torch.set_num_threads(1)
    versions = {"onetrunk": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    result = {"result": WHAT[given.what](given), "world_size": WORLD_SIZE, "versions": versions}
    (Path(given.folder) / f"rank{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
