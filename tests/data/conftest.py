"""A cache of `datasets` for each test, and no progress bars."""

import pytest
from datasets import disable_progress_bars

disable_progress_bars()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
