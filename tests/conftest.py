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


class FailuresAtOnce:
    """Says what failed when it fails: a run that is cut short, as by CI's limit, prints no summary."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reporter = self.config.pluginmanager.getplugin("terminalreporter")
            reporter.write_line(f"\nFAILED {report.nodeid} ({report.when})\n{getattr(crash, 'message', '')}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # Not in the processes of xdist, which report to this one.
        config.pluginmanager.register(FailuresAtOnce(config))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    spread_sampled_cases(items)
    leave_out_soak(config, items)
    put_long_files_first(items)
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


def leave_out_soak(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the soak tests, which take hours, unless `-m` names them: it replaces the marks of pyproject.toml."""
    if "soak" not in config.option.markexpr:
        soak = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in soak]
        config.hook.pytest_deselected(items=soak)


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


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Begin with files whose tests have time limits of their own: if one began last, other processes would wait."""
    long = {item.path for item in items if item.get_closest_marker("timeout")}
    items.sort(key=lambda item: item.path not in long)


def spaced(total: int, count: int) -> list[int]:
    """Return `count` evenly spaced numbers below `total`, or all of them."""
    count = min(count, total)
    return [i * total // count for i in range(count)]
