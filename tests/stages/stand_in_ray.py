"""The part of Ray that `prefs` uses, in this process: what Ray sends to its workers is pickled, as on a cluster."""

import pickle
import sys
import types

import numpy as np


class RayError(Exception):
    """Ray's error for a worker that failed."""


class StandInRay:
    """Stands for the modules ray, ray.data and ray.exceptions, and for its one dataset; `drawn` counts the chunks.

    The worker that gets the chunk `fails_at`, counted from 0, fails.
    """

    def __init__(self, fails_at=None):
        self.fails_at, self.drawn = fails_at, 0

    def from_items(self, rows):
        self.rows = rows
        return self

    def map_batches(self, worker, *, batch_size, compute, fn_constructor_args, **resources):
        assert batch_size == 1 and set(resources) == {"num_cpus", "num_gpus"}
        self.workers = [worker(*pickle.loads(pickle.dumps(fn_constructor_args))) for _ in range(compute)]
        return self

    def iter_rows(self):
        for place, row in enumerate(self.rows):
            if self.fails_at == self.drawn:
                raise RayError("task failed\nValueError: the worker is out of memory")
            self.drawn += 1
            sent = pickle.loads(pickle.dumps({name: np.array([value]) for name, value in row.items()}))
            found = self.workers[place % len(self.workers)](sent)
            yield {name: values[0] for name, values in found.items()}

    def install(self, monkeypatch):
        """Make `import ray.data` find this object."""
        context = types.SimpleNamespace(execution_options=types.SimpleNamespace(), enable_progress_bars=True)
        data, ray = types.ModuleType("ray.data"), types.ModuleType("ray")
        data.from_items, data.ActorPoolStrategy = self.from_items, lambda size: size
        data.DataContext = types.SimpleNamespace(get_current=lambda: context)
        ray.data, ray.exceptions = data, types.SimpleNamespace(RayError=RayError)
        ray.is_initialized = lambda: True
        for name, module in {"ray": ray, "ray.data": data}.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self
