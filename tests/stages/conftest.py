"""One folder of small material for the tests of stages that write elsewhere."""

import shutil

import pytest

from tests.stages.small_runs import make_material


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    (folder / "nowhere").mkdir()  # A path that is missing would be named first.
    shutil.copytree(folder / "base", folder / "unloadable")
    (folder / "unloadable" / "model.safetensors").write_bytes(b"these are no weights")
    return folder


@pytest.fixture
def own_material(empty_folder):
    """Work in a folder with material of its own, to change."""
    make_material(empty_folder)
    return empty_folder


@pytest.fixture
def in_folder(material, monkeypatch, tmp_path):
    monkeypatch.chdir(material)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return material
