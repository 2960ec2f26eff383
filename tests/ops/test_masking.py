import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from onetrunk.ops import masked_whiten
from onetrunk.ops.masking import length_mask, masked_mean, masked_moments, masked_sum, merge_moments
from tests.ops.test_losses import EXACT, many

ENTRIES = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40)


def everything(x):
    return torch.ones_like(x, dtype=torch.bool)


def test_length_mask_counts_the_first_entries_of_each_row():
    expected = [[True, True, False], [False, False, False], [True, True, True]]
    assert length_mask(torch.tensor([2, 0, 5]), 3).tolist() == expected


def test_masked_reductions_by_hand():
    x = torch.tensor([[1.0, 2.0, 99.0], [6.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    assert masked_sum(x, mask).item() == 9  # 1 + 2 + 6
    assert masked_sum(x, mask, dim=1).tolist() == [3, 6]
    assert masked_mean(x, mask).item() == 3  # 9 / 3
    assert masked_mean(x, mask, num_tokens=18).item() == 0.5  # 9 / 18
    assert [m.item() for m in masked_moments(x, mask)] == [3, 3, 14]  # (1-3)^2 + (2-3)^2 + (6-3)^2 = 14


def test_values_outside_the_mask_change_nothing_not_even_nan():
    x = torch.tensor([1.0, float("nan"), 3.0, float("inf")], requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    masked_mean(x, mask).backward()
    assert x.grad.tolist() == [0.5, 0, 0.5, 0]
    assert [m.item() for m in masked_moments(x, mask)] == [2, 2, 2]  # (1-2)^2 + (3-2)^2
    assert masked_whiten(x, mask)[[1, 3]].tolist() == [0, 0]


def test_an_empty_mask_gives_zeros():
    x, mask = torch.ones(2, 3), torch.zeros(2, 3).bool()
    assert masked_mean(x, mask).item() == 0
    assert [m.item() for m in masked_moments(x, mask)] == [0, 0, 0]
    assert masked_whiten(x, mask).eq(0).all()


def test_the_dtype_of_the_input_is_that_of_the_result_and_sums_run_in_float32():
    x = torch.full((1, 1000), 1.0, dtype=torch.bfloat16)
    # A bfloat16 running sum of ones stops at 256.
    assert masked_mean(x, everything(x)).item() == 1
    for function in (masked_sum, masked_mean, masked_whiten):
        assert function(x, everything(x)).dtype == torch.bfloat16
        assert function(x.double(), everything(x)).dtype == torch.float64


def test_equal_entries_whiten_to_exactly_zero():
    # In float32 3 * 1000.1 rounds, so that a mean in one pass is not 1000.1, and 1 / sqrt(eps) would blow up the rest.
    x = torch.full((3,), 1000.1)
    assert x.sum() / 3 != x[0]
    assert masked_whiten(x, everything(x)).eq(0).all()


def test_whitening_agrees_with_the_oracle(oracle):
    advantages = oracle.padded(oracle.expected["advantages"])
    expected = oracle.padded(oracle.expected["whitened_advantages_unbiased"])
    # Both sides are rounded to six digits; whitening divides by .98, so the rounding stays below 2e-6.
    assert_close(masked_whiten(advantages, oracle.mask), expected, rtol=0, atol=2e-6)


@many
@given(entries=ENTRIES, shift_mean=st.booleans())
def test_whitened_entries_have_variance_one_and_the_chosen_mean(entries, shift_mean):
    x = torch.tensor([*entries, 1000.0, -1000.0], dtype=torch.float64)
    mask = everything(x)
    white = masked_whiten(x, mask, shift_mean=shift_mean)
    # eps 1e-8 against a variance above 1e4
    assert_close(white.var(), torch.ones_like(white.var()), rtol=1e-9, atol=0)
    assert_close(white.mean(), torch.zeros_like(x.mean()) if shift_mean else x.mean(), **EXACT)


def test_whitening_a_part_with_global_moments_is_a_part_of_the_whitened_whole():
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = length_mask(torch.tensor([7, 3, 5, 1]), 7)
    moments = merge_moments([masked_moments(x[:1], mask[:1]), masked_moments(x[1:], mask[1:])])
    assert_close(masked_whiten(x[1:], mask[1:], moments=moments), masked_whiten(x, mask)[1:], **EXACT)
