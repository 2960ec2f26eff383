"""Judges that reason before they answer: several samples, thoughts that are kept, references, marks, and ratings."""

import pytest

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.judge import Pair, Principle
from onetrunk.judges.server import ServerJudge
from onetrunk.utils.calls import RetryPolicy
from tests.judges.stub_server import StubServer, candidates, completion

KIND = Principle("Which completion is kinder?")
ONE = Constitution("one", (KIND,))
QUICK = RetryPolicy(first_delay_s=0.004, max_delay_s=0.02, call_timeout_s=20.0)


def thinker(shares_by_thought):
    """Return a route that writes one of these thoughts, by the seed, and then the probabilities that belong to it."""
    thoughts = list(shares_by_thought)

    def answer(body):
        messages = body["messages"]
        if body["max_tokens"] == 64:
            return 200, completion("thinker", thoughts[body["seed"] % len(thoughts)])
        thought = messages[-2]["content"] if len(messages) > 1 else thoughts[0]
        p = shares_by_thought[thought]
        return 200, completion("thinker", "A", [candidates("A", {"A": p, "B": 1 - p})])

    return {"/v1/chat/completions": answer}


def test_one_sample_has_no_list_of_thoughts():
    with StubServer("thinker", routes=thinker({"Hm.": 0.8})) as stub:
        judge = ServerJudge(stub.url, "thinker", reasoning_tokens=64, policy=QUICK)
        verdict = judge.compare([Pair("p", "a", "b")], KIND)[0]
    assert verdict.reason == "Hm." and verdict.details == {"method": "logprobs", "label_mass": 1.0}


@pytest.mark.parametrize("thinks", ["reasoning", "reasoning_content", "inline"])
def test_the_thoughts_of_a_model_that_reasons_by_itself_are_kept(thinks):
    with StubServer(thinks=thinks) as stub:
        judge = ServerJudge(stub.url, stub.model, verdict_tokens=256, samples=3, policy=QUICK)
        verdict = judge.compare([Pair("p", "a", "b")], KIND)[0]
    thoughts = [verdict.reason, *verdict.details["thoughts"]]
    assert len(thoughts) == 3 and all("let me see" in thought for thought in thoughts)


def test_a_long_thought_is_kept_without_its_middle():
    with StubServer("thinker", routes=thinker({"x" * 9000: 0.8})) as stub:
        judge = ServerJudge(stub.url, "thinker", reasoning_tokens=64, policy=QUICK)
        reason = judge.compare([Pair("p", "a", "b")], KIND)[0].reason
    assert len(reason) < 4100 and "characters are left out here" in reason
