"""Shards partition the prompts whatever their order, and files of rows are whole or absent."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onetrunk.feedback.shards import Shard, read_rows, rows_file, shard_files
from onetrunk.judges.judge import prompt_key

message = st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=5)})
prompts = st.lists(st.text(max_size=5) | st.lists(message, min_size=1, max_size=2), max_size=30)


@given(prompts, st.integers(1, 7), st.randoms())
def test_every_prompt_is_in_exactly_one_shard_whatever_the_order(prompts, count, random):
    def taken(order):
        return [sorted(key for key in map(prompt_key, order) if Shard(i, count).takes(key)) for i in range(count)]

    parts = taken(prompts)
    assert sorted(sum(parts, [])) == sorted(map(prompt_key, prompts))
    shuffled = list(prompts)
    random.shuffle(shuffled)
    assert taken(shuffled) == parts


@pytest.mark.parametrize("text", ["3/2", "2/2", "0/0", "-1/2", "1", "a/b", "1/2/3", ""])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="write i/n"):
        Shard.parse(text)


def rows(count, conversational):
    turn = [{"role": "user", "content": "é\n"}]
    texts = [(turn, turn) if conversational else (f"p{i}", "c") for i in range(count)]
    return [
        {"prompt": prompt, "chosen": chosen, "probability": 0.1 * i, "consistent": i % 2 == 0, "votes": "[]"}
        for i, (prompt, chosen) in enumerate(texts)
    ]


@pytest.mark.parametrize("conversational", [False, True])
def test_rows_come_back_as_they_went_and_the_bytes_are_the_same_however_they_came(tmp_path, conversational):
    expected = rows(11, conversational)
    for name, size in (("a", 1), ("b", 5), ("c", 11)):
        with rows_file(tmp_path / f"{name}.jsonl") as write:
            for start in range(0, 11, size):
                write(expected[start : start + size])
    assert list(read_rows(tmp_path / "a.jsonl")) == expected
    assert len({(tmp_path / f"{name}.jsonl").read_bytes() for name in "abc"}) == 1


def test_a_writer_that_fails_leaves_the_old_file_and_a_killed_one_is_swept_up(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    (tmp_path / f".{path.name}.0123456789abcdef.tmp").write_text("killed")
    with pytest.raises(KeyError), rows_file(path) as write:
        write(rows(3, False))
        raise KeyError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_missing_shards_are_named(tmp_path):
    for name in ("p-00000-of-00003.jsonl", "p-00002-of-00003.jsonl"):
        (tmp_path / name).write_text(json.dumps({}) + "\n")
    with pytest.raises(RuntimeError, match="shards 1/3; run"):
        shard_files(tmp_path / "p.jsonl", 3)
    (tmp_path / "p-00001-of-00003.jsonl").touch()
    assert [path.name[6:7] for path in shard_files(tmp_path / "p.jsonl", 3)] == ["0", "1", "2"]
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(RuntimeError, match="delete it and make it again"):
        list(read_rows(tmp_path / "bad.jsonl"))
