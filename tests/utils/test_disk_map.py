"""Tests of `onetrunk.utils.disk_map`: a DiskMap is a dict, and a full disk is an OSError."""

import gc

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.utils.disk_map import DiskMap

KEYS = st.binary(max_size=3)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["set", "add"]), KEYS, st.binary(max_size=4))))
def test_it_is_a_dict_that_keeps_the_order_of_insertion(steps):
    expected = {}
    with DiskMap() as found:
        for kind, key, value in steps:
            if kind == "set":
                found[key] = expected[key] = value
            else:
                assert found.add(key) is (key not in expected)
                expected.setdefault(key, b"")
            assert found.get(key) == expected[key] and key in found
            assert len(found) == len(expected)
        assert list(found) == list(expected)
        assert found.get(b"none of them") is None and b"none of them" not in found


def test_its_memory_does_not_grow_with_its_entries():
    with DiskMap() as found:
        for number in range(20_000):
            found.add(number.to_bytes(32))
        gc.collect()
        before = psutil.Process().memory_info().rss
        for number in range(20_000, 120_000):
            found.add(number.to_bytes(32))
        # A dict would need 14 MiB.
        assert psutil.Process().memory_info().rss - before < 6 * 2**20
        assert len(found) == 120_000


def test_a_full_disk_is_an_error_of_the_system():
    with DiskMap() as found:
        pages = found._run("PRAGMA page_count").fetchone()[0]
        found._run(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(OSError, match="free room in TMPDIR"):
            for number in range(1000):
                found.add(number.to_bytes(32))
