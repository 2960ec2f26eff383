"""Sharded rows: what is read, in which order, how much of it is in memory, and what is said of bad files."""

import json
import multiprocessing
import os

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accelerate.data_loader import prepare_data_loader
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from torch.utils.data import DataLoader

from onetrunk.data import shard_index, sharded
from onetrunk.data.files import load_rows
from onetrunk.data.sharded import BlockOrder, BlockSampler, load_sharded_rows


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


def rows_of(file, count):
    return [{"prompt": f"{file} {i}", "number": i} for i in range(count)]


def write_lines(path, rows, end="\n"):
    path.write_text("\n".join(json.dumps(row) for row in rows) + end)


def write_groups(path, rows, size):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=size)


def write_shards(folder, kind, counts=(300, 5, 700)):
    """Write files of each kind; return the pattern and all prompts in order."""
    for number, count in enumerate(counts):
        rows = rows_of(number, count)
        if kind == "parquet":
            write_groups(folder / f"{number}.parquet", rows, 64)
        else:
            write_lines(folder / f"{number}.jsonl", rows, "\n" if number else "")
    return f"{folder}/*.{kind}", [f"{n} {i}" for n, count in enumerate(counts) for i in range(count)]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_every_row_is_found_by_its_number(tmp_path, kind, is_folder):
    shards = tmp_path / "shards"
    shards.mkdir()
    pattern, prompts = write_shards(shards, kind)
    rows = load_sharded_rows(str(shards) if is_folder else pattern)
    assert len(rows) == len(prompts) == 1005 and rows.column_names == ["prompt", "number"]
    assert rows[:]["prompt"] == prompts
    backwards = rows.__getitems__(list(range(1004, -1, -3)))
    assert [row["prompt"] for row in backwards] == prompts[::-3]
    assert rows[304] == {"prompt": "1 4", "number": 4}
    assert rows.where(304).endswith(f"1.{kind}, row 4")


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("end", ["", "\n", "\n \n\n"])
def test_blank_lines_are_no_rows_wherever_a_chunk_is_cut(tmp_path, monkeypatch, chunk, end):
    monkeypatch.setattr(shard_index, "CHUNK", chunk)
    monkeypatch.setattr(shard_index, "LINES", 4)
    lines = ["", "  ", '{"n": 0}', "", '{"n": 1}\r', *(f' {{"n": {i}}}' for i in range(2, 9)), "\t"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(("\n".join(lines) + end).encode())
    rows = load_sharded_rows(str(path))
    # Nine rows in blocks of four, four and one.
    assert rows.index.sizes.tolist() == [4, 4, 1]
    assert rows[:]["n"] == list(range(9))


def test_the_order_of_a_small_pass_by_hand():
    # Three blocks of two rows and windows of four: the blocks that begin in rows 0-3 of the permuted blocks, then the
    # rest. Whatever the permutation, the first window holds two whole blocks and the second the third.
    order = BlockOrder(np.array([2, 2, 2]), window=4)
    for number in range(20):
        rows = order.rows(seed=3, number=number, first=0, last=6).tolist()
        pairs = {frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5})}
        assert frozenset(rows[4:]) in pairs
        assert set(rows[:4]) == set(range(6)) - set(rows[4:])
    assert len({tuple(order.rows(3, number, 0, 6)) for number in range(20)}) > 10


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


def test_a_window_of_all_rows_shuffles_them_like_any_permutation():
    order = BlockOrder(np.array([5, 5]), window=10)
    first = np.bincount([order.rows(seed, 0, 0, 1)[0] for seed in range(2000)], minlength=10)
    # 2000 draws of 10 rows: chi square with 9 degrees of freedom is above 27.9 once in a thousand times.
    assert ((first - 200) ** 2 / 200).sum() < 27.9


def test_a_pass_reads_each_block_once_and_holds_a_window(tmp_path, monkeypatch):
    pattern, prompts = write_shards(tmp_path, "parquet", (2000, 2000))
    rows = load_sharded_rows(pattern, window=256)
    loads, most = [], 0
    load = sharded.ShardedRows._loaded
    monkeypatch.setattr(sharded.ShardedRows, "_loaded", lambda self, n: loads.append(n) or load(self, n))
    found = []
    for number in BlockSampler(rows.order, seed=0):
        found.append(rows[number]["prompt"])
        most = max(most, sum(len(block) for block in rows._blocks.values()))
    assert sorted(found) == sorted(prompts) and found != prompts
    assert sorted(loads) == list(range(len(rows.order.sizes)))
    assert most <= 256 + 2 * 64


def test_the_index_is_kept_until_a_file_changes(tmp_path, cache, monkeypatch):
    pattern, _ = write_shards(tmp_path, "jsonl")
    scans = []
    scan = shard_index._line_blocks
    monkeypatch.setattr(shard_index, "_line_blocks", lambda url: scans.append(url) or scan(url))
    first = load_sharded_rows(pattern)
    again = load_sharded_rows(pattern)
    assert len(scans) == 3 and again.digest == first.digest and again[700] == first[700]
    kept = list((cache / "onetrunk").iterdir())
    assert len(kept) == 1
    kept[0].write_bytes(kept[0].read_bytes()[:100])
    assert load_sharded_rows(pattern).digest == first.digest and len(scans) == 6
    write_lines(tmp_path / "1.jsonl", rows_of(1, 6))
    changed = load_sharded_rows(pattern)
    assert len(scans) == 9 and len(changed) == 1006 and changed.digest != first.digest


def other_kind(path, kind):
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.parent / "nothing")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
@pytest.mark.parametrize("read", ["pattern", "folder", "memory"])
def test_what_is_not_a_file_is_an_error_and_not_left_out(tmp_path, kind, read):
    shards = tmp_path / "shards"
    shards.mkdir()
    pattern, _ = write_shards(shards, "jsonl")
    (shards / ".#0.jsonl").symlink_to("an editor's lock")
    load = load_rows if read == "memory" else load_sharded_rows
    name = pattern if read == "pattern" else str(shards)
    assert len(load(name)) == 1005
    other_kind(shards / "1.jsonl", kind)
    with pytest.raises(ValueError, match=r"1.jsonl is not a file .*rows would be missing; restore or remove it"):
        load(name)


def test_a_linked_folder_in_a_folder_is_an_error_and_linked_files_are_read(tmp_path):
    shards, other = tmp_path / "shards", tmp_path / "other"
    shards.mkdir()
    other.mkdir()
    write_shards(shards, "jsonl")
    write_lines(other / "a.jsonl", rows_of(0, 7))
    (shards / "3.jsonl").symlink_to(other / "a.jsonl")
    assert len(load_sharded_rows(str(shards))) == 1012
    (shards / "more").symlink_to(other)
    with pytest.raises(ValueError, match="more is not a file"):
        load_sharded_rows(str(shards))


def test_a_folder_named_like_a_file_is_read_if_the_pattern_looks_into_it(tmp_path):
    (tmp_path / "whole.parquet").mkdir()
    write_shards(tmp_path / "whole.parquet", "parquet")
    assert len(load_sharded_rows(f"{tmp_path}/**/*.parquet")) == 1005


def replaced_at_the_same_time(path, data):
    """Write other bytes, as many as before, so that the time of the last change stays."""
    before = path.stat()
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_swapped_files_of_equal_lengths_are_other_contents(tmp_path, kind):
    pattern, _ = write_shards(tmp_path, kind, (100, 100, 100))
    before = load_sharded_rows(pattern)
    first, second = (tmp_path / f"{number}.{kind}" for number in (1, 2))
    os.utime(second, ns=(0, first.stat().st_mtime_ns))
    load_sharded_rows(pattern)  # Its index is kept.
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    after = load_sharded_rows(pattern)
    assert after.digest == before.digest and after.contents != before.contents


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_one_other_value_of_equal_length_is_another_content(tmp_path, kind):
    pattern, _ = write_shards(tmp_path, kind)
    path = tmp_path / f"2.{kind}"
    if kind == "parquet":
        plain = {"compression": "none", "use_dictionary": False, "row_group_size": 64}
        pq.write_table(pa.Table.from_pylist(rows_of(2, 700)), path, **plain)
    before = load_sharded_rows(pattern)
    # Within the range of its row group, so that the footer's statistics stay the same.
    replaced_at_the_same_time(path, path.read_bytes().replace(b"2 350", b"2 35!"))
    after = load_sharded_rows(pattern)
    assert after.digest == before.digest and after.contents != before.contents
    assert after[305 + 350]["prompt"] == "2 35!"


def test_a_repaired_row_changes_the_contents_and_not_the_order(tmp_path):
    pattern, _ = write_shards(tmp_path, "jsonl")
    before = load_sharded_rows(pattern)
    write_lines(tmp_path / "1.jsonl", [*rows_of(1, 4), {"prompt": "repaired", "number": 4}])
    after = load_sharded_rows(pattern)
    assert after.digest == before.digest and after.contents != before.contents
    assert load_sharded_rows(pattern, window=7).digest != before.digest


class CountingFiles(LocalFileSystem):
    """Local files under `counted://`, as a store shows them; counts the bytes that are read."""

    protocol, cachable, num_bytes = "counted", False, 0

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start=start, end=end, **kwargs)
        CountingFiles.num_bytes += len(data)
        return data

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
    # pyarrow asks for the last 64 KiB of a file at first.
    assert 0 < footers <= 4 * 2**16 < 0.04 * size
    assert found.select_columns(["prompt"])[1234]["prompt"] == rows[1234]["prompt"]
    # A row group is 1 in 40, and one column of two is read.
    assert counted.num_bytes - footers < 0.06 * size


def test_a_store_that_fails_once_is_asked_again(tmp_path, counted, monkeypatch):
    pattern, prompts = write_shards(tmp_path, "jsonl")
    rows = load_sharded_rows(f"counted://{pattern}")
    monkeypatch.setattr(sharded, "RETRY_WAITS_S", (0, 0))
    faults, read = [OSError("reset"), OSError("reset")], CountingFiles.cat_file

    def fails(self, *args, **kwargs):
        if faults:
            raise faults.pop()
        return read(self, *args, **kwargs)

    monkeypatch.setattr(CountingFiles, "cat_file", fails)
    assert rows[700]["prompt"] == prompts[700] and not faults
    faults += [OSError("reset")] * 3
    with pytest.raises(RuntimeError, match=r"0.jsonl cannot be read \(reset\).*--resume auto"):
        rows[0]


def test_workers_of_a_dataloader_read_the_same_rows(tmp_path):
    for kind in ("parquet", "jsonl"):
        pattern, prompts = write_shards(tmp_path, kind)
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
    pattern, _ = write_shards(tmp_path, "jsonl")

    def check(row):
        if row["prompt"] == "2 600":
            raise ValueError("prompt is odd")
        return row

    rows = load_sharded_rows(pattern)
    with pytest.raises(ValueError, match=r"2.jsonl, row 600: prompt is odd; repair or remove it"):
        rows.then(check)[904:906]
    with pytest.raises(ValueError, match=r"2.jsonl, row 600: prompt is odd"):
        rows.encoded(lambda batch: [check(row) for row in batch])[904:907]


def test_columns_are_renamed_and_missing_values_are_null(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"question": "x", "more": 1}, {"question": "y"}])
    rows = load_sharded_rows(str(tmp_path / "a.jsonl"), columns={"prompt": "question"})
    assert rows[:] == {"more": [1, None], "prompt": ["x", "y"]}
    with pytest.raises(ValueError, match="must name distinct columns of the dataset"):
        load_sharded_rows(str(tmp_path / "a.jsonl"), columns={"prompt": "nothing"})


def test_a_column_that_comes_later_is_an_error(tmp_path):
    write_lines(tmp_path / "a.jsonl", [*rows_of(0, 300), {"prompt": "x", "new": 1}])
    with pytest.raises(ValueError, match=r"a.jsonl, row 300 has new, and the first rows have"):
        load_sharded_rows(str(tmp_path / "a.jsonl"))[300]


def test_a_file_that_changes_while_a_run_reads_it_is_an_error(tmp_path):
    pattern, _ = write_shards(tmp_path, "jsonl")
    rows = load_sharded_rows(pattern)
    write_lines(tmp_path / "0.jsonl", rows_of(0, 3))
    with pytest.raises(RuntimeError, match=r"0.jsonl cannot be read .*has changed since the run began"):
        rows[20]


def damaged(folder, kind):
    if kind == "gz":
        (folder / "a.jsonl.gz").write_bytes(b"")
        return f"{folder}/*.gz"
    if kind == "columns":
        write_groups(folder / "a.parquet", [{"a": 1}], 1)
        write_groups(folder / "b.parquet", [{"b": 1}], 1)
        return f"{folder}/*.parquet"
    if kind == "empty":
        (folder / "a.jsonl").write_text("\n\n")
    elif kind == "line":
        write_lines(folder / "a.jsonl", [*rows_of(0, 3)], "\n{broken")
    elif kind == "array":
        (folder / "a.jsonl").write_text('[{"prompt": "x"}]')
    elif kind == "parquet":
        (folder / "a.parquet").write_bytes(b"PAR1 no")
        return str(folder / "a.parquet")
    elif kind == "csv":
        (folder / "a.csv").write_text("prompt\nx\n")
        return str(folder / "a.csv")
    return str(folder / "a.jsonl")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gz", "does not say which files: end it with"),
        ("columns", r"b.parquet has the columns b, and .*a.parquet has a; give files with equal columns"),
        ("empty", "hold no rows; give files with at least one"),
        ("line", r"a.jsonl, row 3: .*repair it \(JSONL has one object per line\)"),
        ("array", r"a.jsonl, row 0: expected an object with columns; JSONL has one per line"),
        ("parquet", r"a.parquet is damaged \(.*repair or remove it"),
        ("csv", r"has .csv files, and streaming reads a row by its place in Parquet or JSONL"),
    ],
)
def test_files_that_cannot_be_read_by_row_are_named(tmp_path, kind, message):
    with pytest.raises(ValueError, match=message):
        load_sharded_rows(damaged(tmp_path, kind))


def test_a_row_group_that_memory_cannot_hold_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_index, "MOST_GROUP_BYTES", 100)
    write_groups(tmp_path / "a.parquet", rows_of(0, 100), 100)
    with pytest.raises(ValueError, match=r"a.parquet has a row group of .* GiB.*row_group_size=10_000"):
        load_sharded_rows(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "split", "error", "message"),
    [
        ("nothing/*.jsonl", "train", FileNotFoundError, "no file matches nothing/\\*.jsonl"),
        ("./nothing", "train", FileNotFoundError, "./nothing does not exist"),
        ("rows.jsonl", "train[:10]", ValueError, "streaming reads whole splits, got 'train\\[:10\\]'"),
        ("rows.jsonl", "test", ValueError, "names files, which have only the split 'train', got 'test'"),
        ("s3://bucket/rows", "train", ValueError, "does not say which files"),
    ],
)
def test_names_without_files_are_explained(tmp_path, monkeypatch, name, split, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        load_sharded_rows(name, split=split)


@pytest.fixture(scope="module")
def s3():
    """Return the address of a bucket on a real S3 server (moto's) on the loopback."""
    pytest.importorskip("s3fs")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        fsspec.filesystem("s3").clear_instance_cache()
        fsspec.filesystem("s3").mkdir("rows")
        yield "s3://rows"
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_in_a_bucket_are_those_on_the_disk(tmp_path, s3, kind):
    pattern, prompts = write_shards(tmp_path, kind)
    for file in tmp_path.glob(f"*.{kind}"):
        fsspec.filesystem("s3").put(str(file), f"{s3}/{file.name}")
    fsspec.filesystem("s3").invalidate_cache()
    local, remote = load_sharded_rows(pattern), load_sharded_rows(f"{s3}/*.{kind}")
    assert remote.digest == local.digest
    # JSONL passes through at startup; of Parquet in a store only the footers, so its ETag counts.
    assert (remote.contents == local.contents) == (kind == "jsonl")
    swapped = [f"{s3}/{number}.{kind}" for number in (0, 2)]
    files, data = fsspec.filesystem("s3"), [fsspec.filesystem("s3").cat_file(url) for url in swapped]
    for url, other in zip(swapped, reversed(data), strict=True):
        files.pipe_file(url, other)
    assert load_sharded_rows(f"{s3}/*.{kind}").contents != remote.contents
    for url, own in zip(swapped, data, strict=True):
        files.pipe_file(url, own)
    assert load_sharded_rows(f"{s3}/*.{kind}").contents == remote.contents
    numbers = remote.order.rows(0, 0, 100, 300).tolist()
    assert remote[numbers]["prompt"] == [prompts[number] for number in numbers]
    # A file that is replaced while the run reads it.
    write_shards(tmp_path, kind, (300, 5, 690))
    fsspec.filesystem("s3").put(str(tmp_path / f"2.{kind}"), f"{s3}/2.{kind}")
    fsspec.filesystem("s3").invalidate_cache()
    assert len(load_sharded_rows(f"{s3}/*.{kind}")) == 995


def test_a_bucket_that_does_not_exist_is_named(s3):
    with pytest.raises((FileNotFoundError, RuntimeError), match="s3://no-such-bucket"):
        load_sharded_rows("s3://no-such-bucket/*.jsonl")


def test_a_sample_is_read_once_for_all_checks(tmp_path, monkeypatch):
    pattern, prompts = write_shards(tmp_path, "parquet", (2000, 2000))
    rows = load_sharded_rows(pattern, window=1)  # Hardly any block stays in memory.
    loads = []
    load = sharded.ShardedRows._loaded
    monkeypatch.setattr(sharded.ShardedRows, "_loaded", lambda self, n: loads.append(n) or load(self, n))
    first = rows.sample()
    longer = rows.then(lambda row: {**row, "more": 1}, added=["more"]).sample()
    # Seven blocks of 64 rows, and the last of 16.
    assert len(loads) == 8 and len(first) == 464
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
