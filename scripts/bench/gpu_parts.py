"""The parts of `scripts/check_gpu.py`: what each runs on a GPU or in a dry run, and how its process is run and read.

Imports neither torch nor a trainer: every part is a process of its own, so one that fails or hangs ends alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.processes import AGILERL, BASELINES, HERE, OURS, ROOT, Baseline

PASSED, FAILED, TIMED_OUT, NOT_STARTED, SKIPPED = "passed", "failed", "timed out", "not started", "skipped"
THEOREMS = "tests/ops/kernel_theorems.py"
# The same theorems as a test of the suite, which starts a process of its own.
THEOREMS_TEST = "tests/ops/test_kernels.py::test_the_kernels_are_their_naive_twins_on_a_gpu"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
# Of a part that failed.
LOG_LINES = 40
# A part is not started with less time than this, and gets this long to end itself when it is stopped.
LEAST_S, ENDS_WITHIN_S = 10.0, 20.0
WORK = "--dtype bfloat16 --mixed --prompt 256 --completion 256 --rollout 64 --microbatch 16 --epochs 2".split()
TINY = "--dtype bfloat16 --mixed --prompt 8 --completion 8 --rollout 4 --microbatch 2 --epochs 2 --iterations 2"
TINY_TWINS = "--device cpu --hidden 16 --vocab 64 --tokens 4 --repeats 1"


@dataclass(frozen=True)
class Shape:
    """A model whose iteration is measured.

    Args:
        name: a key of workload.SHAPES.
        options: of the workload, besides WORK.
        own: of our process alone.
        needs_gib: memory of the GPU in bf16; in 4 bit half of it is enough.
        limit_s: most seconds in bf16; in 4 bit the base is also saved and quantised.
    """

    name: str
    options: tuple[str, ...]
    own: tuple[str, ...]
    needs_gib: float
    limit_s: float


# The reward of the smaller one is a model of its shape, as TRL's; that of the larger one is small, to save time.
SHAPES = (
    Shape("0.5b", ("--iterations", "2"), ("--adapter_layers", "top-6"), 12, 150),
    Shape("7b", ("--iterations", "2", "--small_reward"), ("--adapter_layers", "top-7"), 40, 160),
)
AGAINST_OTHERS = "0.5b"


@dataclass(frozen=True)
class Machine:
    """What the parts depend on: GPUs, packages, and the interpreters with another implementation by its kind."""

    gpus: list[dict[str, Any]]
    versions: dict[str, str]
    cuda: str | None
    baselines: dict[str, Path]
    is_dry: bool

    @property
    def memory_gib(self) -> float:
        return min((gpu["memory_gib"] for gpu in self.gpus), default=0.0)


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        name: short, unique; --parts takes it.
        what: one line for a table.
        command: with the interpreter; tests get the option that names their report.
        limit_s: most seconds.
        is_test: True where it is pytest, whose report is read; else its last line is JSON.
        environment: beyond QUIET.
        skip: why it cannot run on this machine; "" where it can.
        sees_all_gpus: False: only the first, since a trainer rejects several in one process.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    is_test: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    skip: str = ""
    sees_all_gpus: bool = False

    def shown(self) -> str:
        """Return the command as a reader can type it at the repository's root."""
        words = [Path(self.command[0]).name, *(word.replace(f"{ROOT}/", "") for word in self.command[1:])]
        variables = [f"{name}={value}" for name, value in self.environment.items() if name != "PYTHONPATH"]
        return " ".join(f"'{word}'" if " " in word else word for word in (*variables, *words))


def all_parts(machine: Machine) -> list[Part]:
    """Return the parts in the order in which they run: the most important first, should the time run out."""
    rows = [iteration(machine, shape, is_nf4) for is_nf4 in (False, True) for shape in SHAPES]
    others = [against(machine, baseline) for baseline in BASELINES.values()]
    return [tests(), theorems(machine), twins(machine), graph(machine), *rows, *others, several(machine)]


def tests_with_a_gpu() -> list[str]:
    """Return the files of the tests that need a GPU; to collect all others would take half a minute."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    # Those of several processes take their mark from tests/places.py.
    marked = [path for path, text in texts.items() if "pytest.mark.gpu" in text or "from tests.places import" in text]
    return [str(path.relative_to(ROOT)) for path in marked]


def pytest_command(*options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-rs", *options)


def theorems(machine: Machine) -> Part:
    """Return the part that compares the Triton kernels with their twins; in a dry run in Triton's interpreter."""
    return Part(
        "kernels",
        "the Triton kernels equal their torch twins",
        pytest_command(THEOREMS),
        150,
        is_test=True,
        environment={"TRITON_INTERPRET": "1" if machine.is_dry else "0"},
        skip=_missing(machine, "triton", "dev"),
    )


def tests() -> Part:
    """Return the part of the fast tests that need one GPU."""
    chosen = ("-m", "gpu and not multi_process and not slow", "--deselect", THEOREMS_TEST)
    return Part("tests", "tests marked gpu", pytest_command(*chosen, *tests_with_a_gpu()), 150, is_test=True)


def several(machine: Machine) -> Part:
    """Return the part of the tests that need several GPUs."""
    command = pytest_command("-m", "gpu and multi_process", "--timeout", "1200", *tests_with_a_gpu())
    skip = "" if machine.is_dry or len(machine.gpus) > 1 else "there is one GPU; it needs 2 or more"
    what = "several GPUs: DDP, FSDP2, tensor parallelism, pipelined sampling and training through the shipped configs"
    return Part("several", what, command, 1200, is_test=True, skip=skip, sees_all_gpus=True)


def twins(machine: Machine) -> Part:
    """Return the part that measures the kernels at the widths of the two shapes."""
    options = TINY_TWINS.split() if machine.is_dry else ["--device", "cuda"]
    return Part(
        "twins",
        "seconds and memory of the kernels and of their twins",
        (sys.executable, str(HERE / "gpu_twins.py"), *options),
        60,
        environment={"PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1" if machine.is_dry else "0"},
        skip=_missing(machine, "triton", "dev"),
    )


def workload_options(machine: Machine, shape: Shape) -> tuple[str, ...]:
    """Return the options that ours and TRL's process share."""
    if machine.is_dry:
        kept = [option for option in shape.options if option == "--small_reward"]
        return ("--shape", "tiny", *TINY.split(), *kept)
    return ("--shape", shape.name, "--device", "cuda", *WORK, *shape.options)


def iteration(machine: Machine, shape: Shape, is_nf4: bool) -> Part:
    """Return the part that measures a PPO iteration of a model with random weights, and its decoded tokens."""
    own = ("--adapter_layers", "top-1", "--profile_tokens", "4") if machine.is_dry else shape.own
    own += () if machine.is_dry else ("--profile_tokens", "32")
    needed = shape.needs_gib / 2 if is_nf4 else shape.needs_gib
    skip = _missing(machine, "bitsandbytes", "quant") if is_nf4 else ""
    if not machine.is_dry and machine.memory_gib < needed:
        skip = f"the GPU has {machine.memory_gib} GiB; this needs {needed:.0f}"
    precision = "nf4" if is_nf4 else "bf16"
    own += ("--nf4",) if is_nf4 else ("--device", "sim:0") if machine.is_dry else ()
    # Bitsandbytes has kernels for CPUs, and none for the simulated GPU.
    runner = ("-m", "tests.device.simulated") if machine.is_dry and not is_nf4 else ()
    return Part(
        f"{shape.name}-{precision}",
        f"one PPO iteration, {shape.name}, {precision}, random weights, top quarter adapted",
        (sys.executable, *runner, str(OURS), *workload_options(machine, shape), *own),
        shape.limit_s + (40 if is_nf4 else 0),
        environment={"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
        skip=skip,
    )


def graph(machine: Machine) -> Part:
    """Return the part that decodes with a CUDA graph; in a dry run with the same step without one."""
    tiny = ("--shape", "tiny", "--rows", "2", "--tokens", "12")
    options = tiny if machine.is_dry else ("--shape", AGAINST_OTHERS, "--device", "cuda", "--dtype", "bfloat16")
    return Part(
        "graph",
        "a decoded token as a CUDA graph, against the sampler's",
        (sys.executable, str(HERE / "decode_graph.py"), *options),
        90,
        environment={"PYTHONPATH": str(ROOT / "src")},
    )


def against(machine: Machine, baseline: Baseline) -> Part:
    """Return the part that measures another implementation's iteration on the same work."""
    shape = next(shape for shape in SHAPES if shape.name == AGAINST_OTHERS)
    makes = f"scripts/bench.py --baseline {baseline.kind} --make_baseline makes one"
    own = shape.own if baseline is AGILERL and not machine.is_dry else ()
    return Part(
        baseline.kind,
        f"the iteration of {AGAINST_OTHERS}-bf16 by {baseline.name}",
        (str(machine.baselines.get(baseline.kind)), str(baseline.script), *workload_options(machine, shape), *own),
        120,
        skip="" if baseline.kind in machine.baselines else f"no environment with {baseline.name}; {makes}",
    )


def _missing(machine: Machine, package: str, extra: str) -> str:
    return "" if package in machine.versions else f"{package} is not installed (pip install -e '.[{extra}]')"


def run_part(part: Part, limit_s: float, folder: Path, needs_passed: bool) -> dict[str, Any]:
    """Run a part, and return its status, seconds, and result or reason.

    Args:
        part: not one to skip.
        limit_s: most seconds; the process and its children are ended then.
        folder: for its output.
        needs_passed: whether tests of which none ran count as a failure.
    """
    report, logs = folder / f"{part.name}.xml", [folder / f"{part.name}.{stream}" for stream in ("out", "err")]
    command = [*part.command, *(["--junitxml", str(report)] if part.is_test else [])]
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "ONETRUNK_KERNELS")}
    environment = {**inherited, **QUIET, **part.environment}
    if not part.sees_all_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    start = time.monotonic()
    with logs[0].open("w") as out, logs[1].open("w") as err:
        code = wait(command, environment, out, err, limit_s)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    read = read_tests if part.is_test else read_json
    result = read(report if part.is_test else logs[0])
    if code is None:
        found |= {"status": TIMED_OUT, "reason": f"ended after {limit_s:.0f} s"}
    elif code:
        found |= {"status": FAILED, "reason": f"exit code {code}"}
    elif result is None:
        found |= {"status": FAILED, "reason": "it ended without a result"}
    elif part.is_test and needs_passed and not result["passed"]:
        found |= {"status": FAILED, "reason": "no test ran"}
    else:
        found["status"] = PASSED
    if found["status"] != PASSED:
        found["log"] = last_lines(logs)
    return found | ({"result": result} if result else {})


def wait(command: list[str], environment: dict[str, str], out: Any, err: Any, limit_s: float) -> int | None:
    """Run a command to its end and return its exit code; None if it was ended after `limit_s`.

    Nothing that it started is left: it is asked first, since launchers end their processes when they are asked.
    """
    try:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err, start_new_session=True)
    except OSError as error:
        err.write(f"{command[0]} does not run: {error.strerror}")
        return 1
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            if process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDS_WITHIN_S)


def read_tests(report: Path) -> dict[str, Any] | None:
    """Return how many tests passed, failed and were skipped, and the names of those that failed."""
    if not report.exists():
        return None
    suite = ElementTree.parse(report).getroot().find("testsuite")
    cases = list(suite.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = sorted(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in failed)
    passed = len(cases) - len(failed) - len(skipped)
    return {"passed": passed, "failed": len(failed), "skipped": len(skipped), "failures": names}


def read_json(log: Path) -> dict[str, Any] | None:
    """Return the JSON of the last line, or None if there is none."""
    lines = log.read_text(errors="replace").strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return None


def last_lines(logs: list[Path]) -> str:
    """Return the end of what a part printed, without paths of this machine."""
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-LOG_LINES:]).replace(f"{ROOT}/", "").replace(str(Path.home()), "~")


def run_parts(
    parts: list[Part], deadline_s: float, folder: Path, is_dry: bool, say: Callable[[str], None]
) -> Iterator[dict[str, dict[str, Any]]]:
    """Run the parts one after another, and yield all that was found so far; none runs longer than the time left.

    A dry run has no other limit, and its tests may all be skipped.
    """
    start, found = time.monotonic(), {}
    for part in parts:
        left = deadline_s - (time.monotonic() - start)
        about = {"what": part.what, "command": part.shown()}
        if part.skip:
            outcome: dict[str, Any] = {"status": SKIPPED, "reason": part.skip}
        elif left < LEAST_S:
            outcome = {"status": NOT_STARTED, "reason": "the time was used up; raise --minutes or choose --parts"}
        else:
            say(f"{part.name}: {part.shown()}")
            outcome = run_part(part, left if is_dry else min(part.limit_s, left), folder, not is_dry)
        found[part.name] = about | outcome
        took = f" in {outcome['seconds']} s" if "seconds" in outcome else ""
        reason = f": {outcome['reason']}" if "reason" in outcome else ""
        say(f"{part.name}: {outcome['status']}{took}{reason}")
        if "log" in outcome:
            say(outcome["log"])
        yield found
