import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onetrunk.ops.packing import PackLimits, deal_rows, largest_rows, make_pack, plan_packs
from tests.ops.test_losses import many


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_packs_are_cut_by_rows_and_by_padded_tokens():
    # Sorted: 9 (row 1), 5 (row 0), 5 (row 3), 4 (row 4), 1 (row 2). Budget 10: 9 alone; 5 + 5; then 4 and 1.
    assert plan_packs([5, 9, 1, 5, 4], PackLimits(4, 10)) == [[1], [0, 3], [4, 2]]
    assert plan_packs([5, 9, 1, 5, 4], PackLimits(2)) == [[1, 0], [3, 4], [2]]
    assert plan_packs([], PackLimits(2, 10)) == []


def test_without_padding_rows_of_any_lengths_fill_a_pack():
    # Sorted: 9 (row 1), 5 (row 0), 5 (row 3), 4 (row 4), 1 (row 2). Budget 10: 9; 5 + 5; 4; then 1 beside 9.
    assert plan_packs([5, 9, 1, 5, 4], PackLimits(4, 10, padding_free=True)) == [[1, 2], [0, 3], [4]]
    # With two rows each, the 1 has no place beside 5 + 5.
    assert plan_packs([5, 5, 1], PackLimits(2, 12, padding_free=True)) == [[0, 1], [2]]
    assert plan_packs([5, 5, 1], PackLimits(3, 12, padding_free=True)) == [[0, 1, 2]]
    # Without a budget the number of rows decides, as with padding.
    assert plan_packs([5, 9, 1, 5, 4], PackLimits(2, padding_free=True)) == [[1, 0], [3, 4], [2]]


def test_the_largest_pack_has_full_rows_and_without_padding_a_shorter_one_that_fills_it_up():
    # Rows of 5 + 6 tokens, of which 25 tokens hold two; 3 are left, of which a prompt has at least one.
    assert largest_rows(5, 6, PackLimits(4)) == 4 * [(5, 6)]
    assert largest_rows(5, 6, PackLimits(4, 25)) == 2 * [(5, 6)]
    assert largest_rows(5, 6, PackLimits(4, 25, padding_free=True)) == [(5, 6), (5, 6), (1, 2)]
    assert largest_rows(5, 6, PackLimits(2, 25, padding_free=True)) == 2 * [(5, 6)]


@many
@given(lengths=st.lists(st.integers(1, 50), max_size=30), max_rows=st.integers(1, 9), spare=st.integers(0, 100))
def test_packs_without_padding_hold_every_row_once_and_open_only_when_needed(lengths, max_rows, spare):
    max_tokens = max(lengths, default=1) + spare
    packs = plan_packs(lengths, PackLimits(max_rows, max_tokens, padding_free=True))
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    sizes = [sum(lengths[row] for row in pack) for pack in packs]
    assert all(1 <= len(pack) <= max_rows and size <= max_tokens for pack, size in zip(packs, sizes, strict=True))
    for i, pack in enumerate(packs):
        assert [lengths[row] for row in pack] == sorted((lengths[row] for row in pack), reverse=True)
        # A row opens a pack only if none before has room for it.
        for other, size in zip(packs[:i], sizes, strict=False):
            assert len(other) == max_rows or size + lengths[pack[0]] > max_tokens


@many
@given(lengths=st.lists(st.integers(1, 50), max_size=30), max_rows=st.integers(1, 9), spare=st.integers(0, 100))
def test_packs_hold_every_row_once_within_both_budgets(lengths, max_rows, spare):
    max_tokens = max(lengths, default=1) + spare
    packs = plan_packs(lengths, PackLimits(max_rows, max_tokens))
    flat = [row for pack in packs for row in pack]
    assert flat == sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    for pack, following in zip(packs, [*packs, None][1:], strict=True):
        longest = lengths[pack[0]]
        assert 1 <= len(pack) <= max_rows and len(pack) * longest <= max_tokens
        # No pack is cut before it is full.
        if following is not None:
            assert len(pack) == max_rows or (len(pack) + 1) * longest > max_tokens


def test_a_row_that_no_pack_can_hold_is_rejected_with_the_fix():
    with pytest.raises(ValueError, match="row of 12 tokens does not fit into microbatch_tokens 10; raise"):
        plan_packs([3, 12], PackLimits(4, 10))
    with pytest.raises(ValueError, match="per_device_train_batch_size"):
        plan_packs([3], PackLimits(0))


def test_a_pack_by_hand_with_pad_equal_to_the_stop_token():
    pack = make_pack([[1, 2], [3]], [[4, 9], [5, 6, 9]], pad_id=9)
    assert pack.input_ids.tolist() == [[1, 2, 4, 9], [3, 5, 6, 9]]
    assert pack.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert pack.prompt_lengths.tolist() == [2, 1]
    assert pack.completion_ids.tolist() == [[4, 9, 9], [5, 6, 9]]
    assert pack.completion_mask.tolist() == [[True, True, False], [True, True, True]]
    dtypes = (pack.input_ids, pack.attention_mask, pack.prompt_lengths, pack.completion_ids)
    assert {x.dtype for x in dtypes} == {torch.int64} and pack.completion_mask.dtype == torch.bool


@many
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 9), max_size=6)),
        min_size=1,
        max_size=5,
    ),
    pad_id=st.integers(0, 9),
)
def test_a_pack_gives_back_the_ids_it_was_made_of(rows, pad_id):
    pack = make_pack([prompt for prompt, _ in rows], [completion for _, completion in rows], pad_id)
    for row, (prompt, completion) in enumerate(rows):
        length = int(pack.prompt_lengths[row])
        assert pack.input_ids[row][pack.attention_mask[row].bool()].tolist() == prompt + completion
        assert length == len(prompt)
        assert pack.completion_ids[row][pack.completion_mask[row]].tolist() == completion
        assert pack.input_ids[row][pack.attention_mask[row] == 0].eq(pad_id).all()


def test_a_pack_with_an_empty_prompt_is_rejected():
    with pytest.raises(ValueError, match="prompt of row 1 is empty"):
        make_pack([[1], []], [[2], [3]], pad_id=0)


@many
@given(per_block=st.integers(1, 6), count=st.integers(1, 5), world=st.integers(1, 4), seed=st.integers(0, 999))
def test_every_row_lands_in_one_minibatch_whatever_the_number_of_processes(per_block, count, world, seed):
    num_rows = per_block * count * world
    alone, minibatches = deal_rows(num_rows, count, generator(seed))
    assert alone == list(range(num_rows)) == sorted(row for minibatch in minibatches for row in minibatch)
    assert {len(minibatch) for minibatch in minibatches} == {num_rows // count}
    ranks = [deal_rows(num_rows, count, generator(seed), rank, world) for rank in range(world)]
    for rows, positions in ranks:
        assert rows == sorted(rows) and {len(own) for own in positions} == {per_block}
    # The processes together hold the minibatches of one process.
    together = [sorted(rows[i] for rows, own in ranks for i in own[number]) for number in range(count)]
    assert together == minibatches


def test_the_expected_weight_of_a_token_does_not_depend_on_the_length_of_its_row():
    lengths = torch.randint(4, 129, (64,), generator=generator(1))
    deals, num_minibatches = 4000, 4
    weights, source = torch.zeros(64), generator(2)
    for _ in range(deals):
        for rows in deal_rows(64, num_minibatches, source)[1]:
            weights[rows] += 1 / lengths[rows].sum() / deals
    shortest, longest = lengths.argsort()[:16], lengths.argsort()[-16:]
    ratio = (weights[shortest].mean() / weights[longest].mean()).item()
    # A row counts in its own minibatch's total, so a long one meets slightly larger totals: by its surplus of about
    # 100 tokens over the shortest, in a minibatch of about 1,000. Minibatches of rows of similar length gave a ratio
    # above 4.
    surplus = (lengths[longest].float().mean() - lengths[shortest].float().mean()) / lengths.sum() * num_minibatches
    assert 1 < ratio < 1 + 1.2 * surplus.item() < 1.15


@pytest.mark.parametrize(("rows", "minibatches", "world"), [(8, 3, 1), (8, 4, 3), (0, 1, 1), (8, 0, 1)])
def test_rows_that_cannot_be_dealt_evenly_are_rejected(rows, minibatches, world):
    with pytest.raises(ValueError, match=f"{rows} rows cannot be dealt evenly to {minibatches} minibatches"):
        deal_rows(rows, minibatches, generator(), world_size=world)
