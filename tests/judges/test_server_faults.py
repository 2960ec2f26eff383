"""A server that stumbles, and several servers of one model: nothing is lost, nothing is bought twice."""

import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from onetrunk.feedback.asking import Asker
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Principle
from onetrunk.judges.judge_config import EnsembleJudge
from onetrunk.judges.labels import judge_pairs
from onetrunk.judges.server import ServerJudge
from onetrunk.servers.errors import ServerUnavailable
from onetrunk.servers.fleet import RetryPolicy
from onetrunk.utils.ledger import Ledger
from tests.judges.stub_server import StubServer
from tests.judges.test_server import KIND, pairs

BRIEF = Principle("Which completion is briefer?")
# A deadline that only a server that hangs can miss: a busy machine answers late.
PATIENT = RetryPolicy(
    max_calls=20, first_delay_s=0.004, max_delay_s=0.02, call_timeout_s=60.0, patience_s=300.0, max_timeouts=20
)
HANGS = replace(PATIENT, call_timeout_s=0.5)


def questions(stub):
    """Return the questions that a server has sold, without those of the check at startup."""
    return [q for q, n in stub.sold.items() for _ in range(n) if "> prompt" in json.loads(q)["messages"][0]["content"]]


def ready_judge(stub, policy=PATIENT, **settings):
    """Return a judge that has been checked while the server was well."""
    stub.faulty = False
    judge = ServerJudge(stub.url, "judge-1", policy=policy, **settings)
    judge.check()
    stub.faulty = True
    return judge


@pytest.mark.parametrize("fault", ["500", "hang", "other_model", "no_logprobs"])
def test_nothing_is_lost_and_nothing_is_bought_twice(fault):
    asked, told = pairs(4 if fault == "hang" else 40), []
    with StubServer(fault=fault, rate=0.5) as stub:
        judge = ready_judge(stub, HANGS if fault == "hang" else PATIENT)
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


@pytest.mark.parametrize("fault", ["500", "html_in_200"])
def test_a_server_that_fails_every_call_is_given_up_in_time_and_the_rest_is_bought_later(fault):
    asked, told = pairs(20), {}
    with StubServer(fault=fault, latency_s=0.01) as stub:
        judge = ready_judge(stub, replace(PATIENT, max_calls=1000, patience_s=0.3))
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
        verdicts = ServerJudge(stub.url, "judge-1", policy=PATIENT).compare(left, KIND)
    assert all(verdict.probability is not None for verdict in verdicts)
    assert len(questions(stub)) == len(set(questions(stub))) == 20


@pytest.mark.parametrize("fault", ["429", "trickle", "no_text", "redirect"])
def test_a_server_that_fails_from_the_start_is_found_by_the_check(fault):
    policy = RetryPolicy(first_delay_s=0.004, call_timeout_s=0.1 if fault == "trickle" else 60.0)
    with StubServer(fault=fault) as stub:
        with pytest.raises(RuntimeError, match=f"judge server {stub.url} cannot be used: ") as error:
            ServerJudge(stub.url, "judge-1", policy=policy).compare(pairs(3), KIND)
        assert "\n" not in str(error.value) and sum(stub.asked.values()) <= 3 and not stub.sold


def test_ctrl_c_ends_a_run_at_once_and_keeps_what_was_answered():
    told = {}
    with StubServer(fault="hang") as stub:
        judge = ready_judge(stub, RetryPolicy(call_timeout_s=600.0), max_concurrency=2)
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
        judge = ServerJudge(stub.url, "judge-1", max_concurrency=8, policy=PATIENT)
        # Four questions by each principle: eight are open only if none waits for the other principle.
        judge_pairs(judge, pairs(2), Constitution("both", (KIND, BRIEF)))
        assert stub.most_open == 8


def test_an_ensemble_keeps_the_answers_of_each_member_and_asks_only_who_failed(tmp_path):
    with StubServer("a") as one, StubServer("b", fault="500") as other, Ledger(tmp_path / "ledger.db") as ledger:
        other.fails_on = lambda body: "> prompt 3\n" in body["messages"][0]["content"]
        policy = replace(PATIENT, max_calls=2)
        judge = EnsembleJudge([ServerJudge(stub.url, stub.model, policy=policy) for stub in (one, other)])
        asker = Asker(judge, Constitution("kind", (KIND,)), ledger, 1.0)
        assert [len(label.errors) for label in asker.labels(pairs(6))] == [0, 0, 0, 2, 0, 0]
        sold = len(questions(one))
        other.faulty = False
        assert not any(label.errors for label in asker.labels(pairs(6)))
        assert len(questions(one)) == sold == 12 and len(questions(other)) == 12
