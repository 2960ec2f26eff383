"""Tests of `onetrunk.utils.quiet`: importing onetrunk says nothing, and what others log still passes."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import onetrunk.utils.quiet

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_importing_the_trainer_says_nothing():
    command = [sys.executable, "-W", "error::FutureWarning", "-c", "from onetrunk import PPOTrainer"]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, timeout=1500)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_message_is_dropped_and_the_next_passes(caplog):
    onetrunk.utils.quiet.silence_imports()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    caplog.set_level(logging.WARNING, logger.name)  # A stage that ran before in this process has raised it.
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "no kernels")
    logger.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
