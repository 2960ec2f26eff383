"""The range of versions in pyproject.toml: what resolves, and what passes with the lowest versions."""

import pytest

from onetrunk.parallel.tensor import divide_frozen
from tests.environments import ROOT, lowest_python, requirements, resolved
from tests.processes import environment, finished

# Of every room that uses members of transformers, TRL, PEFT or accelerate.
THEOREMS = """
tests/checkpoints/test_private_members.py tests/checkpoints/test_exact_resume.py tests/models/test_trunk.py
tests/models/test_checkpointing.py tests/models/test_adapters.py tests/rollouts/test_local.py
tests/rollouts/test_turns.py tests/ppo/test_steps.py tests/ppo/test_first_pass.py tests/stages/test_stages.py
tests/stages/test_options.py::test_both_names_of_checkpointing_mean_the_same_in_every_stage
tests/stages/test_options.py::test_two_names_of_one_setting_are_not_both_taken tests/stages/test_reward_stage.py
""".split()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_core_theorems_hold_with_the_lowest_versions():
    words = [lowest_python(), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", *THEOREMS]
    done = finished(words, code=None, cwd=ROOT, env=environment())
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_onetrunk_and_vllm_can_be_installed_in_one_environment():
    versions = dict(line.split("==") for line in resolved(lowest_python(), requirements("vllm")))
    assert versions.keys() >= {"vllm", "transformers", "trl", "peft"}


def test_tensor_parallelism_says_which_transformers_it_needs(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.19.0")
    with pytest.raises(ValueError, match="needs transformers 5.23 or newer, and 5.19.0 is installed"):
        divide_frozen(None, None, None)
