"""A judge whose model reasons before it answers: on its own, as servers tell in three ways, or asked to."""

import logging

import pytest

from onetrunk.judges.judge import Pair, Principle
from onetrunk.judges.server import ServerJudge
from onetrunk.servers.fleet import RetryPolicy
from tests.judges.stub_server import THOUGHT_TOKENS, StubServer, completion, first_probability

KIND = Principle("Which completion is kinder?")
PAIRS = [Pair(f"prompt {i}", f"first {i}", f"second {i}") for i in range(4)]
THINKS = pytest.mark.parametrize("thinks", ["reasoning", "reasoning_content", "inline"])
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def judge_of(stub, **settings):
    return ServerJudge(stub.url, stub.model, policy=RetryPolicy(first_delay_s=0.004), **settings)


@THINKS
def test_a_reply_that_is_all_reasoning_is_found_by_the_check_and_named_with_the_settings_to_change(thinks):
    with StubServer(thinks=thinks) as stub, pytest.raises(RuntimeError) as error:
        judge_of(stub).check()
    said = str(error.value)
    assert "all 16 tokens of a reply went to the model's reasoning" in said and "\n" not in said
    assert "raise judge_verdict_tokens" in said and "{chat_template_kwargs: {enable_thinking: false}}" in said


@THINKS
def test_with_room_for_the_reasoning_the_verdict_behind_it_is_read_as_a_vote_and_the_thoughts_are_kept(thinks, caplog):
    with StubServer(thinks=thinks) as stub:
        judge = judge_of(stub, verdict_tokens=THOUGHT_TOKENS + 1, samples=30)
        with caplog.at_level(logging.WARNING):
            judge.check()
        # The first token is the reasoning's, so its log probabilities are not the verdict's.
        assert judge.top_logprobs == 0 and not caplog.text
        stub.bodies.clear()
        verdicts = judge.compare(PAIRS, KIND)
    believed = sorted(first_probability(body["messages"]) for body in stub.bodies)[::30]
    for verdict, p in zip(sorted(v.probability for v in verdicts), believed, strict=True):
        # Three standard deviations of 30 votes.
        assert abs(verdict - p) < 0.28
    for verdict in verdicts:
        thoughts = [verdict.reason, *verdict.details["thoughts"]]
        assert len(thoughts) == 30 and all("let me see" in thought for thought in thoughts)


def test_with_the_reasoning_turned_off_one_call_gives_a_probability():
    with StubServer(thinks="reasoning_content") as stub:
        judge = judge_of(stub, extra_body=OFF)
        judge.check()
        stub.bodies.clear()
        verdicts = judge.compare(PAIRS, KIND)
        assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in stub.bodies)
    assert len(stub.bodies) == 4 and all(v.details["method"] == "logprobs" for v in verdicts)


def cut(text, **message):
    reply = completion("judge-1", text)
    reply["choices"][0]["message"] |= message
    reply["choices"][0]["finish_reason"] = "length"
    return reply


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (cut(None, reasoning_content="On the one hand,"), "all its tokens went to the model's reasoning"),
        (cut("Okay, the user wants"), 'it reached the token limit and begins "Okay, the user'),
    ],
)
def test_a_question_without_room_for_its_verdict_is_an_error_that_names_the_setting(reply, problem):
    with StubServer(thinks="reasoning_content") as stub:
        judge = judge_of(stub, verdict_tokens=THOUGHT_TOKENS + 1)
        judge.check()
        stub.replies_instead = lambda body: reply if "> prompt 1" in str(body["messages"]) else None
        verdicts = judge.compare(PAIRS, KIND)
    assert [v.error_kind for v in verdicts if v.error] == ["unread"] and verdicts[1].probability is None
    assert f"5 of 5 replies are no label (one: {problem}" in verdicts[1].error
    assert "raise judge_verdict_tokens" in verdicts[1].error


def test_reasoning_that_was_bought_is_used_when_its_verdict_fails():
    verdicts_asked = []

    def answer(body):
        if body["messages"][-1]["role"] == "user" and body["max_tokens"] == 64:
            return 200, completion("thinker", "x" * 9000)
        verdicts_asked.append(body)
        return (503, {}) if len(verdicts_asked) in (2, 3) else (200, completion("thinker", "A"))

    with StubServer("thinker", routes={"/v1/chat/completions": answer}) as stub:
        judge = judge_of(stub, reasoning_tokens=64, samples=1)
        judge.check()
        stub.bodies.clear()
        verdict = judge.compare(PAIRS[:1], KIND)[0]
    assert verdict.probability == 1.0 and len(verdict.reason) == 4000
    assert [body["max_tokens"] == 64 for body in stub.bodies] == [True, False, False, False]
