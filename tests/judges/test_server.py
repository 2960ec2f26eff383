"""A judge behind a server: what it asks, what it believes, and what it says to a wrong address, model or key."""

import logging

import pytest

from onetrunk.judges.judge import Judge, Pair, Principle, Single
from onetrunk.judges.server import ServerJudge
from onetrunk.judges.template import RATINGS
from onetrunk.servers.fleet import RetryPolicy
from tests.judges.stub_server import THOUGHT_TOKENS, StubServer, candidates, completion, first_probability

KIND = Principle("Which completion is kinder?")
QUICK = RetryPolicy(first_delay_s=0.004, max_delay_s=0.02, call_timeout_s=60.0)


def pairs(count):
    return [Pair(f"prompt {i}", f"first {i}", f"second {i}") for i in range(count)]


def judge_of(stub, **settings):
    return ServerJudge(stub.url, stub.model, policy=QUICK, **settings)


def test_one_call_gives_the_probability_that_the_server_believes():
    with StubServer() as stub:
        judge = judge_of(stub)
        assert isinstance(judge, Judge)
        judge.check()
        stub.bodies.clear()
        verdicts = judge.compare(pairs(5), KIND)
    asked = {str(body["messages"]): first_probability(body["messages"]) for body in stub.bodies}
    assert sorted(v.probability for v in verdicts) == pytest.approx(sorted(asked.values()))
    assert all(v.details == {"method": "logprobs", "label_mass": pytest.approx(0.98)} for v in verdicts)
    assert len(stub.bodies) == 5


def test_without_log_probabilities_votes_are_sampled_with_a_seed_each():
    with StubServer(logprobs=False) as stub:
        judge = judge_of(stub, samples=40)
        judge.check()
        assert judge.top_logprobs == 0
        stub.bodies.clear()
        verdicts = judge.compare(pairs(3), KIND)
    assert len(stub.bodies) == 3 * 40 == len({(str(b["messages"]), b["seed"]) for b in stub.bodies})
    assert all("logprobs" not in body and body["temperature"] == 1.0 for body in stub.bodies)
    believed = {str(b["messages"]): first_probability(b["messages"]) for b in stub.bodies}
    for verdict, p in zip(sorted(v.probability for v in verdicts), sorted(believed.values()), strict=True):
        # Three standard deviations of 40 votes.
        assert abs(verdict - p) < 0.24
    assert all(v.details["votes"]["unread"] == 0 for v in verdicts)


def test_a_reply_that_leaves_log_probabilities_out_is_a_vote_and_the_others_are_bought_at_once():
    with StubServer() as stub:
        judge = judge_of(stub)
        judge.check()
        stub.logprobs = False
        stub.bodies.clear()
        verdicts = judge.compare(pairs(3), KIND)
    assert len(stub.bodies) == 3 * 5 and all(sum(v.details["votes"].values()) == 5 for v in verdicts)


def test_a_rating_is_the_mean_mark_from_0_to_1():
    mark = candidates(RATINGS[-1], {RATINGS[0]: 0.25, RATINGS[-1]: 0.75})
    with StubServer("rater") as stub:
        stub.replies_instead = lambda body: completion("rater", RATINGS[-1], [mark] if body.get("logprobs") else None)
        judge = judge_of(stub)
        told = []
        ratings = judge.rate([Single("p", "c"), Single("q", "d")], KIND, lambda i, rating: told.append((i, rating)))
    assert [rating.score for rating in ratings] == pytest.approx([0.75, 0.75]) and len(told) == 2


def test_who_a_judge_is_does_not_depend_on_where_it_is():
    here, there = (ServerJudge(url, "owner/judge 7b") for url in ("http://127.0.0.1:1/v1", "https://example.com/v1"))
    assert here.identity == there.identity and here.name == "judge-7b"
    assert ServerJudge("http://127.0.0.1:1", "owner/judge 7b", samples=3).identity != here.identity


def message_of_check(url, model="judge-1", **settings):
    with pytest.raises(RuntimeError) as error:
        ServerJudge(url, model, policy=QUICK, **settings).check()
    text = str(error.value)
    assert text.startswith("judge server http://127.0.0.1:") and "\n" not in text and len(text) < 500
    return text


def test_what_is_wrong_with_an_address_or_a_model_is_said_by_the_check():
    assert "the connection failed" in message_of_check("http://127.0.0.1:9/v1")
    with StubServer() as stub:
        assert "HTTP 404: Not Found; check the URL's path" in message_of_check(f"{stub.root}/api/v2/x")
        assert "HTTP 404: The model `judge-2` does not exist.; check" in message_of_check(stub.url, "judge-2")
        # The root and the whole path are as good as the path that ends in /v1.
        for url in (stub.root, f"{stub.root}/", f"{stub.url}/chat/completions"):
            ServerJudge(url, "judge-1", policy=QUICK).check()
    with StubServer(fault="other_model") as stub:
        assert "a reply of model 'another-model', where 'judge-1' was asked" in message_of_check(stub.url)
    with pytest.raises(ValueError, match="judge_model is not set"):
        ServerJudge("http://127.0.0.1/v1", "")


def test_a_wrong_key_is_said_to_be_one_and_not_repeated(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "tok-123")
    with StubServer(key="another") as stub:
        text = message_of_check(stub.url, api_key_env="JUDGE_KEY")
        assert "HTTP 401" in text and "api_key_env" in text and "tok-123" not in text
        judge = ServerJudge(stub.url, "judge-1", api_key_env="JUDGE_KEY")
    assert "tok-123" not in repr(vars(judge)) + repr(judge.identity)


THINKS = pytest.mark.parametrize("thinks", ["reasoning", "reasoning_content", "inline"])


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
        verdicts = judge.compare(pairs(4), KIND)
    believed = sorted(first_probability(body["messages"]) for body in stub.bodies)[::30]
    for verdict, p in zip(sorted(v.probability for v in verdicts), believed, strict=True):
        # Three standard deviations of 30 votes.
        assert abs(verdict - p) < 0.28
    for verdict in verdicts:
        thoughts = [verdict.reason, *verdict.details["thoughts"]]
        assert len(thoughts) == 30 and all("let me see" in thought for thought in thoughts)


def test_a_question_without_room_for_its_verdict_is_an_error_that_names_the_setting():
    reply = completion("judge-1", "Okay, the user wants")
    reply["choices"][0]["finish_reason"] = "length"
    with StubServer(thinks="reasoning_content") as stub:
        judge = judge_of(stub, verdict_tokens=THOUGHT_TOKENS + 1)
        judge.check()
        stub.replies_instead = lambda body: reply if "> prompt 1" in str(body["messages"]) else None
        verdicts = judge.compare(pairs(4), KIND)
    assert [v.error_kind for v in verdicts if v.error] == ["unread"] and verdicts[1].probability is None
    said = '5 of 5 replies are no label (one: it reached the token limit and begins "Okay, the user'
    assert said in verdicts[1].error and "raise judge_verdict_tokens" in verdicts[1].error
