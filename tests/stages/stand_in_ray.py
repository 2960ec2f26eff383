"""The part of Ray that `prefs` uses, in this process: what Ray sends to its workers is pickled, as on a cluster."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


class RayError(Exception):
    """Ray's error for a worker that failed."""


class Rows:
    """The rows of a dataset of Ray Data, and what is done to them.

    Args:
        cluster: the stand-in.
        rows: dicts of texts.
    """

    def __init__(self, cluster: StandInRay, rows: list[dict[str, Any]]):
        self.cluster, self.rows = cluster, rows

    def map_batches(
        self, worker: type, *, batch_size: int, compute: int, fn_constructor_args: tuple[Any, ...], **resources: Any
    ) -> Rows:
        assert batch_size == 1 and set(resources) == {"num_cpus", "num_gpus"}
        self.make = lambda: worker(*pickle.loads(pickle.dumps(fn_constructor_args)))
        self.num_workers = compute
        return self

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        workers = [self.make() for _ in range(self.num_workers)]
        for place, row in enumerate(self.rows):
            if self.cluster.fails_at == len(self.cluster.drawn):
                raise RayError("task failed\nValueError: the worker is out of memory")
            sent = pickle.loads(pickle.dumps({name: np.array([value]) for name, value in row.items()}))
            self.cluster.drawn.append(place)
            found = workers[place % self.num_workers](sent)
            yield {name: values[0] for name, values in found.items()}


class StandInRay:
    """Stands for the modules ray, ray.data and ray.exceptions.

    Args:
        fails_at: the worker that gets this chunk, counted from 0 over all jobs, fails; None: none does.

    Attributes:
        drawn: the place in its job of each chunk that a worker has drawn.
    """

    def __init__(self, fails_at: int | None = None):
        self.fails_at = fails_at
        self.drawn: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> StandInRay:
        """Make `import ray.data` find this object."""
        context = types.SimpleNamespace(execution_options=types.SimpleNamespace(), enable_progress_bars=True)
        data = types.ModuleType("ray.data")
        data.from_items = lambda rows: Rows(self, rows)
        data.ActorPoolStrategy = lambda size: size
        data.DataContext = types.SimpleNamespace(get_current=lambda: context)
        ray = types.ModuleType("ray")
        ray.data, ray.exceptions = data, types.SimpleNamespace(RayError=RayError)
        ray.is_initialized = lambda: True
        for name, module in {"ray": ray, "ray.data": data}.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self
