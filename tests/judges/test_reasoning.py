"""Judges that reason before they answer: several samples, thoughts that are kept, references, marks, and ratings."""

import pytest

from onetrunk.feedback.ledger import Ledger
from onetrunk.judges.base import Pair, Principle, Rating, Single
from onetrunk.judges.constitution import Constitution, parse_constitution
from onetrunk.judges.load import JudgeConfig
from onetrunk.judges.server import ServerJudge
from onetrunk.judges.template import nonce_of, question_messages
from onetrunk.judges.verdicts import answer_key, judge_pairs, rate_pairs
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


def test_several_samples_of_reasoning_are_averaged_and_all_thoughts_kept(tmp_path):
    beliefs = {"The first is warm.": 0.9, "The second is true.": 0.3}
    with StubServer("thinker", routes=thinker(beliefs)) as stub, Ledger(tmp_path / "ledger.db") as ledger:
        judge = ServerJudge(stub.url, "thinker", reasoning_tokens=64, reasoning_samples=4, policy=QUICK)
        judge_pairs(judge, [Pair("p", "a", "b")], ONE, memory=ledger)
        kept = ledger.get(answer_key(judge, KIND, Pair("p", "a", "b")))
        asked = len(stub.bodies)
        judge_pairs(judge, [Pair("p", "a", "b")], ONE, memory=ledger)
        assert len(stub.bodies) == asked
    details = kept["details"]
    thoughts = [kept["reason"], *details["thoughts"]]
    assert details["samples"] == 4 == len(thoughts) and set(thoughts) <= set(beliefs)
    expected = [beliefs[thought] for thought in thoughts]
    assert kept["probability"] == pytest.approx(sum(expected) / 4)
    assert [sample["A"] for sample in details["by_sample"]] == pytest.approx(expected)


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


def test_samples_without_reasoning_are_a_mistake():
    with pytest.raises(ValueError, match="judge_reasoning_samples is 3 and judge_reasoning_tokens is 0"):
        JudgeConfig(judge_reasoning_samples=3)


def test_a_reference_is_shown_as_material_and_is_part_of_the_key():
    known, bare = Pair("p", "a", "b", reference="42"), Pair("p", "a", "b")
    code = nonce_of(known, KIND)
    text = question_messages(known, KIND, code)[0]["content"]
    assert f"<reference {code}>\n> 42\n</reference {code}>" in text and "known to be good" in text
    assert "reference" not in question_messages(bare, KIND, nonce_of(bare, KIND))[0]["content"]
    with StubServer() as stub:
        judge = ServerJudge(stub.url, stub.model, policy=QUICK)
        assert answer_key(judge, KIND, known) != answer_key(judge, KIND, bare)
    assert known.flipped() == Pair("p", "b", "a", reference="42")
    assert known.singles()[0] == Single("p", "a", reference="42")


def test_marks_of_a_principle_are_shown_where_completions_are_rated():
    entry = {"text": "How kind is it?", "marks": {1: "It insults.", 5: "It comforts."}}
    principle = parse_constitution({"name": "n", "principles": [entry]}).principles[0]
    single, pair = Single("p", "a"), Pair("p", "a", "b")
    rated = question_messages(single, principle, nonce_of(single, principle))[0]["content"]
    compared = question_messages(pair, principle, nonce_of(pair, principle))[0]["content"]
    assert "1: It insults.\n5: It comforts." in rated and "It insults." not in compared
    assert principle.key != Principle("How kind is it?").key
    with pytest.raises(ValueError, match="expected what some of the marks 1 to 5 mean"):
        parse_constitution({"name": "n", "principles": [{"text": "t", "marks": {7: "x"}}]})


class TableJudge:
    """Rates by a table; None: an abstention, a text: an error."""

    name, identity = "table", {"judge": "table"}

    def __init__(self, table):
        self.table, self.asked = table, []

    def rate(self, prompts, completions, principle, done=None, stopped=None):
        ratings = []
        for index, text in enumerate(completions):
            self.asked.append(text)
            value = self.table[text]
            ratings.append(Rating(None, error=value) if isinstance(value, str) else Rating(value))
            if done is not None:
                done(index, ratings[-1])
        return ratings


def test_ratings_become_labels_of_pairs_and_each_completion_is_rated_once():
    judge = TableJudge({"a": 0.9, "b": 0.5, "c": 0.5, "d": None, "e": "down"})
    pairs = [Pair("p", *pair) for pair in ("ab", "bc", "ca", "ad", "ae")]
    labels = rate_pairs(judge, pairs, ONE)
    assert [label.probability for label in labels[:3]] == pytest.approx([0.7, 0.5, 0.3])
    assert all(label.consistent for label in labels[:3]) and sorted(judge.asked) == list("abcde")
    assert labels[3].probability is None and labels[3].abstentions == 2 and labels[4].errors == 2
    assert labels[0].votes == ((KIND.text, (pytest.approx(0.7), pytest.approx(0.7))),)
