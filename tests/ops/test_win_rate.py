"""Win rates by hand, against another implementation's numbers, and by what must hold of any of them."""

import json
import math
from pathlib import Path

import pytest
import torch

from onetrunk.ops.win_rate import fit_logistic, pair_outcomes, win_rate

# Made for the comparison below: labels, and how much longer the first completion is.
LABELS = torch.tensor([0.9, 0.2, 0.7, 1.0, 0.4, 0.55, 0.0, 0.8], dtype=torch.float64)
DIFFERENCES = torch.tensor([30.0, -12.0, 5.0, 48.0, -20.0, 7.0, -35.0, 0.0], dtype=torch.float64)


def test_outcomes_by_hand():
    labels = torch.tensor([0.9, 0.5, 0.1, 0.52])
    assert pair_outcomes(labels).tolist() == [1.0, 0.5, 0.0, 1.0]
    assert pair_outcomes(labels, tie_margin=0.05).tolist() == [1.0, 0.5, 0.0, 0.5]
    # A judge that names the first completion in both orders has not decided, however sure it was.
    assert pair_outcomes(labels, torch.tensor([False, True, True, True])).tolist() == [0.5, 0.5, 0.0, 1.0]


def test_win_rates_by_hand():
    labels = torch.tensor([0.9, 0.5, 0.1, 0.7])
    figures = win_rate(labels, ["a", "b", "c", "d"], torch.zeros(4), num_resamples=50)
    assert (figures.wins, figures.ties, figures.losses, figures.pairs, figures.prompts) == (2, 1, 1, 4, 4)
    assert figures.discrete_win_rate.value == (2 + 1 / 2) / 4
    assert figures.win_rate.value == pytest.approx((0.9 + 0.5 + 0.1 + 0.7) / 4)
    # Of equal length already: nothing to control for, but for the ridge.
    assert figures.length_controlled_win_rate.value == pytest.approx(0.55, abs=1e-4)
    assert not figures.is_extrapolated


def test_the_length_fit_is_that_of_another_implementation():
    # statsmodels 0.14 GLM, Binomial family, tol 1e-14, on [1, tanh(d / std(d, ddof=1))]; then with weights.
    scale = 26.67496150753683
    design = torch.stack([torch.ones(8, dtype=torch.float64), torch.tanh(DIFFERENCES / scale)], dim=1)
    weights = torch.tensor([[1.0] * 8, [1.0, 2.0, 0.0, 1.0, 3.0, 1.0, 1.0, 2.0]])
    expected = torch.tensor([[0.3615666, 2.72460078], [0.57274185, 2.52093332]], dtype=torch.float64)
    found = fit_logistic(design, LABELS, weights, ridge=1e-13)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)  # printed with eight digits
    figures = win_rate(LABELS, range(8), DIFFERENCES, num_resamples=10)
    # The ridge moves it by less than anyone could measure on eight pairs.
    assert figures.length_controlled_win_rate.value == pytest.approx(0.5894196096439593, abs=3e-4)


def test_each_figure_is_that_of_the_leaderboard_of_alpacaeval():
    recorded = json.loads((Path(__file__).parent / "alpaca_eval_pairs.json").read_text())
    theirs, pairs = recorded["leaderboard"], torch.tensor(recorded["pairs"], dtype=torch.float64)
    ours = win_rate(pairs[:, 0], range(len(pairs)), pairs[:, 1], num_resamples=200)
    assert 100 * ours.win_rate.value == pytest.approx(theirs["win_rate"], abs=1e-6)
    assert 100 * ours.standard_error == pytest.approx(theirs["standard_error"], abs=1e-6)
    assert 100 * ours.discrete_win_rate.value == pytest.approx(theirs["discrete_win_rate"], abs=1e-6)
    counts = ours.wins, ours.losses, ours.ties, ours.pairs
    assert counts == tuple(theirs[name] for name in ("n_wins", "n_wins_base", "n_draws", "n_total"))
    level = 100 * ours.length_controlled_win_rate.value
    # Here both sides are the longer one about as often, and what is theirs alone (the difficulty of their prompts, the
    # rewritings of their baseline) hardly counts: 53.999. A fit of wins and losses would say 56.3.
    assert not ours.is_extrapolated and level == pytest.approx(theirs["length_controlled_winrate"], abs=0.1)
    # The same regression without these two by scikit-learn 1.9.1 LogisticRegression, each pair twice, weighted by the
    # label and the rest to one: without a penalty, and with AlpacaEval's (l1, liblinear, C of ten by five folds).
    assert level == pytest.approx(53.950138, abs=0.01) and level == pytest.approx(53.941086, abs=0.01)
    # An interval of 95% is about 3.92 standard errors wide.
    width = ours.win_rate.high - ours.win_rate.low
    assert width == pytest.approx(3.92 * ours.standard_error, rel=0.2)


def test_the_standard_error_counts_pairs_of_a_prompt_once():
    labels = torch.tensor([0.9, 0.5, 0.1, 0.7])
    once = win_rate(labels, range(4), torch.zeros(4), num_resamples=10)
    # Mean .55; deviations .35, -.05, -.45, .15 with squares that add up to .35: sqrt(.35 / 3) / sqrt(4).
    assert once.standard_error == pytest.approx(math.sqrt(0.35 / 3) / 2)
    twice = win_rate(labels.repeat(2), [0, 1, 2, 3] * 2, torch.zeros(8), num_resamples=10)
    assert twice.standard_error == pytest.approx(once.standard_error)
    assert math.isnan(win_rate(labels, [0] * 4, torch.zeros(4), num_resamples=10).standard_error)


def test_the_interval_covers_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        labels = torch.bernoulli(torch.full((80,), 0.7), generator=torch.Generator().manual_seed(seed))
        interval = win_rate(labels, range(80), torch.zeros(80), num_resamples=300, seed=seed).discrete_win_rate
        covered += interval.low <= 0.7 <= interval.high
    # 95% of 200 is 190 +- 3; a percentile interval of 80 coins covers a little less.
    assert 178 <= covered <= 200


def test_a_side_that_always_wins_has_no_certain_interval():
    figures = win_rate(torch.ones(40), range(40), torch.arange(40.0) - 10)
    # With 39 of 40 prompts won one could have seen 40: (.025) ** (1 / 40) = .912.
    for estimate in (figures.discrete_win_rate, figures.win_rate, figures.length_controlled_win_rate):
        assert estimate.low == pytest.approx(0.025 ** (1 / 40)) and estimate.high == 1.0
    assert figures.length_controlled_win_rate.value > 0.998
    lost = win_rate(torch.zeros(40), range(40), torch.arange(40.0) - 10).discrete_win_rate
    assert (lost.value, lost.low) == (0.0, 0.0) and lost.high == pytest.approx(1 - 0.025 ** (1 / 40))


def test_a_tie_among_wins_makes_an_interval_no_narrower():
    # No resample of three wins and a tie is below .625 in 97.5%; four wins say no more than (.025) ** (1 / 4) = .398.
    for labels, bounds in (([1.0, 1.0, 1.0, 0.5], (0.398, 1.0)), ([0.0, 0.5, 0.0, 0.0], (0.0, 0.602))):
        found = win_rate(torch.tensor(labels), range(4), torch.zeros(4)).discrete_win_rate
        assert (found.low, found.high) == pytest.approx(bounds, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0.5, 1.2])}, "labels must be probabilities from 0 to 1"),
        ({"labels": torch.tensor([0.5, math.nan])}, "leave pairs without a label out"),
    ],
)
def test_inputs_that_cannot_work_are_refused(change, message):
    given = {"labels": torch.tensor([0.5, 1.0]), "prompts": ["a", "b"], "length_differences": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        win_rate(**{**given, **change})
