"""The wheel and the sdist, built and installed into a fresh environment, and used from an empty folder."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The tiny chain in seconds: every stage and file of the recipe, few steps.
CHAIN = """
output_dir: runs/tiny/pipeline
stages:
  data:
    script: recipes/tiny/make_data.py
    outputs: [runs/tiny/base, runs/tiny/sft.jsonl, runs/tiny/prompts.jsonl, runs/tiny/held_out.jsonl]
  sft: {config: tiny/sft, options: {max_steps: 20, eval_size: 10}}
  prefs: {config: tiny/prefs, options: {dataset_split: 'train[:24]'}}
  reward: {config: tiny/reward, options: {max_steps: 5}}
  distill: {config: tiny/distill, options: {max_steps: 5}}
  ppo:
    config: tiny/ppo
    options: {num_rollouts: 1, rollout_batch_size: 8, num_ppo_epochs: 1, max_steps: 2, eval_strategy: 'no',
              eval_dataset_split: 'train[:8]', monitor_rows: 8, save_strategy: 'no', max_completion_length: 12}
  eval: {config: tiny/eval, options: {dataset_split: 'train[:8]', max_completion_length: 12}}
"""


def run(*words, hides=("PYTHONPATH", "VIRTUAL_ENV"), **kwargs):
    """Return what a command printed; its environment has no trace of this checkout."""
    env = {name: value for name, value in os.environ.items() if name not in hides}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, env=env, **kwargs)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


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
    """Return the `bin` of an environment with the wheel; it reads the other packages where the tests have them."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    options = ("--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check", "-q")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, built[0])
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
def test_the_sdist_has_the_tests_and_the_scripts(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "scripts/ppo.py", "tests/test_install.py", "recipes/tiny/ppo.yaml"} <= names


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_tiny_chain_runs_from_an_empty_folder(fresh, tmp_path):
    where = run(fresh / "python", "-c", "import onetrunk; print(onetrunk.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(fresh.parent)
    assert "tiny" in run(fresh / "onetrunk", "recipes", "list", cwd=tmp_path)
    (tmp_path / "chain.yaml").write_text(CHAIN)
    run(fresh / "onetrunk", "run", "chain.yaml", cwd=tmp_path)
    assert (tmp_path / "runs/tiny/ppo/adapter_model.safetensors").is_file()
    assert (tmp_path / "runs/tiny/eval/metrics.json").is_file()
    assert (tmp_path / "runs/tiny/eval/_report/report.html").is_file()
    # Everything was read from the wheel: the working folder has what was written, and the chain.
    assert {path.name for path in tmp_path.iterdir()} == {"chain.yaml", "runs"}
