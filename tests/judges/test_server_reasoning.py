"""A judge whose model reasons on its own before it answers, behind a server that tells so in one of three ways."""

import logging

import pytest

from onetrunk.judges.judge import Pair, Principle
from onetrunk.judges.server import ServerJudge
from onetrunk.utils.calls import RetryPolicy
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
    assert (
        "raise judge_verdict_tokens" in said
        and "judge_extra_body {chat_template_kwargs: {enable_thinking: false}}" in said
    )


@THINKS
def test_with_room_for_the_reasoning_the_verdict_behind_it_is_read_as_a_vote(thinks, caplog):
    with StubServer(thinks=thinks) as stub:
        judge = judge_of(stub, verdict_tokens=THOUGHT_TOKENS + 1, samples=30)
        with caplog.at_level(logging.WARNING):
            abilities = judge.check()
        # The first token is the reasoning's, so its log probabilities are not the verdict's.
        assert abilities.top_logprobs == 0 and abilities.samples and not caplog.text
        stub.bodies.clear()
        verdicts = judge.compare(PAIRS, KIND)
    believed = sorted(first_probability(body["messages"]) for body in stub.bodies)[::30]
    for verdict, p in zip(sorted(v.probability for v in verdicts), believed, strict=True):
        # Three standard deviations of 30 votes.
        assert abs(verdict - p) < 0.28
    assert all(v.details["method"] == "votes" and v.details["votes"]["unread"] == 0 for v in verdicts)


def test_with_the_reasoning_turned_off_one_call_gives_a_probability():
    with StubServer(thinks="reasoning_content") as stub:
        judge = judge_of(stub, extra_body=OFF)
        assert judge.check().top_logprobs == 20
        stub.bodies.clear()
        verdicts = judge.compare(PAIRS, KIND)
        assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for body in stub.bodies)
    assert len(stub.bodies) == 4 and all(v.details["method"] == "logprobs" for v in verdicts)


def test_log_probabilities_that_are_insisted_on_are_refused_with_the_reason():
    with StubServer(thinks="reasoning") as stub, pytest.raises(RuntimeError) as error:
        judge_of(stub, method="logprobs", verdict_tokens=THOUGHT_TOKENS + 1).check()
    assert "reasons before its verdict" in str(error.value) and "turn the reasoning off" in str(error.value)


def test_a_question_that_takes_all_tokens_for_reasoning_is_an_error_that_names_the_cause():
    def endless(body):
        reply = completion(stub.model, None)
        reply["choices"][0]["message"]["reasoning_content"] = "On the one hand,"
        reply["choices"][0]["finish_reason"] = "length"
        return reply if "> prompt 1" in str(body["messages"]) else None

    with StubServer(thinks="reasoning_content") as stub:
        judge = judge_of(stub, verdict_tokens=THOUGHT_TOKENS + 1)
        judge.check()
        stub.replies_instead = endless
        verdicts = judge.compare(PAIRS, KIND)
    assert [v.error_kind for v in verdicts if v.error] == ["unread"] and verdicts[1].probability is None
    assert "5 of 5 replies are no label (one: all its tokens went to the model's reasoning" in verdicts[1].error
    assert "raise judge_verdict_tokens" in verdicts[1].error


def test_a_reply_cut_before_a_label_names_the_setting_too(caplog):
    def answer(body):
        reply = completion("m", "Okay, the user wants me to compare two")
        reply["choices"][0]["finish_reason"] = "length"
        return 200, reply

    with StubServer("m", routes={"/v1/chat/completions": answer}) as stub:
        judge = ServerJudge(stub.url, "m", samples=1)
        with caplog.at_level(logging.WARNING):
            (verdict,) = judge.compare(PAIRS[:1], KIND)
    assert 'it reached the token limit and begins "Okay, the user' in verdict.error
    assert "raise judge_verdict_tokens" in verdict.error
    assert "answers a simple question with a reply that is no verdict" in caplog.text
