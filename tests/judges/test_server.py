"""A judge behind one or several servers: what it asks, believes and says; nothing is lost, nothing is bought twice."""

import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from onetrunk.feedback.asking import Asker
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Judge, Pair, Principle, Single
from onetrunk.judges.judge_config import EnsembleJudge
from onetrunk.judges.labels import judge_pairs
from onetrunk.judges.server import ServerJudge
from onetrunk.judges.template import RATINGS
from onetrunk.servers.errors import ServerUnavailable
from onetrunk.servers.fleet import RetryPolicy
from onetrunk.utils.ledger import Ledger
from tests.judges.stub_server import THOUGHT_TOKENS, StubServer, candidates, completion, first_probability

KIND, BRIEF = Principle("Which completion is kinder?"), Principle("Which completion is briefer?")
# A deadline that only a server that hangs can miss: a busy machine answers late.
PATIENT = RetryPolicy(
    max_calls=20, first_delay_s=0.004, max_delay_s=0.02, call_timeout_s=60.0, patience_s=300.0, max_timeouts=20
)


def pairs(count):
    return [Pair(f"prompt {i}", f"first {i}", f"second {i}") for i in range(count)]


def judge_of(stub, policy=PATIENT, **settings):
    return ServerJudge(stub.url, stub.model, policy=policy, **settings)


def checked_judge(stub, policy=PATIENT, **settings):
    """Return a judge that has been checked while the server was well; what that has asked is not counted."""
    judge = judge_of(stub, policy, **settings)
    stub.faulty = False
    judge.check()
    stub.faulty = True
    stub.bodies.clear()
    return judge


def test_one_call_gives_the_probability_that_the_server_believes():
    with StubServer() as stub:
        judge = checked_judge(stub)
        assert isinstance(judge, Judge)
        verdicts = judge.compare(pairs(5), KIND)
    asked = {str(body["messages"]): first_probability(body["messages"]) for body in stub.bodies}
    assert sorted(v.probability for v in verdicts) == pytest.approx(sorted(asked.values()))
    assert all(v.details == {"method": "logprobs", "label_mass": pytest.approx(0.98)} for v in verdicts)
    assert len(stub.bodies) == 5


def test_without_log_probabilities_votes_are_sampled_with_a_seed_each():
    with StubServer(logprobs=False) as stub:
        judge = checked_judge(stub, samples=40)
        assert judge.top_logprobs == 0
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
        judge = checked_judge(stub)
        stub.logprobs = False
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


def message_of_check(url, model="judge-1"):
    with pytest.raises(RuntimeError) as error:
        ServerJudge(url, model, policy=PATIENT).check()
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
            ServerJudge(url, "judge-1", policy=PATIENT).check()
    with StubServer(fault="other_model") as stub:
        assert "a reply from model 'another-model', but 'judge-1' was asked" in message_of_check(stub.url)
    with pytest.raises(ValueError, match="judge_model is not set"):
        ServerJudge("http://127.0.0.1/v1", "")


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
        judge = checked_judge(stub, verdict_tokens=THOUGHT_TOKENS + 1, samples=30)
        # The first token is the reasoning's, so its log probabilities are not the verdict's.
        assert judge.top_logprobs == 0 and not caplog.text
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
        judge = checked_judge(stub, verdict_tokens=THOUGHT_TOKENS + 1)
        stub.replies_instead = lambda body: reply if "> prompt 1" in str(body["messages"]) else None
        verdicts = judge.compare(pairs(4), KIND)
    assert [v.error_kind for v in verdicts if v.error] == ["unread"] and verdicts[1].probability is None
    said = '5 of 5 replies are not labels (one: it reached the token limit and begins "Okay, the user'
    assert said in verdicts[1].error and "raise judge_verdict_tokens" in verdicts[1].error


def test_a_vote_that_is_refused_costs_none_of_the_others():
    with StubServer(logprobs=False) as stub:
        judge = checked_judge(stub)
        judge.compare(pairs(1), KIND)
        refused = stub.bodies[3]["seed"]
        stub.status_instead = lambda body: 400 if body["seed"] == refused else 200
        (verdict,) = judge.compare(pairs(1), KIND)
        assert verdict.error is None and verdict.details["votes"]["unread"] == 1


@pytest.mark.parametrize(("logprobs", "calls"), [(True, 1), (False, 5)])
def test_a_question_that_is_refused_is_asked_no_further(logprobs, calls):
    with StubServer(logprobs=logprobs) as stub:
        judge = checked_judge(stub)
        stub.status_instead = lambda body: 400
        (verdict,) = judge.compare(pairs(1), KIND)
        assert verdict.error_kind == "refused" and "this prompt is blocked" in verdict.error
        assert len(stub.bodies) == calls


def questions(stub):
    """Return the questions that a server has sold, without those of the check at startup."""
    return [q for q, n in stub.sold.items() for _ in range(n) if "> prompt" in json.loads(q)["messages"][0]["content"]]


@pytest.mark.parametrize("fault", ["500", "hang", "other_model", "no_logprobs"])
def test_nothing_is_lost_and_nothing_is_bought_twice(fault):
    asked, told = pairs(4 if fault == "hang" else 40), []
    with StubServer(fault=fault, rate=0.5) as stub:
        judge = checked_judge(stub, replace(PATIENT, call_timeout_s=0.5) if fault == "hang" else PATIENT)
        verdicts = judge.compare(asked, KIND, lambda i, verdict: told.append((i, verdict)))
        sold = questions(stub)
        stub.faulty = False
        unhurt = judge.compare(asked, KIND)
    assert sorted(i for i, _ in told) == list(range(len(asked))) and stub.num_faults
    assert all(verdicts[i] is verdict and verdict.error is None for i, verdict in told)
    assert len(set(sold)) == len(sold)
    if fault != "no_logprobs":
        assert len(sold) == len(asked) and verdicts == unhurt
    else:
        assert len(sold) > len(asked) and any(v.details["method"] == "votes" for v in verdicts)


def test_a_server_that_fails_every_call_is_given_up_in_time_and_the_rest_is_bought_later():
    asked, told = pairs(20), {}
    with StubServer(fault="500", latency_s=0.01) as stub:
        judge = checked_judge(stub, replace(PATIENT, max_calls=1000, patience_s=0.3))
        stub.faulty = False

        def breaks_after_six(index, verdict):
            told[index] = verdict
            stub.faulty = len(told) >= 6

        with pytest.raises(ServerUnavailable) as stopped:
            judge.compare(asked, KIND, breaks_after_six)
        message = str(stopped.value)
        assert f"judge server {stub.url}: no call was answered for" in message and "\n" not in message
        assert f"{len(told)} of 20 calls were answered" in message and 6 <= len(told) < 20
        assert all(verdict.error is None for verdict in told.values())
        # What a ledger kept is not asked again; another process would have another judge.
        stub.faulty = False
        left = [asked[i] for i in range(20) if i not in told]
        verdicts = judge_of(stub).compare(left, KIND)
    assert all(verdict.probability is not None for verdict in verdicts)
    assert len(questions(stub)) == len(set(questions(stub))) == 20


@pytest.mark.parametrize("fault", ["429", "trickle", "no_text", "redirect"])
def test_a_server_that_fails_from_the_start_is_found_by_the_check(fault):
    policy = RetryPolicy(first_delay_s=0.004, call_timeout_s=0.1 if fault == "trickle" else 60.0)
    with StubServer(fault=fault) as stub:
        with pytest.raises(RuntimeError, match=f"judge server {stub.url} cannot be used: ") as error:
            judge_of(stub, policy).compare(pairs(3), KIND)
        assert "\n" not in str(error.value) and sum(stub.asked.values()) <= 3 and not stub.sold


def test_ctrl_c_ends_a_run_at_once_and_keeps_what_was_answered():
    told = {}
    with StubServer(fault="hang") as stub:
        judge = checked_judge(stub, RetryPolicy(call_timeout_s=600.0), max_concurrency=2)
        stub.faulty = False

        def hangs_after_three(index, verdict):
            told[index] = verdict
            if len(told) == 3:
                stub.faulty = True
                # By then the other calls hang.
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

        # Ignored where the tests run in the background.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            judge.compare(pairs(20), KIND, hangs_after_three)
        signal.signal(signal.SIGINT, before)
        # Before the deadline of a call.
        assert time.monotonic() - start < 600 and 3 <= len(told) < 20


def test_the_load_is_shared_and_a_server_that_dies_in_the_middle_loses_and_repeats_nothing():
    one, told = StubServer(latency_s=0.005), []
    one.__enter__()

    def done(index, verdict):
        told.append(index)
        if len(told) == 60:
            one.__exit__()  # Its socket closes, and what it was answering is cut off.

    with StubServer(latency_s=0.005) as other:
        judge = ServerJudge([one.url, other.url], "judge-1", max_concurrency=4, policy=PATIENT)
        verdicts = judge.compare(pairs(200), KIND, done)
        assert sorted(told) == list(range(200)) and all(verdict.probability is not None for verdict in verdicts)
        first, second = questions(one), questions(other)
        assert len(first) > 15 and len(second) > 100
        # Only what was in flight on the dead one can have been sold twice.
        assert len(set(first) & set(second)) <= 4 and len(set(first) | set(second)) == 200
        # At the next start it is left to the other.
        again = ServerJudge([one.url, other.url], "judge-1", policy=PATIENT)
        assert again.compare(pairs(5), KIND) == verdicts[:5]


def test_all_principles_are_asked_at_once():
    with StubServer(latency_s=0.05) as stub:
        judge = judge_of(stub, max_concurrency=8)
        # Four questions by each principle: eight are open only if none waits for the other principle.
        judge_pairs(judge, pairs(2), Constitution("both", (KIND, BRIEF)))
        assert stub.most_open == 8


def test_an_ensemble_keeps_the_answers_of_each_member_and_asks_only_who_failed(tmp_path):
    with StubServer("a") as one, StubServer("b", fault="500") as other, Ledger(tmp_path / "ledger.db") as ledger:
        other.fails_on = lambda body: "> prompt 3\n" in body["messages"][0]["content"]
        policy = replace(PATIENT, max_calls=2)
        judge = EnsembleJudge([judge_of(stub, policy) for stub in (one, other)])
        asker = Asker(judge, Constitution("kind", (KIND,)), ledger, 1.0)
        assert [len(label.errors) for label in asker.labels(pairs(6))] == [0, 0, 0, 2, 0, 0]
        sold = len(questions(one))
        other.faulty = False
        assert not any(label.errors for label in asker.labels(pairs(6)))
        assert len(questions(one)) == sold == 12 and len(questions(other)) == 12
