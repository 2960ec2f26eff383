"""The change over a window by hand, and what it must not depend on."""

import math

import pytest

from onetrunk.judges.hacking_monitor import paired_change


def test_the_change_is_the_rise_of_a_line_by_hand():
    # Row 1: 0, 1, 2 rises by 2; row 2: 5, 5, 8 has slope (8 - 5) / 2 = 1.5 a step, so 3 in all.
    mean, error = paired_change([[0.0, 5.0], [1.0, 5.0], [2.0, 8.0]])
    assert mean == pytest.approx(2.5)
    # Standard deviation of (2, 3) is .7071; over the root of 2 it is .5.
    assert error == pytest.approx(0.5)


def test_what_is_peculiar_to_a_row_is_no_noise():
    offsets = [0.0, 100.0, -50.0, 7.0]
    mean, error = paired_change([[o + 0.1 * t for o in offsets] for t in range(4)])
    assert mean == pytest.approx(0.3) and error < 1e-9


def test_rows_with_a_gap_are_left_out_and_one_row_shows_nothing():
    whole = paired_change([[0.0, 1.0], [1.0, 3.0]])
    assert paired_change([[0.0, None, 1.0], [1.0, 5.0, 3.0]]) == whole
    assert all(math.isnan(x) for x in paired_change([[0.0, None], [1.0, 2.0]]))
