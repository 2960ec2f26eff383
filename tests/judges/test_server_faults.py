"""A server that stumbles: every kind of fault at 1, 10, 50 and 100%; nothing is lost, nothing is bought twice."""

import os
import signal
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest

from onetrunk.judges.judge import Pair, Principle
from onetrunk.judges.server import ServerJudge
from onetrunk.utils.calls import RetryPolicy, ServerUnavailable
from onetrunk.utils.http import MAX_BYTES
from tests.judges.stub_server import FAULTS, NOT_SOLD, OUT_OF_BOUNDS, StubServer

KIND = Principle("Which completion is kinder?")
PATIENT = RetryPolicy(
    max_calls=20,
    first_delay_s=0.004,
    max_delay_s=0.02,
    call_timeout_s=2.0,
    item_timeout_s=600.0,
    patience_s=300.0,
    # At a share of 50% a call hangs often, and never because of its question.
    max_timeouts=20,
)
IMPATIENT = replace(PATIENT, max_calls=1000, patience_s=0.3)
# Each of their faults costs a whole deadline.
SLOW = ("hang", "trickle")


def in_time(policy, fault):
    """Return a policy whose deadline only a server that hangs can miss: a busy machine answers late."""
    return policy if fault in SLOW else replace(policy, call_timeout_s=60.0)


def bought(stub):
    """Return how often each question was sold, without the control question, which is asked as often as need be."""
    return {question: count for question, count in stub.sold.items() if "> Say hello." not in question}


def pairs(count):
    return [Pair(f"prompt {i}", f"first {i}", f"second {i}") for i in range(count)]


def ready_judge(stub, policy=PATIENT, **settings):
    """Return a judge that has been checked while the server was well; the server's book is empty, and it may fail."""
    stub.faulty = False
    judge = ServerJudge(stub.url, "judge-1", policy=policy, **settings)
    judge.check()
    stub.faulty = True
    stub.asked.clear()
    stub.sold.clear()
    return judge


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_lost_and_nothing_is_bought_twice(fault, rate):
    asked = pairs(8 if fault in SLOW else 40)
    told = []
    with StubServer(fault=fault, rate=rate) as stub:
        judge = ready_judge(stub, in_time(PATIENT, fault))
        verdicts = judge.compare(asked, KIND, lambda i, verdict: told.append((i, verdict)))
        sold = bought(stub)
        stub.faulty = False
        unhurt = judge.compare(asked, KIND)
    assert sorted(i for i, _ in told) == list(range(len(asked)))
    assert all(verdicts[i] is verdict and verdict.error is None for i, verdict in told)
    assert stub.num_faults >= (1 if fault in SLOW else 10) or rate < 0.5
    assert set(sold.values()) == {1}
    if fault in NOT_SOLD:
        # One call for each question, and faults change nothing about the verdicts.
        assert sum(sold.values()) == len(asked) and verdicts == unhurt
    elif fault == "wrong_label":
        abstained = [v for v in verdicts if v.probability is None]
        assert sum(sold.values()) == len(asked) and len(abstained) == stub.num_faults
        assert all("of the probability" in v.reason for v in abstained)
    else:
        # Each reply without log probabilities is a vote, and makes one more call needed; the fifth decides.
        voted = [v for v in verdicts if v.details["method"] == "votes"]
        assert sum(sold.values()) == len(asked) + stub.num_faults - len(voted)
        assert all(sum(v.details["votes"].values()) == 5 for v in voted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", NOT_SOLD)
def test_a_server_that_fails_every_call_is_given_up_in_time_and_the_rest_is_bought_later(fault):
    asked, told = pairs(20), {}
    with StubServer(fault=fault, latency_s=0.01) as stub:
        judge = ready_judge(stub, in_time(IMPATIENT, fault))
        stub.faulty = False

        def breaks_after_six(index, verdict):
            told[index] = verdict
            stub.faulty = len(told) >= 6

        with pytest.raises(ServerUnavailable) as stopped:
            judge.compare(asked, KIND, breaks_after_six)
        message = str(stopped.value)
        assert f"judge server {stub.url} has answered no call for" in message and "\n" not in message
        assert f"{len(told)} of 20 were answered" in message and 6 <= len(told) < 20
        assert all(verdict.error is None for verdict in told.values())

        # What a ledger kept is not asked again; another process would have another judge.
        stub.faulty = False
        left = [i for i in range(20) if i not in told]
        again = ServerJudge(stub.url, "judge-1", policy=in_time(PATIENT, fault))
        stub.asked.clear()
        sold_before = sum(bought(stub).values())
        verdicts = again.compare([asked[i] for i in left], KIND)
    assert all(verdict.probability is not None for verdict in verdicts)
    # Where the deadline is short, an answer that comes late is sold and not read.
    assert sold_before == len(told) or (fault in SLOW and sold_before > len(told))
    assert sum(bought(stub).values()) - sold_before >= len(left)
    assert fault in SLOW or sum(bought(stub).values()) == 20


@pytest.mark.parametrize("fault", OUT_OF_BOUNDS)
def test_an_answer_out_of_bounds_fails_its_call_and_is_read_no_further(fault):
    policy = replace(PATIENT, call_timeout_s=60.0)
    with StubServer(fault=fault, rate=0.5) as stub:
        judge = ready_judge(stub, policy, max_concurrency=1)
        tracemalloc.start()
        verdicts = judge.compare(pairs(4), KIND)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert stub.num_faults > 0 and sum(stub.sold.values()) == 4
    assert all(verdict.probability is not None for verdict in verdicts)
    # The parts that were read, what the stub sends, and a little more; 256 MiB and more were on their way.
    assert peak < 2 * MAX_BYTES + 2**24
    with StubServer(fault=fault) as stub:
        with pytest.raises(RuntimeError, match="cannot be used: an answer (of more than 16 MiB|that nests more)"):
            ServerJudge(stub.url, "judge-1", policy=replace(policy, max_calls=1)).check()


@pytest.mark.parametrize("fault", NOT_SOLD)
def test_a_server_that_fails_from_the_start_is_found_by_the_check(fault):
    policy = in_time(RetryPolicy(first_delay_s=0.004, max_delay_s=0.02, call_timeout_s=0.1), fault)
    with StubServer(fault=fault) as stub:
        with pytest.raises(RuntimeError, match=f"judge server {stub.url}") as error:
            ServerJudge(stub.url, "judge-1", policy=policy).compare(pairs(3), KIND)
        assert "\n" not in str(error.value)
        assert sum(stub.asked.values()) <= 3 and not stub.sold


@pytest.mark.parametrize("fault", ["429", "500", "reset", "truncated_json"])
def test_votes_that_were_bought_are_kept_when_others_fail(fault):
    asked = pairs(20)
    # So few calls that many votes fail for good.
    policy = RetryPolicy(max_calls=1, first_delay_s=0.004)
    with StubServer(fault=fault, rate=0.3, logprobs=False) as stub:
        judge = ready_judge(stub, policy)
        verdicts, rounds = judge.compare(asked, KIND), 1
        assert any(v.error for v in verdicts) and any(v.probability is not None for v in verdicts)
        while left := [i for i, verdict in enumerate(verdicts) if verdict.error]:
            for i, verdict in zip(left, judge.compare([asked[i] for i in left], KIND), strict=True):
                verdicts[i] = verdict
            rounds += 1
            assert rounds < 40
    assert set(bought(stub).values()) == {1} and len(bought(stub)) == 5 * len(asked)


def test_a_retry_after_of_whole_seconds_and_of_a_date_is_waited_for():
    for fault in ("429_one_second", "429_next_second"):
        with StubServer(fault=fault, rate=1.0) as stub:
            judge = ready_judge(stub, RetryPolicy(first_delay_s=0.01, patience_s=5.0))
            stub.heals_after = 1
            start = time.monotonic()
            verdict = judge.compare(pairs(1), KIND)[0]
            assert verdict.probability is not None and time.monotonic() - start >= 1.0


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


def hangs_on(stub, text):
    """Let a server hang on questions that hold a text, and answer all others."""
    stub.hangs_on = lambda body: text in str(body["messages"])


@pytest.mark.slow
def test_questions_that_hang_fill_every_slot_and_the_others_are_answered_all_the_same():
    # Those on one prompt come first and together, as in a chunk; there are more of them than calls at once.
    asked = [Pair("hangs", f"first {i}", f"second {i}") for i in range(12)] + pairs(20)
    policy = RetryPolicy(
        max_calls=8, first_delay_s=0.004, max_delay_s=0.02, call_timeout_s=1.0, patience_s=0.5, max_timeouts=2
    )
    with StubServer() as stub:
        judge = ready_judge(stub, policy, max_concurrency=8)
        hangs_on(stub, "> hangs")
        verdicts = judge.compare(asked, KIND)
        # The next comparison of the same judge is not slowed down by what has hung.
        again = judge.compare(asked[12:], KIND)
    assert [v.error_kind for v in verdicts[:12]] == ["refused"] * 12
    assert all(
        "no answer within 1 s" in v.error and v.error.endswith("other calls were answered)") for v in verdicts[:12]
    )
    assert all(v.probability is not None for v in verdicts[12:]) and again == verdicts[12:]


@pytest.mark.parametrize("fault", ["500", "reset", "truncated_json"])
def test_a_question_on_which_a_server_always_fails_is_an_error_of_that_question(fault):
    asked = [Pair("breaks", f"first {i}", f"second {i}") for i in range(30)] + pairs(3)
    policy = RetryPolicy(max_calls=3, first_delay_s=0.004, max_delay_s=0.02, patience_s=0.01)
    with StubServer(fault=fault) as stub:
        judge = ready_judge(stub, policy)
        stub.fails_on = lambda body: "> breaks" in str(body["messages"])
        verdicts = judge.compare(asked, KIND)
    assert [v.error_kind for v in verdicts[:30]] == ["refused"] * 30
    assert all("3 times, while other calls were answered" in v.error for v in verdicts[:30])
    assert all(v.probability is not None for v in verdicts[30:])


def test_a_server_that_asks_for_fewer_calls_is_at_fault_itself():
    policy = RetryPolicy(max_calls=2, first_delay_s=0.004, max_delay_s=0.02)
    with StubServer(fault="429") as stub:
        judge = ready_judge(stub, policy)
        stub.fails_on = lambda body: "> prompt 1" in str(body["messages"])
        verdicts = judge.compare(pairs(4), KIND)
    assert [v.error_kind for v in verdicts if v.error] == ["server"] and "HTTP 429" in verdicts[1].error
