"""Tests of `onetrunk.data.files`: what is read, and what is refused with which words."""

import json

import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars

from onetrunk.data.files import load_rows

disable_progress_bars()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


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
    assert load_rows(paths[0], split="train[:1]").to_list() == expected[:1]


def test_a_changed_file_is_read_again(tmp_path):
    path = written(tmp_path, "a.jsonl", '{"prompt": "cat"}\n')
    assert load_rows(path)["prompt"] == ["cat"]
    path.write_text('{"prompt": "bird"}\n')
    assert load_rows(str(path))["prompt"] == ["bird"]


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
        ("broken.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"\n{"prompt": "c"}\n', "broken.jsonl line 3"),
        ("cut.jsonl", '{"prompt": "a"}\n{"prompt": "b', "cut.jsonl line 2"),
        ("broken.json", '[{"prompt": "a"},\n {"prompt": }]', "broken.json line 2"),
        ("scalars.jsonl", "1\n2\n", "line 1: expected an object with columns"),
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n\n", "split 'train'"),
        ("ragged.csv", "prompt,x\na,1\nb,2,3,4\n", "Expected 2 fields in line 3, saw 4"),
        ("header.csv", "prompt,x\n", "split 'train'"),
        ("damaged.parquet", "PAR1", "damaged.parquet cannot be read"),
        ("rows.txt", "a\n", "suffix '.txt'; expected one of .jsonl, .json, .parquet, .csv"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, name, text, reason):
    with pytest.raises(ValueError, match=reason):
        load_rows(written(tmp_path, name, text))


@pytest.mark.parametrize("name", ["./rows", "/nowhere/rows", "~/nowhere-rows", "a/b/c", "rows.jsonl", "org/rows.csv"])
def test_a_missing_path_is_not_looked_for_on_the_hub(monkeypatch, name):
    def asked(*_args, **_settings):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("datasets.load_dataset", asked)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_rows(name)


def test_one_separator_is_a_path_only_inside_an_existing_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(FileNotFoundError, match="data/rows does not exist"):
        load_rows("data/rows")
    # The tests run offline, so a name that is not a path ends at the Hub that does not answer.
    with pytest.raises(RuntimeError, match="the Hub did not answer for dataset owner/rows"):
        load_rows("owner/rows")


def test_an_unknown_split_is_refused_with_those_there_are(tmp_path):
    DatasetDict({"fit": Dataset.from_list([{"prompt": "a"}])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="has the splits fit, got 'test'"):
        load_rows(tmp_path / "saved", split="test")
    with pytest.raises(ValueError, match="only the split 'train', got 'test'"):
        load_rows(written(tmp_path, "a.jsonl", '{"prompt": "a"}\n'), split="test")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="holds no .jsonl"):
        load_rows(tmp_path / "nothing")


def folder_and_a_file_beside_it(tmp_path):
    (tmp_path / "rows").mkdir()
    written(tmp_path / "rows", "a.jsonl", '{"prompt": "a"}\n')
    return tmp_path / "rows", written(tmp_path, "private.jsonl", '{"prompt": "private"}\n')


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "entry",
    [
        "data_files: ../private.jsonl",
        "data_files: [a.jsonl, FOLDER/private.jsonl]",
        "data_files: [{split: train, path: [a.jsonl, ../*.jsonl]}]",
        "data_files: {train: ../private.jsonl}",
        "data_files: https://example.com/a.jsonl",
        "data_dir: ..",
    ],
)
def test_a_card_may_not_name_files_outside_of_its_folder(tmp_path, card, entry):
    rows, private = folder_and_a_file_beside_it(tmp_path)
    lines = ["configs:", "- config_name: default", f"  {entry.replace('FOLDER', str(tmp_path))}"]
    text = "\n".join(["---", *lines, "---", ""] if card == "README.md" else lines)
    written(rows, card, text)
    with pytest.raises(ValueError, match="expected a path inside"):
        load_rows(rows)


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
def test_a_card_whose_aliases_stand_for_billions_of_values_is_refused(tmp_path, card):
    rows = tmp_path / "rows"
    rows.mkdir()
    written(rows, "a.jsonl", '{"prompt": "a"}\n')
    lines = ["configs: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"k{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    written(rows, card, "\n".join(["---", *lines, "---", ""] if card == "README.md" else lines))
    with pytest.raises(ValueError, match="holds more than 100000 values"):
        load_rows(str(rows))


def test_a_card_that_names_files_of_its_folder_is_followed_links_included(tmp_path):
    rows, private = folder_and_a_file_beside_it(tmp_path)
    (rows / "b.jsonl").symlink_to(private)  # as in the Hub's cache
    written(rows, "README.md", "---\nconfigs:\n- config_name: default\n  data_files: b*.jsonl\n---\n")
    assert load_rows(rows)["prompt"] == ["private"]


def test_a_saved_dataset_may_not_name_files_outside_of_its_folder(tmp_path):
    Dataset.from_list([{"prompt": "private"}]).save_to_disk(tmp_path / "private")
    arrow = next((tmp_path / "private").glob("*.arrow"))
    for named in (str(arrow), f"../private/{arrow.name}", "linked.arrow"):
        folder = tmp_path / f"saved-{len(named)}"
        Dataset.from_list([{"prompt": "a"}]).save_to_disk(folder)
        (folder / "linked.arrow").symlink_to(arrow)
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, "_data_files": [{"filename": named}]}))
        with pytest.raises(ValueError, match="a file that .*state.json names"):
            load_rows(folder)
    DatasetDict({"train": Dataset.from_list([{"prompt": "a"}])}).save_to_disk(tmp_path / "dict")
    (tmp_path / "dict/dataset_dict.json").write_text(json.dumps({"splits": ["../private"]}))
    with pytest.raises(ValueError, match="a split that .*dataset_dict.json names"):
        load_rows(tmp_path / "dict", split="../private")


def test_a_cache_that_takes_no_files_is_not_taken_for_damaged_rows(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file/cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
    with pytest.raises(
        RuntimeError, match=f"^{cache}, where rows are cached, cannot be written .Not a directory.; make"
    ):
        load_rows(tmp_path / "rows.jsonl")
