"""Completions that exist already: every shape of dataset becomes the same groups, and a bad row is named."""

import pytest

from onetrunk.data.pairs import Group, labelled_groups, read_groups, shape_of

USER = {"role": "user", "content": "Name a bird."}
ROBIN, STONE = ({"role": "assistant", "content": text} for text in ("A robin.", "A stone."))


def groups(rows, **options):
    return list(read_groups(rows, list(rows[0]), **options))


def test_text_pairs_with_a_prompt_and_a_subset():
    rows = [{"prompt": "Name a bird.", "chosen": "A robin.", "rejected": "A stone.", "subset": "easy", "id": 3}]
    assert groups(rows) == [Group("Name a bird.", ("A robin.", "A stone."), 1, stopped=(True, True), subset="easy")]


def test_sides_that_begin_with_the_prompt_are_cut_where_it_ends_and_a_text_that_does_not_is_the_users():
    # UltraFeedback-binarized: prompt is text, both sides are whole conversations.
    h4 = {"prompt": "Name a bird.", "chosen": [USER, ROBIN], "rejected": [USER, STONE], "messages": [USER, ROBIN]}
    # Conversational with an explicit prompt, as TRL writes it.
    explicit = {"prompt": [USER], "chosen": [ROBIN], "rejected": [STONE]}
    implicit = {"chosen": [USER, ROBIN], "rejected": [USER, STONE]}
    both = {"prompt": [USER], "chosen": [USER, ROBIN], "rejected": [USER, STONE]}
    text = {"prompt": "Name a bird.", "chosen": [ROBIN], "rejected": [STONE]}
    for row in (h4, explicit, implicit, both, text):
        (group,) = groups([row])
        assert (group.prompt, group.texts) == ([USER], ("A robin.", "A stone."))


def test_a_best_of_four_row_compares_each_better_one_with_each_of_the_others():
    rows = [{"prompt": "p", "chosen": ["a", "b"], "rejected": ["c", "d"], "subset": "Ties"}]
    (group,) = groups(rows)
    assert group.texts == ("a", "b", "c", "d") and group.pairs() == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_a_probability_below_one_half_turns_the_pair_around():
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b", "probability": 0.25, "chosen_stopped": False}]
    (group,) = groups(rows)
    assert group.texts == ("b", "a") and group.probability == 0.75 and group.stopped == (True, False)


def test_groups_of_several_models_are_read_as_texts():
    rows = [
        {"prompt": "p", "completions": [{"model": "m1", "response": "a"}, {"model": "m2", "response": "b"}]},
        {"prompt": "q", "completions": [{"model": "m1", "response": "c"}]},
    ]
    first, second = groups(rows)
    assert (first.texts, first.num_better) == (("a", "b"), 0)
    assert second.is_whole(0)


def test_logged_conversations_are_joined_by_their_prompt():
    rows = [
        {"messages": [USER, ROBIN], "model": "m1"},
        {"messages": [{"role": "user", "content": "Other?"}, ROBIN], "model": "m1"},
        {"messages": [USER, STONE], "model": "m2"},
    ]
    first, second = groups(rows)
    assert first.texts == ("A robin.", "A stone.")
    assert second.prompt == [{"role": "user", "content": "Other?"}]
    (pair,) = groups([{"prompt": "p", "completion": "a"}, {"prompt": "p", "completion": "b"}])
    assert pair.texts == ("a", "b")


PAIR = {"prompt": "p", "chosen": "a", "rejected": "b", "probability": 1.0}


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([PAIR, {**PAIR, "rejected": " "}, PAIR], "row 1: rejected is empty"),
        (
            [{"prompt": [USER], "chosen": [ROBIN, USER, ROBIN], "rejected": [STONE]}],
            "row 0: chosen has 3 messages after",
        ),
        (
            [{"prompt": [USER], "completion": [ROBIN, USER, STONE]}],
            "row 0: completion has 3 messages after the prompt",
        ),
        ([PAIR, {**PAIR, "rejected": "a "}, PAIR], "row 1: chosen and rejected are identical"),
        ([PAIR, {**PAIR, "probability": 2}, PAIR], "row 1: probability is 2, expected"),
        ([{"prompt": "p", "chosen": ["a"], "rejected": [3]}], "row 0: rejected is of type int"),
        ([{"prompt": "p", "completions": ["a", None]}], "row 0: completion 1 is missing"),
        ([{"messages": [USER]}], "row 0: messages does not end with an answer"),
        ([{"chosen": [ROBIN], "rejected": [STONE]}], "row 0: .* share no message"),
    ],
)
def test_a_bad_row_of_each_shape_is_named_with_what_is_wrong(rows, fault):
    with pytest.raises(ValueError, match=fault):
        groups(rows)


def test_other_columns_are_answered_with_the_shapes_that_there_are():
    with pytest.raises(ValueError, match="expected chosen and rejected .with or without prompt."):
        shape_of(["question", "answer"], {"question": "q", "answer": "a"})
    with pytest.raises(ValueError, match="none of which says which completion is better"):
        labelled_groups([{"prompt": "p", "completions": ["a", "b"]}], ["prompt", "completions"])
