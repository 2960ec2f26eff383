"""Watching a run: what each process does when, which one the others wait for, and a trace of all of them.

A run is always in one phase: `generate`, `score` and `update` are a process's own work, `gather` is everything in
between, where results are joined and processes wait for each other. One switch from phase to phase renews the
heartbeat, adds up seconds, and draws the spans of a trace.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.checkpoints.heartbeats import GATHER, UPDATE, Heartbeat
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.metrics import PHASES, peak_gib

logger = get_logger(__name__)

# A phase is slow only if it makes the rollout longer by this share.
LEAST_EXCESS = 0.1
TRACE_FOLDER, MERGED_TRACE = "trace", "all-ranks.json.gz"


class Watch(TrainerCallback):
    """The phases of this process, per-rank metrics, the straggler, and the trace.

    Args:
        config: of the run.
        accelerator: of the run.
        heartbeat: is renewed with every phase; None: no heartbeat.
    """

    def __init__(self, config: PPOConfig, accelerator: Accelerator, heartbeat: Heartbeat | None = None):
        self.accelerator = accelerator
        self.heartbeat = Heartbeat(config.output_dir, accelerator.process_index) if heartbeat is None else heartbeat
        self.straggler = Straggler(config.straggler_factor, config.alarm_patience)
        self.trace = Trace(Path(config.output_dir) / TRACE_FOLDER, config.trace_rollouts, accelerator)
        self.phase_name = GATHER
        self._device = accelerator.device
        self._begin()

    def _begin(self) -> None:
        self._hosts: list[str] = []
        self._rollout = -1
        # Seconds of own work: by rollout since the last log, by phase.
        self._own: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        self._unread: list[tuple[int, Any, Any]] = []
        self._logged_at = time.perf_counter()
        # Rollouts that are over and not yet judged.
        self._unjudged: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        self._start: Any = None
        self._gradients_at: Any = None

    # --- phases -----------------------------------------------------------------------------------------------------

    def begin_rollout(self, iteration: int) -> None:
        """Begin a rollout. Every process calls it."""
        self._rollout = iteration
        self.heartbeat.rollout = iteration
        self.trace.begin_rollout(self.phase_name)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as a phase of this process's own work; `gather` follows it."""
        self._switch(name)
        start, self._gradients_at = self._now(name), None
        try:
            yield
        finally:
            self._unread.append((self._rollout, name, (start, self._gradients_at or self._now(name))))
            self._switch(GATHER)

    def _switch(self, name: str) -> None:
        self.phase_name = name
        self.heartbeat.enter(name)
        self.trace.switch(name)

    @contextlib.contextmanager
    def last_backward(self, model: nn.Module) -> Iterator[None]:
        """Record when this process has its own gradients, in the backward that then waits for those of the others."""
        if self.accelerator.num_processes == 1:
            yield
            return

        def have_gradients(gradients: Sequence[Any]) -> None:
            self._gradients_at = self._now(UPDATE)

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handle = torch.autograd.graph.register_multi_grad_hook(trained, have_gradients)
        try:
            yield
        finally:
            handle.remove()

    def _now(self, phase: str) -> Any:
        # The host runs ahead of a GPU in the update. Generation and scoring end with a result on the host.
        if phase != UPDATE or self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    # --- metrics of all ranks, once per log -------------------------------------------------------------------------

    def _read(self) -> None:
        for rollout, phase, (start, end) in self._unread:
            if phase not in PHASES:
                continue
            if isinstance(start, float):
                seconds = end - start
            else:
                end.synchronize()
                seconds = start.elapsed_time(end) / 1000
            self._own[rollout][phase] += seconds
            self._unjudged[rollout][phase] += seconds
        self._unread = []

    def flush(self) -> dict[str, float]:
        """Return the metrics of all ranks since the last call, by their public names. Every process calls it.

        Also warns of a straggler. Nothing is gathered, and nothing returned, in a run with one process.
        """
        now = time.perf_counter()
        wall, self._logged_at = now - self._logged_at, now
        self._read()
        if self.accelerator.num_processes == 1:
            self._own.clear()
            self._unjudged.clear()
            return {}
        seconds = [sum(own[phase] for own in self._own.values()) for phase in PHASES]
        # A rollout that was resumed has no times of its sampling.
        self._unjudged.pop(-1, None)
        over = sorted(rollout for rollout in self._unjudged if rollout < self._rollout)
        row = [*seconds, peak_gib(), sum(seconds) / max(wall, 1e-9)]
        judged = [self._unjudged.pop(rollout) for rollout in over]
        row += [rollout[phase] for rollout in judged for phase in PHASES]
        self._own.clear()
        rows = self.accelerator.gather(torch.tensor([row], dtype=torch.float32, device=self._device)).tolist()
        if not self._hosts:
            self._hosts = gather_object([socket.gethostname()])
        for i in range(len(over)):
            first = 5 + i * len(PHASES)
            warning = self.straggler.judge([line[first : first + len(PHASES)] for line in rows], self._hosts)
            if warning is not None:
                logger.warning(warning)
        return rank_metrics([line[:5] for line in rows])

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._begin()
        self.straggler.reset()
        self.trace.reset()
        self._switch(GATHER)

    def on_train_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trace.finish()


def rank_metrics(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the least, mean and largest value over the ranks by their public names.

    Args:
        rows: of each rank: seconds of each of PHASES, peak memory in GiB, busy share. A phase without seconds on any
            rank is left out.
    """
    names = [f"rank/{phase}_s" for phase in PHASES] + ["rank/memory_gib", "rank/busy"]
    metrics = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if any(values):
            metrics[f"{name}_min"], metrics[f"{name}_max"] = min(values), max(values)
            metrics[f"{name}_mean"] = statistics.fmean(values)
    return metrics


# --- the straggler --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slow:
    """A rank that needs longer than the others in a phase; seconds of its own and the median of theirs."""

    rank: int
    phase: str
    seconds: float
    others: float


def find_slow(seconds: Sequence[Sequence[float]], factor: float) -> Slow | None:
    """Return the rank and phase in which all others wait longest for one rank; None if no rank is slow.

    A rank is slow in a phase if it needs more than `factor` times the median of the others, and if that costs
    LEAST_EXCESS of the rollout.

    Args:
        seconds: [ranks][PHASES], own work of one rollout.
        factor: above 1.
    """
    slow = []
    total = sum(max(column) for column in zip(*seconds, strict=True))
    for phase, column in zip(PHASES, zip(*seconds, strict=True), strict=True):
        rank = max(range(len(column)), key=column.__getitem__)
        others = statistics.median(column[:rank] + column[rank + 1 :])
        excess = column[rank] - others
        if column[rank] > factor * others and excess >= LEAST_EXCESS * total > 0:
            slow.append((excess, Slow(rank, phase, column[rank], others)))
    return max(slow, key=lambda pair: pair[0])[1] if slow else None


class Straggler:
    """Recognises a rank that is the slowest, in the same phase, in several rollouts in a row.

    Args:
        factor: see `find_slow`; None: no rank is ever slow.
        patience: rollouts in a row.
    """

    def __init__(self, factor: float | None, patience: int):
        self.factor = factor
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        """Forget the rollouts so far."""
        self._in_a_row: list[Slow] = []

    def judge(self, seconds: Sequence[Sequence[float]], hosts: Sequence[str]) -> str | None:
        """Return the warning, if this rollout completes the row; it is given once until a rollout is not slow.

        Args:
            seconds: of the rollout, as `find_slow` takes them.
            hosts: of the ranks.
        """
        slow = None if self.factor is None else find_slow(seconds, self.factor)
        before = self._in_a_row[-1] if self._in_a_row else None
        if slow is None or before is None or (slow.rank, slow.phase) != (before.rank, before.phase):
            self._in_a_row = []
        self._in_a_row += [slow] if slow is not None else []
        if len(self._in_a_row) != self.patience:
            return None
        own, others = (statistics.fmean(getattr(s, name) for s in self._in_a_row) for name in ("seconds", "others"))
        row = f"{self.patience} rollouts in a row" if self.patience > 1 else "a rollout"
        return (
            f"straggler: in {row}, rank {slow.rank} on {hosts[slow.rank]} needed {own:.3g} s to {slow.phase}, the"
            f" other ranks {others:.3g} s (straggler_factor {self.factor:g}); all wait for it. Look there for"
            " other processes, a throttled GPU or a slow disk; trace_rollouts shows what it does"
        )


# --- the trace ------------------------------------------------------------------------------------------------------


class Trace:
    """Records the rollouts after the first with torch.profiler, one file per rank, and merges the files.

    Args:
        folder: of the files.
        num_rollouts: to record; 0: nothing is ever done.
        accelerator: of the run.
    """

    def __init__(self, folder: Path, num_rollouts: int, accelerator: Accelerator):
        self.folder = folder
        self.num_rollouts = num_rollouts
        self.accelerator = accelerator
        self.reset()

    def reset(self) -> None:
        """Begin a run; the rollouts after its first will be recorded."""
        self._num_begun = 0
        self._is_done = not self.num_rollouts
        self._profiler: profile | None = None
        self._span: record_function | None = None

    @property
    def is_recording(self) -> bool:
        """Whether a rollout is recorded: of the main thread's work, and of everything on a GPU."""
        return self._profiler is not None

    def begin_rollout(self, phase: str) -> None:
        """Begin or end the recording, if this rollout is the first to record or the first after those."""
        self._num_begun += 1
        if self._is_done:
            return
        if self._num_begun == self.num_rollouts + 2:
            self.finish()
        elif self._num_begun == 2:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self.accelerator.device.type == "cuda" else []
            self._profiler = profile(activities=activities)
            self._profiler.start()
            # A process that an error ends while the profiler runs would crash in its clean-up.
            atexit.register(self._end_recording)
            self.switch(phase)

    def switch(self, name: str) -> None:
        """End the current span and begin the next."""
        if self._profiler is None:
            return
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = record_function(name)
        self._span.__enter__()

    def _end_recording(self) -> profile | None:
        atexit.unregister(self._end_recording)
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._span.__exit__(None, None, None)
            self._span = None
            profiler.stop()
        return profiler

    def finish(self) -> None:
        """End the recording and write the files. Every process calls it."""
        if self._is_done:
            return
        self._is_done = True
        if self._profiler is None:
            logger.warning("trace_rollouts is set, and the run ended before its second rollout: nothing was traced")
            return
        profiler = self._end_recording()
        rank = self.accelerator.process_index
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / f"rank-{rank}.json.gz"
        temporary = target.with_name(f".{os.getpid()}-{target.name}")
        profiler.export_chrome_trace(str(temporary))
        os.replace(temporary, target)
        self.accelerator.wait_for_everyone()
        if rank == 0:
            merged = merge_traces(self.folder, self.accelerator.num_processes)
            logger.info(f"the trace is in {merged}: open it at https://ui.perfetto.dev or in chrome://tracing")
        self.accelerator.wait_for_everyone()


def merge_traces(folder: Path, num_ranks: int) -> Path:
    """Merge the ranks' traces into one, in which a rank is a process (and each of its GPUs another); return its path.

    A rank's file may be missing where machines do not share the folder. One rank's trace is in memory at a time.
    """
    merged = folder / MERGED_TRACE
    temporary = merged.with_name(f".{merged.name}")
    base: int | None = None
    with gzip.open(temporary, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for rank in range(num_ranks):
            path = folder / f"rank-{rank}.json.gz"
            if not path.is_file():
                logger.warning(f"{path} is missing, so rank {rank} is not in {merged}")
                continue
            with gzip.open(path, "rt", encoding="utf-8") as source:
                trace = json.load(source)
            base = trace.get("baseTimeNanoseconds", 0) if base is None else base
            shift = (trace.get("baseTimeNanoseconds", 0) - base) / 1000
            for event in rank_events(trace["traceEvents"], rank, trace.get("host_name", ""), shift):
                file.write(f"{separator}{json.dumps(event)}")
                separator = ",\n"
        file.write("\n]}\n")
    os.replace(temporary, merged)
    return merged


def rank_events(events: Sequence[dict[str, Any]], rank: int, host: str, shift_us: float) -> Iterator[dict[str, Any]]:
    """Yield a rank's events of the merged trace: with process ids and flow ids of its own, on the common clock.

    Args:
        events: of the rank, as torch.profiler writes them: a process id is that of the process, the number of a GPU,
            or a word.
        rank, host: of the process.
        shift_us: added to times, microseconds.
    """
    process = next((e["pid"] for e in events if e.get("cat") in ("user_annotation", "cpu_op")), None)
    processes: dict[Any, int] = {process: rank * 100}
    for event in events:
        if event.get("ph") == "M" and event.get("name", "").startswith("process_"):
            continue
        pid = event.get("pid", process)
        if pid not in processes:
            processes[pid] = rank * 100 + len(processes)
        event = {**event, "pid": processes[pid]}
        if "ts" in event:
            event["ts"] = event["ts"] + shift_us
        if event.get("ph") in ("s", "t", "f") and "id" in event:
            event["id"] = f"{rank}-{event['id']}"
        yield event
    for pid, number in processes.items():
        part = "" if pid == process else f": GPU {pid}" if isinstance(pid, int) else f": {pid}"
        name = f"rank {rank} ({host}){part}"
        yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
