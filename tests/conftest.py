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
from tests.processes import ROOT


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


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """Work in an empty folder, which is `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def workplace(empty_folder):
    """Work in an empty folder, in which commands name the recipes as in the root of the repository."""
    (empty_folder / "recipes").symlink_to(ROOT / "recipes")
    return empty_folder


@pytest.fixture
def at_the_root(monkeypatch):
    """Work in the root of the repository."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def launch_env(monkeypatch):
    """Return a function that sets the environment of a launch with accelerate and returns its layout."""
    from onetrunk.parallel.layout import USE_FSDP, USE_PARALLELISM, launch_layout

    def layout(**variables):
        for name in (USE_FSDP, USE_PARALLELISM, "FSDP_CPU_RAM_EFFICIENT_LOADING"):
            monkeypatch.setenv(name, "false")
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        launch_layout.cache_clear()
        return launch_layout()

    yield layout
    launch_layout.cache_clear()


@pytest.fixture(scope="module")
def s3():
    """Return the address of a bucket on a real S3 server (moto's) on the loopback."""
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        fsspec.filesystem("s3").clear_instance_cache()
        fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)  # The server is new, its buckets are not.
        yield "s3://bucket"
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()
