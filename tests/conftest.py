"""Settings of every test run: offline, quiet, one thread, and `gpu` tests skipped where there are too few GPUs."""

import gc
import os

gc.disable()  # Until the tests are collected: a third of that time goes to collections that find nothing.
# Before anything imports transformers or torch, which read them once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from onetrunk.utils.loading import freeze_loaded


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    spread_sampled_cases(items)
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = (marker.args or (1,))[0] if marker else 0
        if needed > number:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs" if needed > 1 else "needs a GPU"))


def pytest_collection_finish() -> None:
    """Let collections skip what is loaded: every training begins with one, which would take 0.4 s."""
    gc.collect()
    freeze_loaded()
    gc.enable()


def spread_sampled_cases(items: list[pytest.Item]) -> None:
    """Mark all but N evenly spaced cases of a test with `sampled(N)` as slow; with `sampled(N, slow=M)` all but M of
    the others as soak tests.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("soak"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test in cases.values():
        mark = test[0].get_closest_marker("sampled")
        if mark.args[0] and test[0].get_closest_marker("slow"):
            continue
        kept = spaced(len(test), mark.args[0] + mark.kwargs.get("slow", len(test)))
        fast = {kept[i] for i in spaced(len(kept), mark.args[0])}
        for i, item in enumerate(test):
            if i not in fast:
                item.add_marker(pytest.mark.slow if i in kept else pytest.mark.soak)


def spaced(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced numbers below `total`, or all of them."""
    count = min(count, total)
    return [i * total // count for i in range(count)]
