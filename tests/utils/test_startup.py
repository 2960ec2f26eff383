"""Imports without garbage collection, and what is loaded kept out of later collections."""

import gc

import pytest

from onetrunk.utils.startup import freeze_loaded, without_collection
from tests.processes import python


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_off_in_the_block_and_as_it_was_after_it(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), without_collection():
            assert not gc.isenabled()
            raise ImportError("a package that is missing")
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


class Watched:
    """An object in a cycle, which only a collection ends."""

    ended = 0

    def __init__(self):
        self.me = self

    def __del__(self):
        Watched.ended += 1


def test_a_collection_leaves_out_what_was_loaded_and_takes_what_came_later():
    gc.collect()
    Watched()
    freeze_loaded()
    try:
        Watched()
        gc.collect()
        assert Watched.ended == 1
    finally:
        gc.unfreeze()
    gc.collect()
    assert Watched.ended == 2
    freeze_loaded()  # As the tests began.


def test_a_process_that_keeps_triton_out_of_collections_exits_without_a_word():
    pytest.importorskip("triton")
    code = "import triton; from onetrunk.utils.startup import freeze_loaded; freeze_loaded(); freeze_loaded()"
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("", "")
