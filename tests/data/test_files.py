"""Tests of `onetrunk.data.files`: what is read, and what is refused with which words."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from onetrunk.data.files import load_rows
from onetrunk.data.sharded import load_sharded_rows


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_messages_of_sharegpt_are_converted_and_one_line_says_how_many(tmp_path, caplog):
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    rows = load_rows(written(tmp_path, "a.jsonl", (json.dumps({"conversations": talk, "id": 1}) + "\n") * 2))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    assert rows.to_list() == [{"messages": messages, "id": 1}] * 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "2 rows in ShareGPT's form (conversations): from and value are role and content"
    assert load_rows(tmp_path / "a.jsonl", columns={"prompt": "conversations"})["prompt"] == [messages] * 2
    with pytest.raises(ValueError, match="which has conversations, id"):
        load_rows(tmp_path / "a.jsonl", columns={"prompt": "messages"})


def test_a_from_of_another_column_is_the_users_own_and_a_row_without_a_conversation_stays(tmp_path):
    edges = [{"from": 0, "to": 3, "value": 5}]
    row = {"prompt": "the cat", "edges": edges, "spans": [{"from": "a"}]}
    assert load_rows(written(tmp_path, "a.jsonl", json.dumps(row))).to_list() == [row]
    lines = [{"conversations": [{"from": "human", "value": "hi"}]}, {"conversations": None}]
    rows = load_rows(written(tmp_path, "b.jsonl", "".join(json.dumps(line) + "\n" for line in lines)))
    assert rows.to_list() == [{"messages": [{"role": "user", "content": "hi"}]}, {"messages": None}]


def test_a_path_with_brackets_is_no_pattern(tmp_path):
    (tmp_path / "data [v2]").mkdir()
    assert load_rows(written(tmp_path / "data [v2]", "rows[1].jsonl", '{"prompt": "a"}\n')).to_list() == [
        {"prompt": "a"}
    ]


def test_every_format_gives_the_same_rows(tmp_path):
    expected = [{"prompt": "the cat", "level": 1}, {"prompt": "a dog", "level": 2}]
    lines = "".join(json.dumps(row) + "\n" for row in expected)
    Dataset.from_list(expected).to_parquet(tmp_path / "a.parquet")
    Dataset.from_list(expected).save_to_disk(tmp_path / "saved")
    DatasetDict({"train": Dataset.from_list(expected)}).save_to_disk(tmp_path / "saved_dict")
    folder = tmp_path / "folder"
    folder.mkdir()
    paths = [
        written(tmp_path, "a.jsonl", lines),
        written(tmp_path, "lines.json", lines),
        written(tmp_path, "list.json", json.dumps(expected)),
        written(tmp_path, "a.csv", "prompt,level\nthe cat,1\na dog,2\n"),
        tmp_path / "a.parquet",
        tmp_path / "saved",
        tmp_path / "saved_dict",
        written(folder, "train.jsonl", lines).parent,
    ]
    for path in paths:
        assert load_rows(path).to_list() == expected, path
        assert load_rows(path, split="train[:1]").to_list() == expected[:1], path


def test_columns_are_renamed_also_in_a_circle(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"question": "q", "answer": "a"}\n')
    assert load_rows(path, columns={"prompt": "question"}).to_list() == [{"prompt": "q", "answer": "a"}]
    swapped = load_rows(path, columns={"question": "answer", "answer": "question"})
    assert swapped.to_list() == [{"answer": "q", "question": "a"}]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"prompt": "text"}, "has question, answer"),
        ({"prompt": "question", "completion": "question"}, "distinct columns"),
        ({"answer": "question"}, "already has answer"),
    ],
)
def test_a_rename_that_cannot_be_is_refused(tmp_path, columns, reason):
    path = written(tmp_path, "a.jsonl", '{"question": "q", "answer": "a"}\n')
    with pytest.raises(ValueError, match=reason):
        load_rows(path, columns=columns)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n', "a.jsonl cannot be read as split 'train': JSON parse"),
        ("empty.jsonl", "", "is empty"),
        ("ragged.csv", "prompt,x\na,1\nb,2,3,4\n", "Expected 2 fields in line 3, saw 4"),
        ("damaged.parquet", "PAR1", "damaged.parquet cannot be read"),
        ("rows.txt", "a\n", "rows.txt does not end in one of .jsonl, .json, .parquet, .csv"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, name, text, reason):
    with pytest.raises(ValueError, match=reason):
        load_rows(written(tmp_path, name, text))


@pytest.mark.parametrize("name", ["./rows", "~/nowhere-rows", "~data/rows", "a/b/c"])
def test_a_missing_path_is_not_looked_for_on_the_hub(monkeypatch, name):
    def asked(*_args, **_settings):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("datasets.load_dataset_builder", asked)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_rows(name)


def test_one_separator_is_a_path_only_inside_an_existing_folder(empty_folder):
    (empty_folder / "data").mkdir()
    with pytest.raises(FileNotFoundError, match="data/rows does not exist"):
        load_rows("data/rows")
    with pytest.raises(FileNotFoundError, match="rows.csv does not exist"):
        load_rows("org/rows.csv")
    # The tests run offline, so a name that is not a path ends at the Hub that does not answer.
    with pytest.raises(RuntimeError, match="owner/rows cannot be reached"):
        load_rows("owner/rows")


@pytest.mark.parametrize("name", ["text", "./json", "csv"])
def test_a_folder_with_the_name_of_a_builder_is_read_as_a_folder(empty_folder, name):
    for folder in ("text", "json", "csv"):
        (empty_folder / folder).mkdir()
        (empty_folder / folder / "train.jsonl").write_text(json.dumps({"prompt": folder}) + "\n")
    assert load_rows(name)["prompt"] == [Path(name).name]


def test_an_unknown_split_is_refused_with_those_there_are(tmp_path):
    DatasetDict({"fit": Dataset.from_list([{"prompt": "a"}])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="has the splits fit, got 'test'"):
        load_rows(tmp_path / "saved", split="test")
    with pytest.raises(ValueError, match=r"has the splits fit, got 'fit\[1\]'"):
        load_rows(tmp_path / "saved", split="fit[1]")
    with pytest.raises(ValueError, match=r"a.jsonl cannot be read as split 'test': Unknown split .*'train'"):
        load_rows(written(tmp_path, "a.jsonl", '{"prompt": "a"}\n'), split="test")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no .jsonl"):
        load_rows(tmp_path / "nothing")


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize("load", [load_rows, load_sharded_rows])
def test_a_dataset_card_names_files_of_its_folder_only(tmp_path, load, is_absolute):
    (tmp_path / "outside.jsonl").write_text('{"prompt": "not given"}\n')
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "inside.jsonl").write_text('{"prompt": "given"}\n')
    card = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
    (folder / "README.md").write_text(card.format(tmp_path / "outside.jsonl" if is_absolute else "../outside.jsonl"))
    with pytest.raises(ValueError, match=r"its README\.md names .*outside\.jsonl, which is not in that folder"):
        load(str(folder))
    (folder / "README.md").write_text(card.format("inside.jsonl"))
    assert len(load(str(folder))) == 1
