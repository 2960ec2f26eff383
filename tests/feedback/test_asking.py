"""Two overlapping stages: everything once and in order, a bounded distance apart, and errors on either side."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.feedback.asking import StopFlag, chunked, overlapped


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20), st.integers(1, 5), st.integers(1, 3))
def test_every_item_is_consumed_once_and_in_order(count, size, max_waiting):
    seen = []
    overlapped(([10 * x for x in c] for c in chunked(range(count), size)), seen.extend, max_waiting=max_waiting)
    assert seen == [10 * x for x in range(count)]


def test_a_stream_is_read_no_further_than_the_consumer_allows():
    read, gate = [], threading.Event()

    def stream():
        for i in range(50):
            read.append(i)
            yield i

    def consume(product):
        gate.wait(10)

    most = []
    threading.Timer(0.3, lambda: (most.append(len(read)), gate.set())).start()
    overlapped(stream(), consume, max_waiting=3)
    # One in the consumer, three waiting, one in the producer's hands
    assert most[0] <= 5 and len(read) == 50


def test_an_error_of_the_consumer_ends_the_maker_and_is_the_callers():
    made = []

    def consume(product):
        if product == 2:
            raise ValueError("bad label")

    with pytest.raises(ValueError, match="bad label"):
        overlapped((made.append(x) or x for x in range(10**6)), consume)
    assert len(made) < 10


def test_an_interrupted_consumer_stops_a_maker_that_looks_at_the_flag():
    stop, ended = StopFlag(), threading.Event()

    def products():
        yield 0
        try:
            while True:
                stop.check()
                time.sleep(0.005)
        finally:
            ended.set()

    def consume(product):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        overlapped(products(), consume, stop=stop)
    assert ended.wait(2)
