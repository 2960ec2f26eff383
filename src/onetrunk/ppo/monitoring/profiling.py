"""Watching a run: what each process does when, which one the others wait for, and a trace of each.

`generate`, `score` and `update` are phases of a process's own work; in between results are joined and processes wait
for each other. A phase renews the heartbeat, adds up seconds, and is a span of the trace.
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
from torch import nn
from torch.profiler import profile, record_function, schedule, supported_activities, tensorboard_trace_handler
from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.parallel.heartbeat import GATHER, UPDATE, Heartbeat
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.monitoring.metrics import PHASES, peak_gib

TRACE_FOLDER = "trace"


class PhaseTimer(TrainerCallback):
    """The phases of this process, the metrics that compare ranks, and the trace.

    Args:
        heartbeat: is renewed with every phase; None: a new one.
    """

    def __init__(self, config: PPOConfig, accelerator: Accelerator, heartbeat: Heartbeat | None = None):
        self.accelerator = accelerator
        self.heartbeat = Heartbeat(config.output_dir, accelerator.process_index) if heartbeat is None else heartbeat
        self.trace_folder = Path(config.output_dir) / TRACE_FOLDER
        self.num_traced = config.trace_rollouts
        self._profiler: profile | None = None
        self._device = accelerator.device
        self._begin()

    def _begin(self) -> None:
        # Own work since the last log: phase, start and end.
        self._work: list[tuple[str, Any, Any]] = []
        self._logged_at = time.perf_counter()
        self._gradients_at: Any = None
        self._num_rollouts = 0

    # --- phases -----------------------------------------------------------------------------------------------------

    def begin_rollout(self, iteration: int) -> None:
        """Begin a rollout."""
        self.heartbeat.rollout = iteration
        self._num_rollouts += 1
        if self._profiler is not None and self._num_rollouts > 1:
            self._profiler.step()

    @property
    def is_tracing(self) -> bool:
        """Whether this rollout is traced: the work of the main thread, and everything on a GPU."""
        return self._profiler is not None and 1 < self._num_rollouts <= 1 + self.num_traced

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the block as a phase of this process's own work."""
        self.heartbeat.enter(name)
        start, self._gradients_at = self._now(name), None
        try:
            with record_function(name):
                yield
        finally:
            self._work.append((name, start, self._gradients_at or self._now(name)))
            self.heartbeat.enter(GATHER)

    @contextlib.contextmanager
    def last_backward(self, model: nn.Module) -> Iterator[None]:
        """Record when this process has its own gradients, in the backward that then waits for the other processes."""
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
        row = [*seconds, peak_gib(self._device), sum(seconds) / max(wall, 1e-9)]
        rows = self.accelerator.gather(torch.tensor([row], dtype=torch.float32, device=self._device))
        return rank_metrics(rows.tolist())

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._begin()
        self.heartbeat.enter(GATHER)
        if self.num_traced:
            # The first rollout warms up and is not traced.
            self._profiler = profile(
                activities=supported_activities(),
                schedule=schedule(wait=0, warmup=1, active=self.num_traced, repeat=1),
                on_trace_ready=tensorboard_trace_handler(
                    str(self.trace_folder), f"rank-{self.accelerator.process_index}", use_gzip=True
                ),
            )
            self._profiler.start()
            # A process that an error ends while the profiler runs would crash in its clean-up.
            atexit.register(self._end_trace)

    def on_train_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end_trace()

    def _end_trace(self) -> None:
        atexit.unregister(self._end_trace)
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def rank_metrics(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the least, mean and largest value over the ranks, and the rank with most work, by their public names.

    Args:
        rows: for each rank the seconds of each of PHASES, peak memory in GiB, busy share. A phase without seconds on
            any rank is left out.
    """
    names = [f"rank/{phase}_s" for phase in PHASES] + ["rank/memory_gib", "rank/busy"]
    metrics = {}
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        if any(values):
            metrics[f"{name}_min"], metrics[f"{name}_max"] = min(values), max(values)
            metrics[f"{name}_mean"] = statistics.fmean(values)
    metrics["rank/slowest"] = float(max(range(len(rows)), key=lambda rank: rows[rank][-1]))
    return metrics
