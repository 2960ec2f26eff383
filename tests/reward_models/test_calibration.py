"""Metrics of preferences, by hand; the rank correlation against numbers of another implementation."""

import math

import pytest
import torch
from torch import tensor

from onetrunk.reward_models import metrics

LOGIT_08 = math.log(4)  # sigmoid of it is .8


def test_accuracy_follows_the_label_leaves_undecided_pairs_out_and_counts_a_tie_half():
    leads = tensor([2.0, -1.0, -1.0, 0.0, 5.0])
    labels = tensor([0.9, 0.9, 0.2, 1.0, 0.5])
    # right, wrong, right, half; the last one has no preference
    assert metrics.accuracy(leads, labels) == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert math.isnan(metrics.accuracy(tensor([1.0]), tensor([0.5])))


def test_agreement_is_the_share_of_equal_orders_where_the_other_scorer_has_one():
    assert metrics.agreement(tensor([1.0, -2.0, 3.0, 1.0]), tensor([0.1, -0.1, -5.0, 0.0])) == pytest.approx(2 / 3)


def test_the_loss_is_the_cross_entropy_of_the_labels():
    leads, labels = tensor([LOGIT_08, LOGIT_08]), tensor([1.0, 0.25])
    expected = (-math.log(0.8) - (0.25 * math.log(0.8) + 0.75 * math.log(0.2))) / 2
    assert metrics.preference_loss(leads, labels) == pytest.approx(expected)
    assert metrics.preference_loss(tensor([0.0]), tensor([0.3])) == pytest.approx(math.log(2))


def test_reliability_by_hand():
    # Confidence .8 four times, right three times; once sure of the second completion and right; once undecided.
    # A tie prefers neither, so it is calibrated whichever side the label names.
    leads = tensor([LOGIT_08, LOGIT_08, LOGIT_08, -LOGIT_08, -8.0, 0.0])
    labels = tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    bins = metrics.reliability(leads, labels, num_bins=5)  # .5 .6 .7 .8 .9 1
    assert [b.count for b in bins] == [1, 0, 0, 4, 1]
    sure = 1 / (1 + math.exp(-8))
    assert bins[3].predicted == pytest.approx(0.8) and bins[3].observed == pytest.approx(3 / 4)
    assert bins[4].predicted == pytest.approx(sure) and bins[4].observed == 1
    assert math.isnan(bins[1].predicted)
    error = (1 * abs(0.5 - 0.5) + 4 * abs(0.8 - 0.75) + 1 * abs(sure - 1)) / 6
    assert metrics.expected_calibration_error(bins) == pytest.approx(error)


def test_soft_labels_equal_to_the_predictions_are_perfectly_calibrated_in_either_order():
    leads = torch.linspace(-4, 4, 101)
    labels = torch.sigmoid(leads.double())
    assert metrics.expected_calibration_error(metrics.reliability(leads, labels)) == pytest.approx(0, abs=1e-7)
    shuffled = torch.where(torch.arange(101) % 2 == 0, leads, -leads)
    turned = torch.where(torch.arange(101) % 2 == 0, labels, 1 - labels)
    assert metrics.reliability(shuffled, turned)[9] == metrics.reliability(leads, labels)[9]
    assert math.isnan(metrics.expected_calibration_error(metrics.reliability(leads[:0], labels[:0])))


def test_shares_by_margin_hold_equal_numbers_the_closest_first():
    leads, labels = tensor([3.0, -0.1, 0.2, -2.0]), tensor([1.0, 1.0, 0.0, 0.0])
    close, far = metrics.by_margin(leads, labels, num_bins=2)
    assert (close.count, close.observed, far.count, far.observed) == (2, 0, 2, 1)
    assert (close.low, close.high, far.low, far.high) == pytest.approx((0.1, 0.2, 2.0, 3.0))
    assert len(metrics.by_margin(leads[:1], labels[:1])) == 1


def test_the_interval_counts_prompts_and_not_pairs():
    leads, labels = torch.ones(400), (torch.arange(400) % 2 == 0).double()
    low, high = metrics.accuracy_interval(leads, labels, list(range(400)))
    # A share of 400 fair coins: .5 +- 1.96 * sqrt(.25 / 400) = .451 .. .549
    assert low == pytest.approx(0.451, abs=0.01) and high == pytest.approx(0.549, abs=0.01)
    # The same pairs as 4 prompts that are all right or all wrong: four coins, not 400.
    few = metrics.accuracy_interval(leads, (torch.arange(400) < 200).double(), [i // 100 for i in range(400)])
    assert few == (0.0, 1.0)
    # Five of five right: Clopper and Pearson's lower bound is .025 ** (1 / 5). One prompt says nothing of others.
    right = metrics.accuracy_interval(leads[:5], torch.ones(5), list(range(5)))
    assert right == (pytest.approx(0.025 ** (1 / 5)), 1.0)
    assert all(math.isnan(x) for x in metrics.accuracy_interval(leads[:4], tensor([1.0, 1.0, 1.0, 0.0]), ["a"] * 4))
    assert all(math.isnan(x) for x in metrics.accuracy_interval(leads[:1], tensor([0.5]), ["a"]))


def test_ranks_of_equal_entries_are_shared():
    assert metrics.ranks(tensor([10.0, 30.0, 10.0, 20.0])).tolist() == [1.5, 4, 1.5, 3]


def test_spearman_gives_the_numbers_of_scipy():
    # scipy.stats.spearmanr([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]), the example of its documentation: 0.82078...
    one, other = tensor([1.0, 2, 3, 4, 5]), tensor([5.0, 6, 7, 8, 7])
    assert metrics.spearman(one, other) == pytest.approx(0.8207826816681233, abs=1e-12)
    assert metrics.spearman(one, one.exp()) == pytest.approx(1) and metrics.spearman(one, -one) == pytest.approx(-1)
    assert math.isnan(metrics.spearman(one, torch.ones(5))) and math.isnan(metrics.pearson(one[:1], other[:1]))
