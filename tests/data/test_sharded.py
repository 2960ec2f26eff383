"""Sharded rows: what is read, in which order, how much of it is in memory, and what is said of bad files."""

import json
import multiprocessing
import shutil
import weakref
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accelerate.data_loader import prepare_data_loader
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from onetrunk.data import sharded
from onetrunk.data.sharded import BlockOrder, BlockSampler, load_sharded_rows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(sharded, "CONVERTED_GROUP_ROWS", 64)


def rows_of(file, count):
    return [{"prompt": f"{file} {i}", "number": i} for i in range(count)]


def write_lines(path, rows, end="\n"):
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)


def write_groups(path, rows, size=64):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=size)


def write_shards(folder, kind="parquet", counts=(300, 5, 700)):
    """Write files of each kind; return the pattern and all prompts in order."""
    for number, count in enumerate(counts):
        write = write_groups if kind == "parquet" else write_lines
        write(folder / f"{number}.{kind}", rows_of(number, count))
    return f"{folder}/*.{kind}", [f"{n} {i}" for n, count in enumerate(counts) for i in range(count)]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_every_row_is_found_by_its_number(tmp_path, kind, is_folder):
    shards = tmp_path / "shards"
    shards.mkdir()
    pattern, prompts = write_shards(shards, kind)
    rows = load_sharded_rows(str(shards) if is_folder else pattern)
    assert len(rows) == len(prompts) == 1005 and rows.column_names == ["prompt", "number"]
    assert rows[range(1005)]["prompt"] == prompts and max(rows.order.sizes) == 64
    backwards = rows.__getitems__(list(range(1004, -1, -3)))
    assert [row["prompt"] for row in backwards] == prompts[::-3]
    assert rows[304] == {"prompt": "1 4", "number": 4}
    # A row of a converted file is counted over all files.
    assert rows.where(304).endswith(
        "1.parquet, row 4" if kind == "parquet" else f"{shards if is_folder else pattern}, row 304"
    )


def test_files_are_converted_once_until_one_changes(tmp_path):
    pattern, _ = write_shards(tmp_path, "jsonl")
    first = load_sharded_rows(pattern)
    written = Path(first.index.urls[0]).stat().st_mtime_ns
    again = load_sharded_rows(pattern)
    assert Path(again.index.urls[0]).stat().st_mtime_ns == written
    assert (again.digest, again.contents) == (first.digest, first.contents)
    write_lines(tmp_path / "1.jsonl", rows_of(1, 6))
    assert len(load_sharded_rows(pattern)) == 1006


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    window=st.integers(1, 40),
    seed=st.integers(0, 3),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_part_of_an_order_is_that_part_of_the_whole(sizes, window, seed, ends):
    order = BlockOrder(np.array(sizes), window)
    whole = list(order.iterate(seed, 1))
    assert sorted(whole) == list(range(sum(sizes)))
    first, last = sorted(round(end * sum(sizes)) for end in ends)
    assert order.rows(seed, 1, first, last).tolist() == whole[first:last]


@pytest.fixture
def reads(monkeypatch):
    """Return a list of the row groups that are read, as weak references."""
    tables, read = [], pq.ParquetFile.read_row_group

    def noting(*args, **kwargs):
        table = read(*args, **kwargs)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noting)
    return tables


def test_a_pass_reads_each_block_once_and_holds_a_window(tmp_path, reads):
    pattern, prompts = write_shards(tmp_path, "parquet", (2000, 2000))
    rows = load_sharded_rows(pattern, window=256)
    found, most = [], 0
    for number in BlockSampler(rows.order, seed=0):
        found.append(rows[number]["prompt"])
        most = max(most, sum(len(table) for table in map(weakref.ref.__call__, reads) if table is not None))
    assert sorted(found) == sorted(prompts) and found != prompts
    assert len(reads) == len(rows.order.sizes)
    assert 64 <= most <= 256 + 2 * 64


def test_other_values_change_the_contents_and_not_the_order(tmp_path):
    pattern, _ = write_shards(tmp_path, counts=(100, 100, 100))
    before = load_sharded_rows(pattern)
    assert load_sharded_rows(pattern, window=7).digest != before.digest
    first, second = (tmp_path / f"{number}.parquet" for number in (1, 2))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    after = load_sharded_rows(pattern)
    assert after.digest == before.digest and after.contents != before.contents
    # The same files elsewhere are the same rows.
    other = tmp_path / "other"
    other.mkdir()
    for file in tmp_path.glob("*.parquet"):
        shutil.copy(file, other)
    assert load_sharded_rows(f"{other}/*.parquet").contents == after.contents


class CountingFiles(LocalFileSystem):
    """Local files under `counted://`, as a store shows them; counts the bytes that are read."""

    protocol, cachable, num_bytes = "counted", False, 0

    def _open(self, path, mode="rb", **kwargs):
        file = super()._open(path, mode, **kwargs)
        inner = file.f
        outer = type("Counted", (), {"__getattr__": lambda self, name: getattr(inner, name)})()

        def read(*size):
            data = inner.read(*size)
            CountingFiles.num_bytes += len(data)
            return data

        outer.read = read
        file.f = outer
        return file


@pytest.fixture
def counted():
    fsspec.register_implementation("counted", CountingFiles, clobber=True)
    CountingFiles.num_bytes = 0
    return CountingFiles


def test_of_a_store_only_footers_and_the_blocks_in_use_are_read(tmp_path, counted):
    texts = np.random.default_rng(0).integers(97, 122, (4000, 1000), dtype=np.uint8)
    rows = [{"prompt": bytes(text).decode(), "other": bytes(text[::-1]).decode()} for text in texts]
    for number in range(4):
        write_groups(tmp_path / f"{number}.parquet", rows[number * 1000 : (number + 1) * 1000], 100)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.parquet"))
    found = load_sharded_rows(f"counted://{tmp_path}/*.parquet")
    assert len(found) == 4000
    footers = counted.num_bytes
    # pyarrow asks for the last 64 KiB of a file at first, and the digest for the footer again.
    assert 0 < footers <= 4 * 2**17 < 0.08 * size
    assert found.select_columns(["prompt"])[1234]["prompt"] == rows[1234]["prompt"]
    # A row group is 1 in 40, and one column of two is read.
    assert counted.num_bytes - footers < 0.06 * size


def test_workers_of_a_dataloader_read_the_same_rows(tmp_path):
    pattern, prompts = write_shards(tmp_path)
    rows = load_sharded_rows(pattern, window=100)
    rows[0]  # Files are open in this process, too.
    sampler = BlockSampler(rows.order, seed=1)
    context = multiprocessing.get_context("fork")
    options = {"batch_size": 8, "sampler": sampler, "collate_fn": list}
    loader = DataLoader(rows, num_workers=2, multiprocessing_context=context, **options)
    found = [row["prompt"] for batch in loader for row in batch]
    assert found == [prompts[number] for number in sampler]


def test_a_row_that_is_left_out_is_replaced_by_the_next_of_its_block(tmp_path, caplog):
    pattern, prompts = write_shards(tmp_path, "parquet")
    rows = load_sharded_rows(pattern).then(lambda row: row if row["number"] % 64 > 1 else None)
    assert rows[[0, 1, 2, 5]]["prompt"] == [prompts[2], prompts[2], prompts[2], prompts[5]]
    assert rows.num_replaced == 2
    assert caplog.text.count("the next row takes its place") == 1
    nothing = load_sharded_rows(pattern).then(lambda row: None)
    with pytest.raises(ValueError, match=r"0.parquet, row 64 and the 63 rows after it are all left out"):
        nothing[70]
    assert len(nothing.sample()) == 0


def test_a_bad_row_is_named_by_its_file_and_number(tmp_path):
    pattern, _ = write_shards(tmp_path)

    def check(row):
        if row["prompt"] == "2 600":
            raise ValueError("prompt is odd")
        return row

    rows = load_sharded_rows(pattern)
    with pytest.raises(ValueError, match=r"2.parquet, row 600: prompt is odd; repair or remove it"):
        rows.then(check)[904, 905]


def test_columns_are_renamed_and_missing_values_are_null(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"question": "x", "more": 1}, {"question": "y"}])
    rows = load_sharded_rows(str(tmp_path / "a.jsonl"), columns={"prompt": "question"})
    assert rows[0, 1] == {"more": [1, None], "prompt": ["x", "y"]}
    with pytest.raises(ValueError, match="must name distinct columns of the dataset"):
        load_sharded_rows(str(tmp_path / "a.jsonl"), columns={"prompt": "nothing"})


def test_a_file_that_changes_while_a_run_reads_it_is_an_error(tmp_path):
    pattern, _ = write_shards(tmp_path)
    rows = load_sharded_rows(pattern)
    write_groups(tmp_path / "0.parquet", rows_of(0, 3))
    with pytest.raises(RuntimeError, match=r"0.parquet can no longer be read .*has changed since the run began"):
        rows[20]


def damaged(folder, kind):
    if kind == "columns":
        write_groups(folder / "a.parquet", [{"a": 1}])
        write_groups(folder / "b.parquet", [{"b": 1}])
        return f"{folder}/*.parquet"
    if kind == "large":
        write_groups(folder / "a.parquet", rows_of(0, 100), 100)
    elif kind == "empty":
        pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "a.parquet")
    elif kind == "parquet":
        (folder / "a.parquet").write_bytes(b"PAR1 no")
    elif kind == "line":
        write_lines(folder / "a.jsonl", rows_of(0, 3), "\n{broken")
        return str(folder / "a.jsonl")
    return f"{folder}/*.gz" if kind == "gz" else str(folder / "a.parquet")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gz", "does not end in one of .jsonl"),
        ("columns", r"b.parquet has the columns b, and .*a.parquet has a; give files with equal columns"),
        ("empty", "hold no rows; give files with at least one"),
        ("line", r"a.jsonl cannot be read as split 'train': JSON parse error"),
        ("parquet", r"a.parquet is damaged \(.*repair or remove it"),
        ("large", r"a.parquet has a row group of .* GiB.*row_group_size=10_000"),
    ],
)
def test_files_that_cannot_be_read_by_row_are_named(tmp_path, monkeypatch, kind, message):
    monkeypatch.setattr(sharded, "MOST_GROUP_BYTES", 1000)
    with pytest.raises(ValueError, match=message):
        load_sharded_rows(damaged(tmp_path, kind))


@pytest.mark.parametrize(
    ("name", "split", "error", "message"),
    [
        ("nothing/*.jsonl", "train", FileNotFoundError, "nothing/\\*.jsonl does not exist"),
        ("./nothing", "train", FileNotFoundError, "./nothing does not exist"),
        ("rows.jsonl", "train[:10]", ValueError, "streaming reads whole splits, got 'train\\[:10\\]'"),
        ("s3://bucket/rows", "train", ValueError, "s3://bucket/rows does not end in one of"),
    ],
)
def test_names_without_files_are_explained(empty_folder, name, split, error, message):
    with pytest.raises(error, match=message):
        load_sharded_rows(name, split=split)


def test_rows_in_a_bucket_are_those_on_the_disk(tmp_path, s3):
    pattern, prompts = write_shards(tmp_path)
    files = fsspec.filesystem("s3")
    for file in tmp_path.glob("*.parquet"):
        files.put(str(file), f"{s3}/{file.name}")
    files.invalidate_cache()
    local, remote = load_sharded_rows(pattern), load_sharded_rows(f"{s3}/*.parquet")
    assert (remote.digest, remote.contents) == (local.digest, local.contents)
    numbers = remote.order.rows(0, 0, 100, 300).tolist()
    assert remote[numbers]["prompt"] == [prompts[number] for number in numbers]


def test_a_sample_is_read_once_for_all_checks(tmp_path, reads):
    pattern, prompts = write_shards(tmp_path, "parquet", (2000, 2000))
    rows = load_sharded_rows(pattern, window=1)  # Hardly any block stays in memory.
    first = rows.sample()
    longer = rows.then(lambda row: {**row, "more": 1}, added=["more"]).sample()
    # Seven blocks of 64 rows, and the last of 16.
    assert len(reads) == 8 and len(first) == 464
    assert longer["prompt"] == first["prompt"] and set(longer["more"]) == {1}
    assert set(first["prompt"]) <= set(prompts)
    # From both files.
    assert {prompt[0] for prompt in first["prompt"]} == {"0", "1"}


def test_two_processes_have_the_batches_of_one_in_every_pass():
    order = BlockOrder(np.array([11, 2, 17]), window=9)

    def batches(num_processes, size):
        loaders = [DataLoader(range(30), size, sampler=BlockSampler(order, 0), drop_last=True)] * num_processes
        options = {"num_processes": num_processes, "put_on_device": False}
        loaders = [prepare_data_loader(x, process_index=i, **options) for i, x in enumerate(loaders)]
        for number in (0, 1):
            for loader in loaders:
                loader.set_epoch(number)
            steps = zip(*(list(loader.batch_sampler) for loader in loaders), strict=True)
            yield [sorted(sum(step, [])) for step in steps]

    first, second = batches(1, 4)
    assert [first, second] == list(batches(2, 2)) and first != second
