"""Files are whole or absent, reads name what they could not read, names and folders are checked."""

import math
import os
import stat

import pytest
import torch
from filelock import FileLock

from onetrunk.utils import files


def names_in(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_what_is_written_is_read_back(tmp_path):
    folder, content = tmp_path / "new", {"b": [1, 2.5, None], "a": "ü"}
    files.atomic_write_text(folder / "a.txt", "grün\r\nblau\n")
    files.atomic_write_bytes(folder / "a.bin", b"\x00\r\n\xff")
    files.atomic_write_json(folder / "a.json", content)
    assert (folder / "a.txt").read_bytes() == "grün\r\nblau\n".encode()
    assert (folder / "a.bin").read_bytes() == b"\x00\r\n\xff"
    assert list(files.read_json(folder / "a.json").items()) == list(content.items())
    assert names_in(folder) == ["a.bin", "a.json", "a.txt"]


@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_fault_while_writing_leaves_the_old_file_and_no_piece(tmp_path, monkeypatch, point):
    files.atomic_write_text(tmp_path / "a.txt", "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, point, full)
    with pytest.raises(OSError, match="No space left"):
        files.atomic_write_text(tmp_path / "a.txt", "new")
    monkeypatch.undo()
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names_in(tmp_path) == ["a.txt"]


def test_data_is_synced_before_the_rename_and_the_folder_after(tmp_path, monkeypatch):
    events = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        events.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_fsync(descriptor)

    def replace(source, target):
        events.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    files.atomic_write_text(tmp_path / "a.txt", "a")
    assert events == ["file", "rename", "folder"]


@pytest.mark.parametrize("content", [None, b'{"a": 1', b"\xff\xfe{}"])
def test_unreadable_json_is_named(tmp_path, content):
    path = tmp_path / "state.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RuntimeError, match="state.json"):
        files.read_json(path)


def test_tensors_come_back_bitwise(tmp_path):
    shared = torch.randn(4, 6)
    tensors = {
        "float": torch.randn(3, 2, requires_grad=True),
        "half": torch.randn(5).bfloat16(),
        "ids": torch.arange(7),
        "empty": torch.zeros(0, 3),
        "transposed": shared.T,
        "row": shared[1],
    }
    files.save_tensors(tmp_path / "a.safetensors", tensors)
    loaded = files.load_tensors(tmp_path / "a.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor.detach())
    assert names_in(tmp_path) == ["a.safetensors"]


def test_unreadable_tensors_are_named(tmp_path):
    path = tmp_path / "head.safetensors"
    with pytest.raises(RuntimeError, match="head.safetensors"):
        files.load_tensors(path)
    files.save_tensors(path, {"a": torch.ones(100)})
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match="head.safetensors"):
            files.load_tensors(path)


def test_an_output_folder_is_made_and_left_empty(tmp_path):
    folder = files.require_output_dir(str(tmp_path / "a" / "b"))
    assert folder.is_dir() and names_in(folder) == []
    assert files.require_output_dir(folder) == folder


def test_only_temporary_files_of_killed_writers_are_deleted(tmp_path):
    names = [".a.json.0123456789abcdef.tmp", ".b[1].txt.fedcba9876543210.tmp", "a.json", ".a.json.tmp", ".b.tmp"]
    for name in names:
        (tmp_path / name).touch()
    files.delete_temporaries(tmp_path, "b[1].txt")
    assert names_in(tmp_path) == sorted(set(names) - {names[1]})
    files.delete_temporaries(tmp_path)
    assert names_in(tmp_path) == sorted(names[2:])


def test_json_of_others_that_nests_too_deeply_or_has_a_giant_number_is_a_value_error_or_infinite():
    for text in ("[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            files.parse_json(text)
    assert files.parse_json(f"[{'9' * 400}, -{'9' * 5000}, 1{'0' * 200}, -3]") == [math.inf, -math.inf, 10**200, -3]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\n", "é", "a" * 97, None])
def test_a_name_that_could_lead_a_path_elsewhere_is_rejected(name):
    assert files.require_name("run-1.2_b", "run_name") == "run-1.2_b"
    with pytest.raises(ValueError, match="^run_name is "):
        files.require_name(name, "run_name")


BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n" for i in range(40))
ENDLESS = "is not YAML: it holds more than 100,000 values or 50 levels"
FAULTS = {
    "a key twice": ("a: {b: 1, c: 2}\na: 3\n", "line 2: a is already given in line 1"),
    "an inner key twice": ("a: {}\nb: {c: 1, c: 2}\n", "line 2: c is already given in line 2"),
    "no text as a key": ("a: 1\nno: 2\n", "line 2: the key 'no' is not text for YAML (bool)"),
    "unclosed": ("a: [1\n", "line 2 is not YAML"),
    "unclosed and deep": ("[" * 5000, "holds a value that cannot be read"),
    "no text": (b"\xff\xfe", "is not UTF-8 text"),
    "bomb": (BOMB, ENDLESS),
    "merges": (MERGES, ENDLESS),
    "loop": ("a: &a [*a]", ENDLESS),
    "loop of mappings": ("a: &a {b: *a}", ENDLESS),
    "deep": ("a: " + "[" * 60 + "]" * 60, ENDLESS),
    "long": ("#" * 2**21, "is not YAML: it has more than 1,048,576 characters"),
}


@pytest.mark.parametrize(("text", "sentence"), FAULTS.values(), ids=FAULTS)
def test_yaml_that_is_ambiguous_damaged_endless_or_too_large_is_one_error_with_its_line(tmp_path, text, sentence):
    (tmp_path / "x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as raised:
        files.read_yaml(tmp_path / "x.yaml")
    assert f"{tmp_path / 'x.yaml'} {sentence}" in str(raised.value)


def test_aliases_and_nested_merge_keys_are_read(tmp_path):
    (tmp_path / "x.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: *a\n")
    assert files.read_yaml(tmp_path / "x.yaml") == (
        {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1}},
        {"a": 1, "b": 2, "c": 3},
    )


def test_a_file_has_one_writer_whose_lock_is_not_written_through_a_link(tmp_path):
    refused = pytest.raises(RuntimeError, match="f is being written by another process .*wait for it, or stop it")
    with FileLock(tmp_path / "f.lock"), refused, files.write_lock(tmp_path / "f"):
        pass
    with files.write_lock(tmp_path / "f"), files.write_lock(tmp_path / "f"):
        pass
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "g.lock").symlink_to(other)
    with pytest.raises((OSError, RuntimeError)), files.write_lock(tmp_path / "g"):
        pass
    assert other.read_text() == "mine"


@pytest.mark.parametrize("value", [10**400, math.nan, math.inf, True, "1", None, 1.5])
def test_a_number_that_is_none_or_too_large_is_a_type_error(value):
    with pytest.raises(TypeError, match="where a finite int is expected"):
        files.read_number(value, int)
