"""Replies are read strictly: what is no label is none, and log probabilities count only where they are some."""

import pytest

from onetrunk.judges import replies
from onetrunk.judges.replies import Vote, checked_reply, label_probabilities, read_label, read_vote
from onetrunk.servers.client import is_same_model
from onetrunk.servers.errors import CallError
from tests.judges.stub_server import candidates, completion

LABELS = ("A", "B")


@pytest.mark.parametrize(
    "text", ["A", " A\n", "A.", '"A"', "(A)", "**A**", "Answer: A", "My verdict is: A", "**Answer:** A"]
)
def test_a_label_alone_is_read_in_its_usual_clothes(text):
    assert read_label(text, LABELS) == "A"


@pytest.mark.parametrize(
    "text",
    ["", "C", "a", "AB", "A or B", "A is better.", "A\nB", "The answer is clearly A", "Both", '{"verdict": "A"}'],
)
def test_anything_else_is_no_label(text):
    assert read_label(text, LABELS) is None


def reply(text="A", positions=None, model="judge-1"):
    return checked_reply(completion("judge-1", text, positions), model)


def test_probabilities_are_summed_over_the_spellings_of_a_label():
    shares = {"A": 0.5, " A": 0.2, "\u0120A": 0.05, "B": 0.1, "The": 0.1}
    found = label_probabilities(reply("A", [candidates("A", shares)]), LABELS)
    assert found == pytest.approx({"A": 0.75, "B": 0.1})
    # The first token may be blank; the label's is the one after it.
    blank = candidates("\n", {"\n": 0.9, "A": 0.05})
    assert label_probabilities(reply("\nA", [blank, candidates("A", shares)]), LABELS) == pytest.approx(found)


@pytest.mark.parametrize(
    "positions",
    [
        [],
        [{"token": "A", "logprob": -0.1}],
        [{"token": "A", "logprob": -0.1, "top_logprobs": [{"token": "A", "logprob": -0.1}]}],
        [{"token": "A", "logprob": -0.1, "top_logprobs": [{"token": "A"}, {"token": "B"}]}],
        # Not probabilities: more than 1 together.
        [candidates("A", {"A": 0.9, "B": 0.9})],
        # Of another text, and of reasoning that the server has hidden.
        [candidates("B", {"A": 0.1, "B": 0.9})],
        [candidates(token, {token: 0.99, "C": 0.005}) for token in ("Both", " are", " fine")],
        [candidates(token, {token: 0.99, "C": 0.005}) for token in ("<think>", "B", "</think>", "A")],
    ],
)
def test_log_probabilities_that_are_none_are_not_taken_for_some(positions):
    assert label_probabilities(reply("A", positions), LABELS) is None


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        # What vLLM answers where it knows no stop token: the text without control tokens, the tokens with them.
        (["A", "<|im_end|>", "\n", "<|im_start|>", "user", "\n", "Why", "?"], "A\nuser\nWhy?"),
        (["A", "</s>", "\n", "B"], "A\nB"),
        # A server that shows them.
        (["A", "<|im_end|>", "B"], "A<|im_end|>B"),
        # An end mark without brackets, the last token of all.
        (["A", "EndOfText"], "A"),
        # Log probabilities of the beginning alone.
        (["\u2581A"], "A is better."),
    ],
)
def test_log_probabilities_are_found_by_tokens_also_where_a_reply_runs_past_its_end_mark(tokens, text):
    first, *later = tokens
    positions = [candidates(first, {first: 0.99, "B": 0.005})]
    positions += [candidates(token, {token: 0.9, "B": 0.01}) for token in later]
    found = label_probabilities(reply(text, positions), LABELS)
    assert found == pytest.approx({"A": 0.99, "B": 0.005})


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["**", "A", "**"], "**A**"),
        (["(", "A", ")"], "(A)"),
        (["Answer", ":", " A"], "Answer: A"),
        (["<|START_RESPONSE|>", "A"], "A"),
    ],
)
def test_a_label_that_is_not_the_first_token_is_measured_at_its_own(tokens, text):
    positions = [candidates(t, {t: 0.9, "B": 0.05} if "A" in t else {t: 0.97, "x": 0.01}) for t in tokens]
    vote = read_vote(reply(text, positions), LABELS)
    assert vote.label == "A" and vote.probabilities == pytest.approx({"A": 0.9, "B": 0.05})
    # A token that holds more than the label measures nothing: the reply is a vote.
    joined = [candidates("**", {"**": 0.9, "x": 0.01}), candidates("A**", {"A**": 0.9, "B**": 0.05})]
    assert read_vote(reply("**A**", joined), LABELS) == Vote("A")


def test_other_words_that_the_token_limit_ends_measure_nothing():
    positions = [candidates("Okay", {"Okay": 0.9, "A": 0.05}), candidates(",", {",": 0.9, "A": 0.05})]
    body = completion("judge-1", "Okay, so", positions)
    assert read_vote(checked_reply(body, "judge-1"), LABELS).probabilities == pytest.approx({"A": 0.05, "B": 0.0})
    body["choices"][0]["finish_reason"] = "length"
    vote = read_vote(checked_reply(body, "judge-1"), LABELS)
    assert (vote.label, vote.probabilities) == (None, None) and "raise judge_verdict_tokens" in vote.problem


def test_after_reasoning_in_the_text_the_first_token_is_not_the_verdict():
    positions = [candidates("<think>", {"<think>": 0.9, "A": 0.05})]
    thought = reply("<think>B was longer.</think>\n\nA", positions)
    assert read_label(thought.text, LABELS) == "A" and label_probabilities(thought, LABELS) is None
    assert read_label(reply("<think>A is").text, LABELS) is None


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "without choices"),
        ({"choices": []}, "without choices"),
        ({"choices": [{"message": {"content": None}}]}, "without text"),
        ({"choices": [{"message": {"content": ["A"]}}]}, "without text"),
        ({"error": {"message": "upstream"}}, "in place of a reply"),
        ({"model": "judge-2", "choices": [{"message": {"content": "A"}}]}, "model 'judge-2'"),
    ],
)
def test_a_body_that_is_no_reply_of_this_model_is_an_error(body, sentence):
    with pytest.raises(CallError, match=sentence):
        checked_reply(body, "judge-1")


@pytest.mark.parametrize(
    ("asked", "reported", "same"),
    [
        ("judge", "judge", True),
        ("owner/Judge", "judge", True),
        ("judge", "owner/judge", True),
        ("judge", "judge-2026-05-13", True),
        ("judge", "judge:latest", True),
        ("judge", "judge-mini", False),
        ("judge-7b", "judge-70b", False),
        ("judge-mini", "judge", False),
    ],
)
def test_a_model_is_the_same_with_owner_date_or_revision_and_no_other(asked, reported, same):
    assert is_same_model(asked, reported) is same


def test_opinions_add_up_to_one_or_abstain():
    told = replies.opinion_of_probabilities(Vote("A", {"A": 0.6, "B": 0.2}, "because"))
    assert told.shares == pytest.approx({"A": 0.75, "B": 0.25}) and told.reason == "because"
    assert told.details == {"method": "logprobs", "label_mass": 0.8}
    assert replies.opinion_of_probabilities(Vote(None, {"A": 0.2, "B": 0.1})).shares is None

    votes = [Vote(label) for label in ("A", "A", None, "B")]
    voted = replies.opinion_of_votes(votes, LABELS)
    assert voted.shares == pytest.approx({"A": 2 / 3, "B": 1 / 3})
    assert voted.details == {"method": "votes", "votes": {"A": 2, "B": 1, "unread": 1}}
    unread = replies.opinion_of_votes([Vote(None, problem="it is empty"), Vote(None, problem="x"), Vote("A")], LABELS)
    assert unread.shares is None and unread.reason == "2 of 3 replies are not labels (one: it is empty)"


def test_an_empty_reply_measures_nothing():
    ends = [candidates("<|im_end|>", {"<|im_end|>": 0.8, "A": 0.1, "B": 0.05})]
    vote = read_vote(reply("", ends), LABELS)
    assert (vote.label, vote.probabilities, vote.problem) == (None, None, "it is empty")
    # A text that is no label is measured, and may be an abstention.
    both = [candidates("Both", {"Both": 0.9, "A": 0.05})]
    assert read_vote(reply("Both", both), LABELS).probabilities == pytest.approx({"A": 0.05, "B": 0.0})
