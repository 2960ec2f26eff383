"""Several servers: those of one model share its questions, those of different models are asked at the same time."""

import json
import logging
import threading

import pytest

from onetrunk.feedback.asking import Asker, FailureLimit
from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.constitution import Constitution
from onetrunk.judges.ensemble import EnsembleJudge
from onetrunk.judges.judge import Pair, Principle
from onetrunk.judges.judge_config import JudgeConfig, load_judge
from onetrunk.judges.labels import judge_pairs
from onetrunk.judges.server import ServerJudge
from onetrunk.utils.calls import RetryPolicy
from tests.judges.stub_server import StubServer

KIND, BRIEF = Principle("Which completion is kinder?"), Principle("Which completion is briefer?")
BOTH = Constitution("both", (KIND, BRIEF))
QUICK = RetryPolicy(first_delay_s=0.01, max_delay_s=0.05, call_timeout_s=20.0)


def pairs(count):
    return [Pair(f"prompt {i}", f"first {i}", f"second {i}") for i in range(count)]


def questions(stub):
    """Return the questions that a server has sold, without those of the check at startup."""
    return [q for q, n in stub.sold.items() for _ in range(n) if "> prompt" in json.loads(q)["messages"][0]["content"]]


def test_servers_of_one_model_are_one_judge_with_its_identity():
    with StubServer() as one, StubServer() as other:
        judge = load_judge(JudgeConfig(judge=[one.url, other.url], judge_model="judge-1"))
        alone = load_judge(JudgeConfig(judge=[one.url], judge_model="judge-1"))
        assert isinstance(judge, ServerJudge) and judge.identity == alone.identity
        verdicts = judge.compare(pairs(60), KIND)
        assert verdicts == alone.compare(pairs(60), KIND)
    several = load_judge(JudgeConfig(judge=["http://127.0.0.1:9/v1#model=a", "http://127.0.0.1:9/v1#model=b"]))
    assert isinstance(several, EnsembleJudge)


def test_the_load_is_shared_and_a_server_that_dies_in_the_middle_loses_and_repeats_nothing():
    one = StubServer(latency_s=0.005)
    one.__enter__()
    with StubServer(latency_s=0.005) as other:
        judge = ServerJudge([one.url, other.url], "judge-1", max_concurrency=4, policy=QUICK)
        told = []

        def done(index, verdict):
            told.append(index)
            if len(told) == 60:
                one.__exit__()  # Its socket closes, and what it was answering is cut off.

        verdicts = judge.compare(pairs(200), KIND, done)
    assert sorted(told) == list(range(200)) and all(verdict.probability is not None for verdict in verdicts)
    first, second = questions(one), questions(other)
    assert len(first) > 15 and len(second) > 100
    # Only what was in flight on the dead one can have been sold twice.
    assert len(set(first) & set(second)) <= 4 and len(set(first) | set(second)) == 200
    assert len(first) == len(set(first)) and len(second) == len(set(second))


def test_a_server_that_is_down_at_the_start_is_left_to_the_others(caplog):
    with StubServer() as up:
        judge = ServerJudge(["http://127.0.0.1:9/v1", up.url], "judge-1", policy=QUICK)
        with caplog.at_level(logging.WARNING):
            verdicts = judge.compare(pairs(20), KIND)
    assert all(verdict.error is None for verdict in verdicts) and "does not answer" in caplog.text
    with pytest.raises(RuntimeError, match="does not answer"):
        ServerJudge(["http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1"], "judge-1", policy=QUICK).check()


def test_all_principles_are_asked_at_once():
    with StubServer(latency_s=0.05) as stub:
        # Four questions by each principle: eight are open only if none waits for the other principle.
        judge_pairs(ServerJudge(stub.url, "judge-1", max_concurrency=8, policy=QUICK), pairs(2), BOTH)
        assert stub.most_open == 8


class Meeting:
    """A route that answers once another server was asked too: it needs both at the same time."""

    def __init__(self, number):
        self.barrier = threading.Barrier(number)

    def wait(self):
        self.barrier.wait(timeout=20)


def test_members_on_different_servers_are_asked_at_the_same_time():
    meeting, met = Meeting(2), []

    def meet(body):
        if "> prompt 0" in body["messages"][0]["content"] and "first 0" in body["messages"][0]["content"]:
            meeting.wait()
            met.append(body["model"])
        return 200

    with StubServer("a") as one, StubServer("b") as other:
        one.status_instead = other.status_instead = meet
        judges = [ServerJudge(stub.url, stub.model, policy=QUICK, max_concurrency=1) for stub in (one, other)]
        for judge in judges:
            judge.check()
        verdicts = EnsembleJudge(judges).compare(pairs(1), KIND)
    assert sorted(met) == ["a", "b"] and verdicts[0].probability is not None
    assert set(verdicts[0].details["members"]) == {"a", "b"}


def test_an_ensemble_keeps_the_answers_of_each_member_and_asks_only_who_failed(tmp_path):
    with StubServer("a") as one, StubServer("b", fault="500") as other, Ledger(tmp_path / "ledger.db") as ledger:
        other.fails_on = lambda body: "> prompt 3\n" in body["messages"][0]["content"]
        policy = RetryPolicy(max_calls=2, first_delay_s=0.01, max_delay_s=0.01, call_timeout_s=20.0)
        judge = EnsembleJudge([ServerJudge(stub.url, stub.model, policy=policy) for stub in (one, other)])
        asker = Asker(judge, Constitution("kind", (KIND,)), ledger, FailureLimit(1.0, "ensemble"))
        labels = asker.labels(pairs(6))
        assert [label.errors for label in labels] == [0, 0, 0, 2, 0, 0]
        sold = len(questions(one))
        other.faulty = False
        again = asker.labels(pairs(6))
        assert sum(label.errors for label in again) == 0
        assert len(questions(one)) == sold == 12 and len(questions(other)) == 12
