"""Watching a run: what each process does when, which one the others wait for, and a trace of each.

A run is always in one phase: `generate`, `score` and `update` are a process's own work, `gather` is everything in
between, where results are joined and processes wait for each other. One switch from phase to phase renews the
heartbeat, adds up seconds, and draws the spans of a trace.
"""

from __future__ import annotations

import atexit
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler
from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.parallel.heartbeat import GATHER, UPDATE, Heartbeat
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.monitoring.metrics import PHASES, peak_gib

logger = get_logger(__name__)

TRACE_FOLDER = "trace"


class Watch(TrainerCallback):
    """The phases of this process, the metrics that compare ranks, and the trace.

    Args:
        config: of the run.
        accelerator: of the run.
        heartbeat: is renewed with every phase; None: no heartbeat.
    """

    def __init__(self, config: PPOConfig, accelerator: Accelerator, heartbeat: Heartbeat | None = None):
        self.accelerator = accelerator
        self.heartbeat = Heartbeat(config.output_dir, accelerator.process_index) if heartbeat is None else heartbeat
        self.trace = Trace(Path(config.output_dir) / TRACE_FOLDER, config.trace_rollouts, accelerator)
        self._device = accelerator.device
        self._begin()

    def _begin(self) -> None:
        # Own work since the last log: phase, start and end.
        self._work: list[tuple[str, Any, Any]] = []
        self._logged_at = time.perf_counter()
        self._gradients_at: Any = None

    # --- phases -----------------------------------------------------------------------------------------------------

    def begin_rollout(self, iteration: int) -> None:
        """Begin a rollout."""
        self.heartbeat.rollout = iteration
        self.trace.begin_rollout()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as a phase of this process's own work; `gather` follows it."""
        self._switch(name)
        start, self._gradients_at = self._now(name), None
        try:
            yield
        finally:
            self._work.append((name, start, self._gradients_at or self._now(name)))
            self._switch(GATHER)

    def _switch(self, name: str) -> None:
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

    def flush(self) -> dict[str, float]:
        """Return the metrics of all ranks since the last call, by their public names. Every process calls it.

        Nothing is gathered, and nothing returned, in a run with one process.
        """
        now = time.perf_counter()
        wall, self._logged_at = now - self._logged_at, now
        work, self._work = self._work, []
        if self.accelerator.num_processes == 1:
            return {}
        seconds = [sum(_seconds(start, end) for name, start, end in work if name == phase) for phase in PHASES]
        row = [*seconds, peak_gib(), sum(seconds) / max(wall, 1e-9)]
        rows = self.accelerator.gather(torch.tensor([row], dtype=torch.float32, device=self._device))
        return rank_metrics(rows.tolist())

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._begin()
        self.trace.begin()
        self._switch(GATHER)

    def on_train_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trace.end()


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def rank_metrics(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the least, mean and largest value over the ranks, and the rank with most work, by their public names.

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
    metrics["rank/slowest"] = float(max(range(len(rows)), key=lambda rank: rows[rank][-1]))
    return metrics


class Trace:
    """Records the rollouts after the first with torch.profiler, in one file per rank.

    Args:
        folder: of the files.
        num_rollouts: to record; 0: nothing is ever done.
        accelerator: of the run.
    """

    def __init__(self, folder: Path, num_rollouts: int, accelerator: Accelerator):
        self.folder = folder
        self.num_rollouts = num_rollouts
        self.accelerator = accelerator
        self.begin()

    def begin(self) -> None:
        """Begin a run; the rollouts after its first will be recorded."""
        self._num_begun = 0
        self._profiler: profile | None = None
        self._span: record_function | None = None

    @property
    def is_recording(self) -> bool:
        """Whether a rollout is recorded: of the main thread's work, and of everything on a GPU."""
        return self._profiler is not None

    def begin_rollout(self) -> None:
        """Begin or end the recording, if this rollout is the first to record or the first after those."""
        self._num_begun += 1
        if self._num_begun == self.num_rollouts + 2:
            self._finish()
        elif self._num_begun == 2:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self.accelerator.device.type == "cuda" else []
            write = tensorboard_trace_handler(
                str(self.folder), f"rank-{self.accelerator.process_index}", use_gzip=True
            )
            self._profiler = profile(activities=activities, on_trace_ready=write)
            self._profiler.start()
            # A process that an error ends while the profiler runs would crash in its clean-up.
            atexit.register(self._finish)
            self.switch(GATHER)

    def switch(self, name: str) -> None:
        """End the current span and begin the next."""
        if self._profiler is None:
            return
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = record_function(name)
        self._span.__enter__()

    def end(self) -> None:
        """End the recording with the run."""
        if self.num_rollouts and self._num_begun < 2:
            logger.warning("trace_rollouts is set, and the run ended before its second rollout: nothing was traced")
        self._finish()

    def _finish(self) -> None:
        atexit.unregister(self._finish)
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._span.__exit__(None, None, None)
            self._span = None
            profiler.stop()
