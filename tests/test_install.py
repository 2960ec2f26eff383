"""The wheel and the sdist, built and installed into a fresh environment, and used from an empty folder."""

import os
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.environments import lend_packages
from tests.processes import ROOT, finished

# With them the chain of the tiny recipe takes seconds.
SIZES = """
sft: {max_steps: 20, eval_size: 10}
prefs: {dataset_split: 'train[:24]'}
reward: {max_steps: 5}
distill: {max_steps: 5}
ppo: {num_rollouts: 1, rollout_batch_size: 8, num_ppo_epochs: 1, max_steps: 2, eval_strategy: 'no',
      eval_dataset_split: 'train[:8]', monitor_rows: 8, save_strategy: 'no', max_completion_length: 12}
eval: {dataset_split: 'train[:8]', max_completion_length: 12}
"""


def run(*words, hides=("PYTHONPATH", "VIRTUAL_ENV"), **kwargs):
    """Return what a command printed; its environment has no trace of this checkout."""
    env = {name: value for name, value in os.environ.items() if name not in hides}
    return finished(words, env=env, **kwargs).stdout


def make_environment(folder, *options):
    """Make an environment that borrows the packages of the tests, and let pip install into it."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    lend_packages(python)
    fixed = ("--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check", "-q")
    run(sys.executable, "-m", "pip", "--python", python, "install", *fixed, *options)


def build(source, target, kind):
    """Return the one file that hatchling builds from a folder."""
    code = "import hatchling.cli, sys; sys.argv[0] = 'hatchling'; sys.exit(hatchling.cli.hatchling())"
    run(sys.executable, "-c", code, "build", "-t", kind, "-d", target, cwd=source, hides=())
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return (wheel, sdist); the wheel is built from the sdist, as installers do."""
    pytest.importorskip("hatchling", reason="hatchling is not installed; `make setup` installs it")
    there = tmp_path_factory.mktemp("built")
    sdist = build(ROOT, there / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(there, filter="data")
    return build(there / sdist.name.removesuffix(".tar.gz"), there / "wheel", "wheel"), sdist


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory):
    """Return the `bin` of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    make_environment(folder, built[0])
    return folder / "bin"


@pytest.mark.slow
def test_the_wheel_carries_all_that_a_run_needs(built):
    names = zipfile.ZipFile(built[0]).namelist()
    shipped = [p for f in ("recipes", "accelerate_configs") for p in (ROOT / f).rglob("*") if p.is_file()]
    expected = {p.relative_to(ROOT).as_posix() for p in shipped if "__pycache__" not in p.parts}
    assert {n.removeprefix("onetrunk/shipped/") for n in names if "/shipped/" in n} == expected
    assert "onetrunk/py.typed" in names and "onetrunk/models/README.md" in names
    assert not [n for n in names if n.startswith(("tests/", "scripts/", "src/"))]


@pytest.mark.slow
def test_the_page_of_the_wheel_has_no_relative_link(built):
    archive = zipfile.ZipFile(built[0])
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    page = archive.read(name).decode()
    assert '<img alt="One frozen trunk' in page and "# onetrunk" in page
    links = re.findall(r'\]\(([^)\s]+)\)|src(?:set)?="([^"]+)"', page)
    assert len(links) > 30 and [one for one in map("".join, links) if not one.startswith(("https://", "#"))] == []


@pytest.mark.slow
def test_the_sdist_has_the_tests_and_the_scripts(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "scripts/ppo.py", "tests/test_install.py", "recipes/tiny/ppo.yaml"} <= names


# --- the README, word for word ---------------------------------------------------------------------------------------


def commands() -> list[str]:
    """Return the commands that stand on lines of their own in the README; they need no hub."""
    return re.findall(r"^(?:make|source|onetrunk) .*", (ROOT / "README.md").read_text(), re.MULTILINE)


def make_small(recipes: Path) -> None:
    for name, sizes in yaml.safe_load(SIZES).items():
        path = recipes / "tiny" / f"{name}.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | sizes))


def check_results(folder: Path, printed: str) -> None:
    assert "nothing is left to train" in printed
    # Every stage speaks in lines, and no frame of a bar is in what is no terminal.
    assert re.search(r"^evaluation at step 20: loss [\d.]+, token accuracy [\d.]+$", printed, re.MULTILINE)
    assert "rollout 1/1: score" in printed and "%|" not in printed and "\r" not in printed
    assert (folder / "runs/tiny/ppo/adapter_model.safetensors").is_file()
    assert (folder / "runs/tiny/pipeline/_report/report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_commands_of_the_readme_run_from_the_wheel_in_an_empty_folder(fresh, tmp_path):
    where = run(fresh / "python", "-c", "import onetrunk; print(onetrunk.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(fresh.parent)
    assert "tiny" in run(fresh / "onetrunk", "recipes", "list", cwd=tmp_path)
    (shipped,) = fresh.parent.glob("lib/*/site-packages/onetrunk/shipped/recipes")
    make_small(shipped)
    lines = [line for line in commands() if line.startswith("onetrunk ")]
    assert len(lines) >= 4
    env = f"exec 2>&1; export PATH={fresh}:$PATH HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1"
    check_results(tmp_path, run("bash", "-ec", "\n".join([env, *lines]), cwd=tmp_path))
    # Everything was read from the wheel: the working folder has what was written.
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_commands_of_the_readme_run_from_a_clone(tmp_path):
    clone = tmp_path / "clone"
    hidden = shutil.ignore_patterns(".git", ".venv*", "venv", "runs", "*cache*", "site", "build", "dist")
    shutil.copytree(ROOT, clone, ignore=lambda folder, names: hidden(folder, names) if Path(folder) == ROOT else [])
    make_small(clone / "recipes")
    # What `make setup` makes, with the packages that the tests have.
    make_environment(clone / ".venv", "--no-build-isolation", "-e", clone)
    (clone / ".venv/.installed-torch-2.13.0").touch()
    lines = [line.replace("make demo", "make demo || true") for line in commands()]
    assert len(lines) >= 7
    # The tests are these. A demo of these sizes runs to its end and says that it has learnt nothing.
    lines = ["exec 2>&1; export OMP_NUM_THREADS=1", *(line for line in lines if not line.startswith("make test"))]
    printed = run("bash", "-ec", "\n".join(lines), cwd=clone)
    assert "what the chain reached" in printed
    check_results(clone, printed)
