"""The rates in use are those that published step times give, and the band covers a program left out of the fit."""

import statistics

import pytest

from onetrunk.plan.hardware import Rates
from onetrunk.plan.timing import BAND
from scripts.plan.measurements import fit_steps, left_out, measured_steps, non_negative_fit, share_within


def test_the_band_covers_nine_of_ten_steps_of_a_program_that_the_rates_were_not_fitted_to():
    assert len(left_out()) == 6 and sum(map(len, left_out().values())) == len(measured_steps()) == 129
    assert share_within(*BAND) >= 0.9
    # It is no wider than it has to be.
    assert share_within(BAND[0] * 1.15, BAND[1] / 1.15) < 0.9


def test_programs_on_transformers_and_peft_are_met_without_having_been_seen():
    for program in ("PEFT MetaMathQA", "Qwen finetune.py", "fms-hf-tuning", "LitGPT"):
        assert statistics.median(left_out()[program]) == pytest.approx(1, abs=0.1), program


def test_the_rates_in_use_are_those_of_all_measured_steps():
    fitted = fit_steps(measured_steps())
    for name in ("matmul", "unpack_bytes"):
        assert getattr(Rates(), name) == pytest.approx(getattr(fitted, name), rel=0.02), name
    # Launches of layers and of their adapters can hardly be told apart.
    assert Rates().layer_s + Rates().adapter_layer_s == pytest.approx(
        fitted.layer_s + fitted.adapter_layer_s, rel=0.03
    )


def test_a_fit_ignores_one_wrong_point_and_has_no_coefficient_below_zero():
    rows = [[1.0, float(n)] for n in range(1, 9)]
    targets = [2 + 3 * n for n in range(1, 9)]
    targets[4] = 500.0
    assert non_negative_fit(rows, targets, 1e-3) == pytest.approx([2, 3], rel=1e-2)
    assert non_negative_fit([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0], 1e-3)[1] == 0
