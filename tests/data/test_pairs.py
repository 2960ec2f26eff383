"""Pairs in every usual shape become the same rows for a judge and for a reward model."""

import pytest
from datasets import Dataset

from onetrunk.data.pairs import how_read, read_groups, read_pairs
from onetrunk.data.rows import check_preferences, split_by_prompt, template_variables
from onetrunk.data.sharded import load_sharded_rows

CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def human(question, answer):
    return f"\n\nHuman: {question}\n\nAssistant: {answer}"


def read(*rows):
    return check_preferences(read_pairs(Dataset.from_list(list(rows))))


def messages(cell):
    return [{key: value for key, value in message.items() if value is not None} for message in cell]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [("I'm not sure.", "I don't know."), ("Oak.", "Oaks, mostly."), ("Sure! Try this.", "Sure! No.")],
)
def test_a_transcript_is_cut_where_its_last_answer_begins(chosen, rejected):
    before = human("Hi", "Hello.") + "\n\nHuman: A tree?\n\nAssistant:"
    row = {"chosen": f"{before} {chosen}", "rejected": f"{before} {rejected}"}
    (pair,) = read(row)
    assert pair == {"prompt": before, "chosen": f" {chosen}", "rejected": f" {rejected}"}
    (group,) = read_groups([row], list(row))
    assert group.prompt == before and group.texts == (f" {chosen}", f" {rejected}")


@pytest.mark.parametrize(
    ("before", "chosen", "rejected"),
    [("The sky is", " clear", " cloudy"), ("Tree?\n\n", "Oak", "Olive"), ("He said", " I'm in", " I'd go")],
)
def test_text_without_turns_is_cut_between_words(before, chosen, rejected):
    (pair,) = read({"chosen": before + chosen, "rejected": before + rejected})
    assert pair == {"prompt": before, "chosen": chosen, "rejected": rejected}


def test_a_question_whose_answers_begin_alike_is_not_in_both_parts_of_a_split():
    answers = [("An oak grows.", "A car."), ("The oak tree.", "The oak wood."), ("The oak.", "The elm.")] * 8
    rows = [
        {"chosen": f"Question {i}: tree? {better}", "rejected": f"Question {i}: tree? {worse}"}
        for i in range(8)
        for better, worse in answers[:3]
    ]
    pairs = read(*rows)
    assert [c + r for c, r in zip(pairs["prompt"], pairs["chosen"], strict=True)] == [row["chosen"] for row in rows]
    train, held_out = split_by_prompt(pairs, 0.5, seed=1)
    questions = [{prompt.split("?")[0] for prompt in part["prompt"]} for part in (train, held_out)]
    assert not questions[0] & questions[1] and len(questions[0] | questions[1]) == 8


def test_a_reward_model_reads_ultrafeedback_as_a_judge_does():
    row = {"prompt": "Hi", "chosen": [user("Hi"), said("Hello")], "rejected": [user("Hi"), said("Go")], "score": 8.0}
    rows = Dataset.from_list([row] * 2)
    assert "conversations" in how_read(rows)
    pair = read(row)[0]
    (group,) = read_groups([row], list(row))
    assert pair["prompt"] == group.prompt == [user("Hi")] and pair["chosen"] == [said("Hello")] and pair["score"] == 8
    assert group.texts == ("Hello", "Go")


@pytest.mark.parametrize("form", ["text sides", "repeated", "shared answer"])
def test_other_mixtures_become_conversations(form):
    earlier = [user("Hi"), said("Hello"), user("A tree?")]
    row = {
        "text sides": {"prompt": earlier, "chosen": "Oak", "rejected": "Car"},
        "repeated": {"prompt": earlier, "chosen": [*earlier, said("Oak")], "rejected": [*earlier, said("Car")]},
        "shared answer": {"chosen": [*earlier, said("Oak")], "rejected": [*earlier, said("Car")]},
    }[form]
    assert read(row)[0] == {"prompt": earlier, "chosen": [said("Oak")], "rejected": [said("Car")]}


def test_a_prompt_never_ends_in_an_answer_that_both_sides_begin_with():
    sides = {name: [user("Hi"), said("Hello"), user(text), said("Yes")] for name, text in zip("ab", "XY", strict=True)}
    pair = read({"chosen": sides["a"], "rejected": sides["b"]})[0]
    assert pair["prompt"] == [user("Hi")] and pair["chosen"][0] == said("Hello")


@pytest.mark.parametrize("content", [None, ""])
def test_a_side_may_end_in_a_tool_call(content):
    called = said(content, tool_calls=[CALL])
    row = {"prompt": [user("Rain?")], "chosen": [called], "rejected": [said("No idea.")]}
    assert messages(read(row)[0]["chosen"])[-1]["tool_calls"] == [CALL]
    (group,) = read_groups([row], list(row))
    assert group.texts[1] == "No idea." and '"name": "weather"' in group.texts[0]
    logged = {"messages": [user("Rain?"), called]}
    assert "weather" in next(iter(read_groups([logged], list(logged)))).texts[0]


@pytest.mark.parametrize("calls", [[], "weather", ["weather"], [{"function": {"arguments": "{}"}}]])
def test_calls_without_a_name_and_messages_without_anything_are_named(calls):
    row = {"prompt": [user("Rain?")], "chosen": [said(None, tool_calls=calls)], "rejected": [said("No")]}
    with pytest.raises(ValueError, match="row 0: chosen has a message 0"):
        read(row)


def test_streamed_pairs_are_read_like_pairs_in_memory(tmp_path):
    rows = [{"chosen": human(f"Tree {i}?", "I'm an oak."), "rejected": human(f"Tree {i}?", "I do.")} for i in range(4)]
    path = tmp_path / "rows.parquet"
    Dataset.from_list(rows).to_parquet(path)
    streamed = check_preferences(read_pairs(load_sharded_rows(str(path))))
    assert [streamed[i] for i in range(4)] == list(read(*rows))


def test_a_tool_has_no_arguments_of_another_rows_tool():
    tools = [[{"name": "f", "parameters": {name: {"type": "string"}}}] for name in ("city", "day")]
    rows = Dataset.from_list([{"tools": own} for own in tools])
    assert [template_variables(row)["tools"] for row in rows] == tools
