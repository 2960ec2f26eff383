import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.ops import make_pack, pad_rows, plan_packs, split_minibatches

many = settings(max_examples=200, deadline=None)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_packs_are_cut_by_rows_and_by_padded_tokens():
    # Sorted: 9 (row 1), 5 (row 0), 5 (row 3), 4 (row 4), 1 (row 2). Budget 10: 9 alone; 5 + 5; then 4 and 1.
    assert plan_packs([5, 9, 1, 5, 4], max_rows=4, max_tokens=10) == [[1], [0, 3], [4, 2]]
    assert plan_packs([5, 9, 1, 5, 4], max_rows=2, max_tokens=None) == [[1, 0], [3, 4], [2]]
    assert plan_packs([], max_rows=2, max_tokens=10) == []


@many
@given(lengths=st.lists(st.integers(1, 50), max_size=30), max_rows=st.integers(1, 9), spare=st.integers(0, 100))
def test_packs_hold_every_row_once_within_both_budgets(lengths, max_rows, spare):
    max_tokens = max(lengths, default=1) + spare
    packs = plan_packs(lengths, max_rows, max_tokens)
    flat = [row for pack in packs for row in pack]
    assert flat == sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    for pack, following in zip(packs, [*packs, None][1:], strict=True):
        longest = lengths[pack[0]]
        assert 1 <= len(pack) <= max_rows and len(pack) * longest <= max_tokens
        # No pack is cut before it is full.
        if following is not None:
            assert len(pack) == max_rows or (len(pack) + 1) * longest > max_tokens


def test_a_row_that_no_pack_can_hold_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="row of 12 tokens does not fit into microbatch_tokens 10; raise"):
        plan_packs([3, 12], max_rows=4, max_tokens=10)
    with pytest.raises(ValueError, match="per_device_train_batch_size"):
        plan_packs([3], max_rows=0, max_tokens=None)


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


def test_packs_without_rows_or_with_an_empty_prompt_are_refused():
    with pytest.raises(ValueError, match="1 prompts and 2 completions"):
        make_pack([[1]], [[2], [3]], pad_id=0)
    with pytest.raises(ValueError, match="0 prompts"):
        make_pack([], [], pad_id=0)
    with pytest.raises(ValueError, match="prompt of row 1 is empty"):
        make_pack([[1], []], [[2], [3]], pad_id=0)


@many
@given(
    pack_rows=st.lists(st.integers(0, 8), min_size=1, max_size=20),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_every_pack_lands_in_one_minibatch_and_none_is_empty(pack_rows, seed, data):
    count = data.draw(st.integers(1, len(pack_rows)))
    minibatches = split_minibatches(pack_rows, count, generator(seed))
    assert sorted(pack for minibatch in minibatches for pack in minibatch) == list(range(len(pack_rows)))
    assert len(minibatches) == count and all(minibatches)
    rows = [sum(pack_rows[pack] for pack in minibatch) for minibatch in minibatches]
    # A minibatch got its last pack when it had the fewest rows, so no two differ by more than one pack.
    assert max(rows) - min(rows) <= max(pack_rows)


@pytest.mark.parametrize(("packs", "count"), [(8, 4), (6, 2), (5, 5)])
def test_packs_of_equal_rows_are_dealt_evenly(packs, count):
    minibatches = split_minibatches([3] * packs, count, generator())
    assert {len(minibatch) for minibatch in minibatches} == {packs // count}


def test_minibatches_follow_the_generator_and_differ_between_epochs():
    source = generator(7)
    epochs = [split_minibatches([2] * 12, 3, source) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert split_minibatches([2] * 12, 3, generator(7)) == epochs[0]


def test_more_minibatches_than_packs_are_refused_with_the_fix():
    with pytest.raises(ValueError, match="2 packs cannot fill 3 minibatches; set num_minibatches between 1 and 2"):
        split_minibatches([4, 4], 3, generator())
    with pytest.raises(ValueError, match="cannot fill 0 minibatches"):
        split_minibatches([4, 4], 0, generator())


def test_rows_are_padded_with_zeros_on_the_right():
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([3.0])]
    assert pad_rows(rows).tolist() == [[1, 2], [0, 0], [3, 0]]
    assert pad_rows(rows, width=3).tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    assert pad_rows([torch.tensor([True])], width=2).dtype == torch.bool
    with pytest.raises(ValueError, match="row of 2 entries does not fit into width 1"):
        pad_rows(rows, width=1)
    with pytest.raises(ValueError, match="got no rows"):
        pad_rows([])
