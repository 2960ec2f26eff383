"""Tests of `onetrunk.utils.disk_set`: a DiskSet is a set, and a full disk is an OSError."""

import gc

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.utils.disk_set import DiskSet


@settings(deadline=None)
@given(st.lists(st.binary(max_size=2)))
def test_it_is_a_set_that_says_what_is_new(keys):
    expected = set()
    with DiskSet() as found:
        for key in keys:
            assert found.add(key) is (key not in expected)
            expected.add(key)


def test_its_memory_does_not_grow_with_its_entries():
    with DiskSet() as found:
        for number in range(20_000):
            found.add(number.to_bytes(32))
        gc.collect()
        before = psutil.Process().memory_info().rss
        for number in range(20_000, 120_000):
            found.add(number.to_bytes(32))
        # A set would need 14 MiB.
        assert psutil.Process().memory_info().rss - before < 6 * 2**20


def test_a_full_disk_is_an_error_of_the_system():
    with DiskSet() as found:
        pages = found._database.execute("PRAGMA page_count").fetchone()[0]
        found._database.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(OSError, match="free room in TMPDIR"):
            for number in range(1000):
                found.add(number.to_bytes(32))
