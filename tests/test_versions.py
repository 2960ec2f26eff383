"""The range of versions in pyproject.toml: what resolves, and what passes with the lowest versions."""

import inspect
import re
import tomllib
from importlib import metadata
from importlib.util import find_spec

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from onetrunk.parallel.tensor import divide_frozen
from onetrunk.utils import versions
from tests.environments import ROOT, lowest_python, requirements, resolved
from tests.processes import environment, finished

# Tests of every room that uses members of transformers, TRL, PEFT or accelerate; `make test-next` runs them too.
THEOREMS = "@tests/for_every_version.txt"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_core_theorems_hold_with_the_lowest_versions():
    words = [lowest_python(), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", THEOREMS]
    done = finished(words, code=None, cwd=ROOT, env=environment())
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_onetrunk_and_vllm_can_be_installed_in_one_environment():
    versions = dict(line.split("==") for line in resolved(lowest_python(), requirements("vllm")))
    assert versions.keys() >= {"vllm", "transformers", "trl", "peft"}


def required(package: str) -> Requirement:
    """Return what pyproject.toml requires of a package, in the dependencies or in the extra of its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"].get(package, [])]
    [requirement] = [Requirement(line) for line in lines if Requirement(line).name == package]
    return requirement


@pytest.mark.parametrize("package", ["transformers", "trl", "peft", "accelerate", "vllm"])
def test_a_library_whose_internals_we_use_has_bounds_and_the_installed_version_is_within(package):
    bounds = required(package).specifier
    assert {bound.operator for bound in bounds} == {">=", "<"}, f"{package} needs a lower and an upper bound"
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    installed = metadata.version(package)
    assert installed in bounds, f"{package} {installed}: tests/test_foreign_internals.py says what may have changed"


def test_code_for_older_versions_goes_when_they_are_no_longer_supported():
    [lowest] = [Version(bound.version) for bound in required("transformers").specifier if bound.operator == ">="]
    goes_at = re.findall(r'is_older\("([\d.]+)"\)', inspect.getsource(versions))
    assert len(goes_at) == 6
    assert all(lowest < Version(version) for version in goes_at), "delete that code from utils/versions.py"


def test_tensor_parallelism_says_which_transformers_it_needs(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _package: "5.19.0")
    with pytest.raises(ValueError, match="needs transformers 5.23 or newer, and 5.19.0 is installed"):
        divide_frozen(None, None, None)
