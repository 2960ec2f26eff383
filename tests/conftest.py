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

from onetrunk.utils.startup import freeze_loaded


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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
