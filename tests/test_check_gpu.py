"""scripts/check_gpu.py: a dry run of every part on a CPU, and what it says of parts that fail, hang or cannot run."""

import contextlib
import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.processes import ROOT, python

VERSIONS = {"torch": "2", "triton": "3", "bitsandbytes": "0"}
ITERATIONS = ["0.5b-bf16", "7b-bf16", "0.5b-nf4", "7b-nf4"]
H100 = {"name": "H100", "memory_gib": 79.2}
STUB_OF_TRL = """#!/bin/sh
[ "$1" = -c ] && exit 0
echo '{"implementation": "trl", "seconds": {"generate": 2, "score": 2, "update": 4, "total": 8}, "peak_mb": 9000}'
"""


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from bench import gpu_parts

    return gpu_parts


@pytest.fixture
def report(parts):
    from bench import gpu_report

    return gpu_report


def check_gpu(*options: str, **environment: str) -> subprocess.CompletedProcess:
    return python("scripts/check_gpu.py", *options, code=None, cwd=ROOT, **{"CUDA_VISIBLE_DEVICES": "", **environment})


@pytest.mark.slow
@pytest.mark.timeout(3100)
def test_a_dry_run_runs_every_part_and_writes_what_it_found(tmp_path):
    stub = tmp_path / "python"
    stub.write_text(STUB_OF_TRL)
    stub.chmod(0o755)
    options = ("--dry_run", "--minutes", "45", "--trl_python", str(stub), "--output_dir", str(tmp_path / "out"))
    # An empty cache folder: an AgileRL that somebody's bench has made there would be run.
    done = check_gpu(*options, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "check.json").read_text())
    assert results["is_dry"] and results["verdict"] == f"{len(results['parts']) - 1} passed, 1 skipped"
    found = results["parts"]
    assert [*found] == ["tests", "kernels", "twins", "graph", *ITERATIONS, "trl", "agilerl", "several"]
    assert found["kernels"]["result"]["passed"] > 20 and found["kernels"]["result"]["skipped"] == 0
    # What only a GPU can show is skipped, but collected.
    for name, fewest in (("tests", 3), ("several", 20)):
        assert found[name]["result"]["passed"] == 0 and found[name]["result"]["skipped"] >= fewest
    speeds = results["measurements"]["iterations"]
    assert [*speeds] == ITERATIONS
    for row in speeds.values():
        assert all(row[phase]["tokens_per_s"] > 0 for phase in ("generate", "score", "update"))
        assert row["decode"]["operations"] > 100 and row["first_ratio"] == 1
    assert found["graph"]["result"]["equal_rows"] == 1 and found["graph"]["result"]["replay_equals_step"]
    assert results["measurements"]["others"]["trl"]["ratio"]["total"] > 0
    assert all("torch" in case and "kernel" in case for case in found["twins"]["result"]["logprobs"].values())
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "A dry run on a CPU" in readme and "| 7b-nf4 | passed |" in readme and "Seconds of TRL 1.12 over" in readme
    assert str(ROOT) not in readme + json.dumps(results)


BOTH = {"trl": Path("/trl/python"), "agilerl": Path("/agilerl/python")}


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [
        ({}, {"several": "there is one GPU; it needs 2 or more"}),
        ({"gpus": [H100, H100]}, {}),
        (
            {"gpus": [{"name": "L4", "memory_gib": 22.0}], "versions": {"torch": "2", "triton": "3"}, "baselines": {}},
            {
                "7b-bf16": "the GPU has 22.0 GiB; this needs 40",
                "0.5b-nf4": "bitsandbytes is not installed (pip install -e '.[quant]')",
                "7b-nf4": "bitsandbytes is not installed (pip install -e '.[quant]')",
                "trl": "no environment with TRL 1.12; scripts/bench.py --baseline trl --make_baseline makes one",
                "agilerl": "no environment with AgileRL 2.58; scripts/bench.py --baseline agilerl --make_baseline"
                " makes one",
                "several": "there is one GPU; it needs 2 or more",
            },
        ),
    ],
)
def test_a_part_is_skipped_with_its_reason_where_the_machine_cannot_run_it(parts, changes, skipped):
    facts = {"gpus": [H100], "versions": VERSIONS, "cuda": "13.0", "baselines": BOTH, "is_dry": False}
    machine = parts.Machine(**facts | changes)
    assert {part.name: part.skip for part in parts.all_parts(machine) if part.skip} == skipped
    assert [part.name for part in parts.all_parts(machine) if part.sees_all_gpus] == ["several"]


def test_a_broken_baseline_that_nobody_gave_is_left_out_and_not_run_for_other_parts(
    parts, tmp_path, monkeypatch, capsys
):
    import check_gpu
    from bench.processes import cached_baseline

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = cached_baseline()
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert not check_gpu.probe(check_gpu.parse(["--dry_run", "--parts", "kernels"])).baselines
    assert capsys.readouterr().out == ""
    assert check_gpu.baseline_of(check_gpu.parse([]), "trl") is None
    assert f"trl: {python} has no TRL 1.12 with PPO (no message)" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="has no TRL 1.12 with PPO"):
        check_gpu.baseline_of(check_gpu.parse(["--trl_python", str(python)]), "trl")


def run(parts, folder, *command, limit_s=120.0, **settings):
    return parts.run_part(parts.Part("a", "what", tuple(command), 120, **settings), limit_s, folder, True)


@pytest.mark.parametrize(
    ("command", "reason", "log"),
    [
        (("sh", "-c", "echo out; echo the cause >&2; exit 3"), "exit code 3", "out\nthe cause"),
        (("sh", "-c", "echo no number"), "it ended without a result", "no number"),
        (("sh", "-c", "kill -9 $$"), "exit code -9", ""),
        (("/nowhere/python",), "exit code 1", "/nowhere/python does not run: No such file or directory"),
    ],
)
def test_a_part_that_fails_says_how_and_keeps_its_last_lines(parts, tmp_path, command, reason, log):
    found = run(parts, tmp_path, *command)
    assert (found["status"], found["reason"], found["log"]) == ("failed", reason, log)


@pytest.mark.parametrize(
    ("visible", "sees_all", "expected"),
    [(None, False, "0"), (None, True, ""), ("2,3", False, "2"), ("2,3", True, "2,3"), ("", False, "")],
)
def test_a_part_sees_one_gpu_unless_it_needs_several(parts, tmp_path, monkeypatch, visible, sees_all, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = run(parts, tmp_path, "sh", "-c", 'echo "[\\"$CUDA_VISIBLE_DEVICES\\"]"', sees_all_gpus=sees_all)
    assert found["result"] == [expected]


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_that_it_started(parts, tmp_path):
    found = run(parts, tmp_path, "sh", "-c", "sleep 600 & echo $!; wait", limit_s=3.0)
    assert (found["status"], found["reason"]) == ("timed out", "ended after 3 s")
    # A killed process needs a moment to end, and where nobody waits for orphans it stays as a zombie.
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(int(found["log"])).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)


def test_the_exit_code_is_0_only_if_something_passed_and_nothing_failed(report):
    def code(*statuses):
        return report.verdict({str(i): {"status": status} for i, status in enumerate(statuses)})

    assert code("passed", "skipped") == (0, "1 passed, 1 skipped")
    assert code("skipped") == (1, "1 skipped; nothing has been checked")
    for status in ("failed", "timed out", "not started"):
        assert code("passed", status) == (1, f"1 passed, 1 {status}; look at 1")


def test_speeds_are_tokens_over_seconds_and_an_update_counts_each_epoch(report):
    result = {
        "sampled_tokens": [90, 110],
        "tokens": [300, 500],
        "seconds": {"generate": 2.0, "score": 0.5, "update": 4.0, "total": 6.5},
        "roofline": {"generate": 0.1, "score": 0.2, "update": 0.3},
        "phase_peak_mb": {"generate": 1, "score": 2, "update": 3},
        "peak_mb": 3,
        "decode": {"seconds": 0.01, "operations": 300},
        "first_ratio": 1.0,
    }
    found = report.speeds(result, epochs=2)
    assert [found[phase]["tokens_per_s"] for phase in ("generate", "score", "update")] == [50, 800, 200]
    trl = {"seconds": {"generate": 3.0, "score": 1.0, "update": 16.0, "total": 20.0}, "peak_mb": 12}
    ran = {name: {"status": "passed", "result": r} for name, r in (("0.5b-bf16", result), ("trl", trl))}
    compared = report.measurements(ran)["others"]["trl"]
    assert compared["ratio"] == {"generate": 1.5, "score": 2.0, "update": 4.0, "total": 3.08}
    assert compared["memory_share"] == 0.25
    assert "trl" not in report.measurements({"trl": ran["trl"]})
