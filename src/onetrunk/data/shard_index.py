"""Where the rows of many Parquet or JSONL files are: found by `datasets`, indexed once, kept in its cache.

The footers of Parquet files name the row groups. JSONL has no such table: its bytes pass through once, and nothing but
the positions of every 256th line is kept. The index also holds a digest of each file, so that a resumed run notices
another content: sha256 of the bytes, or, for Parquet in a store, what the store says of it (size and ETag).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import re
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from onetrunk.data.files import check_folder, hub_errors, require_files
from onetrunk.data.names import BUILDERS, looks_like_path
from onetrunk.utils.files import atomic_write_bytes, parse_json

logger = logging.getLogger(__name__)

# Changes with what an index holds.
FORMAT = 2
# Lines of JSONL that are read together.
LINES = 256
CHUNK = 1 << 20
# Files that are indexed at the same time.
THREADS = 16
# A row group is in memory whole, and several are shuffled together.
MOST_GROUP_BYTES = 1 << 30
# What stores call that which changes with a file's content; the first that is there counts.
CHECKSUMS = ("ETag", "etag", "blob_id", "Last-Modified", "mtime")
BLANKS = np.frombuffer(b" \t\r\n", dtype=np.uint8)


@dataclass(frozen=True)
class Shards:
    """The files of a dataset."""

    urls: tuple[str, ...]
    is_parquet: bool


@dataclass(frozen=True)
class ShardIndex:
    """Blocks of rows, in the order of the files.

    Args:
        urls: the files.
        is_parquet: True: a block is a row group; False: lines of JSONL.
        columns: names of the columns in the files.
        digests: of the content of each file.
        files: the file of each block [n], a place in `urls`.
        begins: the number of the row group, or the first byte [n].
        ends: the byte after the block [n]; 0 for Parquet.
        sizes: rows of each block [n].
    """

    urls: tuple[str, ...]
    is_parquet: bool
    columns: tuple[str, ...]
    digests: tuple[str, ...]
    files: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray

    @property
    def layout(self) -> str:
        """A digest of the files' names, without their folder, and of their blocks."""
        names = "\n".join(url.rsplit("/", 1)[-1] for url in self.urls)
        return _digest(names.encode(), self.files.tobytes(), self.sizes.tobytes())

    @property
    def contents(self) -> str:
        """A digest of the contents of the files, in their order."""
        return _digest("\n".join(self.digests).encode())


def find_shards(name: str, split: str, config_name: str | None) -> Shards:
    """Return the files of a dataset; nothing of them is read.

    Args:
        name: as for `load_sharded_rows`.
        split: its name; a slice is not possible.
        config_name: configuration of a Hub dataset that has several.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: there are no such files, or they cannot be read by row.
    """
    if "[" in split:
        raise ValueError(f"streaming reads whole splits, got {split!r}; name the split alone, or fewer files")
    builder = _builder(name, split, config_name)
    by_split = builder.config.data_files or {}
    if split not in by_split:
        raise ValueError(f"{name} has the splits {', '.join(by_split) or 'none'}, got {split!r}; name one of them")
    urls = tuple(str(url) for url in by_split[split])
    if not urls:
        raise _no_file(name)
    suffixes = {Path(url.split("::")[0]).suffix for url in urls}
    is_parquet = suffixes == {".parquet"}
    if not is_parquet and not suffixes <= {".jsonl", ".json"} or any("::" in url for url in urls):
        raise ValueError(
            f"{name} has {', '.join(sorted(suffixes))} files, and streaming reads a row by its place in Parquet or"
            " JSONL files that are not compressed as a whole; convert them, or leave streaming out"
        )
    return Shards(urls, is_parquet)


def _builder(name: str, split: str, config_name: str | None) -> datasets.DatasetBuilder:
    path, suffix = Path(name).expanduser(), Path(name).suffix
    if path.is_dir():
        check_folder(path)
        with hub_errors(name, split, config_name):
            return datasets.load_dataset_builder(str(path), config_name)
    if suffix in BUILDERS or "*" in name or "://" in name:
        if suffix not in BUILDERS:
            raise ValueError(f"{name} does not say which files: end it with *.parquet or *.jsonl")
        if split != "train":
            raise ValueError(f"{name} names files, which have only the split 'train', got {split!r}")
        try:
            builder = datasets.load_dataset_builder(BUILDERS[suffix], data_files={"train": _plain(name)})
            files, pattern = file_system(_plain(name))
            matches = files.glob(pattern, detail=True)
        except FileNotFoundError as error:
            raise _no_file(name) from error
        except (OSError, ImportError, ValueError) as error:
            raise RuntimeError(f"{name} cannot be listed: {' '.join(str(error).split())}") from error
        root = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
        require_files(list(matches), root, lambda path: matches[path]["type"] == "file" or files.isfile(path))
        return builder
    if looks_like_path(name):
        raise FileNotFoundError(f"{name} does not exist (working folder {Path.cwd()}); give existing files")
    with hub_errors(name, split, config_name):
        return datasets.load_dataset_builder(name, config_name)


def _no_file(name: str) -> FileNotFoundError:
    return FileNotFoundError(f"no file matches {name} (working folder {Path.cwd()}); give existing files")


def _plain(name: str) -> str:
    return name if "://" in name else str(Path(name).expanduser())


def file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system of a URL or path, and the path in it."""
    return fsspec.core.url_to_fs(url)


def index_shards(shards: Shards) -> ShardIndex:
    """Return the index of the rows of files; it is kept in the cache of `datasets` until the files change.

    Raises:
        ValueError: a file is damaged, has other columns than the first, or row groups that are too large; no rows.
        RuntimeError: a file cannot be read.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        marks = tuple(pool.map(_mark, shards.urls))
        about = json.dumps([FORMAT, shards.urls, marks])
        path = Path(datasets.config.HF_DATASETS_CACHE) / "onetrunk" / f"{_digest(about.encode())}.npz"
        index = _read_index(path, shards)
        if index is not None:
            return index
        read = _parquet_blocks if shards.is_parquet else _line_blocks
        parts = list(pool.map(read, shards.urls))
    columns = parts[0].columns if shards.is_parquet else tuple(dict.fromkeys(c for p in parts for c in p.columns))
    for url, part in zip(shards.urls, parts, strict=True):
        if shards.is_parquet and set(part.columns) != set(columns):
            raise ValueError(
                f"{url} has the columns {', '.join(sorted(part.columns))}, and {shards.urls[0]} has"
                f" {', '.join(sorted(columns))}; give files with equal columns"
            )
    files = np.repeat(np.arange(len(parts)), [len(part.sizes) for part in parts])
    arrays = [np.concatenate([getattr(part, name) for part in parts]) for name in ("begins", "ends", "sizes")]
    if not arrays[2].sum():
        raise ValueError(f"{', '.join(shards.urls[:3])} hold no rows; give files with at least one")
    digests = tuple(part.digest for part in parts)
    index = ShardIndex(shards.urls, shards.is_parquet, columns, digests, files, *arrays)
    _write_index(path, index)
    return index


@dataclass(frozen=True)
class _Blocks:
    """The blocks of one file; see ShardIndex."""

    digest: str
    columns: tuple[str, ...]
    begins: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray


def _mark(url: str) -> str:
    """Return what the store says of a file, which changes with its content; of a local one, also when it is moved."""
    with _readable(url):
        files, path = file_system(url)
        about = files.info(path)
    local = () if "://" in url else ("mtime", "created", "ino")
    checksum = next((about[name] for name in CHECKSUMS if about.get(name)), None)
    return json.dumps([about["size"], checksum, *(about[name] for name in local)], default=str)


def _parquet_blocks(url: str) -> _Blocks:
    with _readable(url), fsspec.open(url, "rb") as file:
        parquet = pq.ParquetFile(file)
        footer, columns = parquet.metadata, tuple(parquet.schema_arrow.names)
        groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    digest = _mark(url) if "://" in url else _file_digest(url)
    largest = max((group.total_byte_size for group in groups), default=0)
    if largest > MOST_GROUP_BYTES:
        raise ValueError(
            f"{url} has a row group of {largest / 2**30:.1f} GiB, which is read whole; write it with smaller ones:"
            " pyarrow.parquet.write_table(table, path, row_group_size=10_000)"
        )
    sizes = np.array([group.num_rows for group in groups], dtype=np.int64)
    full = np.flatnonzero(sizes)
    return _Blocks(digest, columns, full, np.zeros_like(full), sizes[full])


def _file_digest(path: str) -> str:
    with _readable(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _line_blocks(url: str) -> _Blocks:
    begins: list[int] = []
    num_rows = end = 0
    digest = hashlib.sha256()
    with _readable(url), fsspec.open(url, "rb") as file:
        for starts, piece_end in _lines(file, digest.update):
            end = piece_end
            # Every LINES-th row of the file begins a block.
            begins += starts[-num_rows % LINES :: LINES].tolist()
            num_rows += len(starts)
    sizes = np.full(len(begins), LINES, dtype=np.int64)
    if num_rows % LINES:
        sizes[-1] = num_rows % LINES
    edges = np.array([*begins, end], dtype=np.int64)
    columns = _columns_of(url, int(edges[0]), int(edges[1])) if begins else ()
    return _Blocks(digest.hexdigest(), columns, edges[:-1], edges[1:], sizes)


def _lines(file: BinaryIO, see: Callable[[bytes], None]) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the first bytes of the lines that are not blank, piece by piece of the file, and the pieces' ends.

    `see` gets all bytes.
    """
    position, rest = 0, b""
    while chunk := file.read(CHUNK):
        see(chunk)
        data = rest + chunk
        cut = data.rfind(b"\n") + 1
        if cut:
            yield _starts(data[:cut], position), position + cut
        position, rest = position + cut, data[cut:]
    if rest:
        yield _starts(rest, position), position + len(rest)


def _starts(data: bytes, position: int) -> np.ndarray:
    values = np.frombuffer(data, dtype=np.uint8)
    starts = np.concatenate([[0], np.flatnonzero(values == ord("\n")) + 1])
    starts = starts[starts < len(values)]
    is_kept = np.ones(len(starts), dtype=bool)
    for place in np.flatnonzero(np.isin(values[starts], BLANKS)):
        end = starts[place + 1] if place + 1 < len(starts) else len(data)
        is_kept[place] = bool(data[starts[place] : end].strip())
    return starts[is_kept] + position


def _columns_of(url: str, begin: int, end: int) -> tuple[str, ...]:
    files, path = file_system(url)
    lines = [line for line in files.cat_file(path, start=begin, end=end).split(b"\n") if line.strip()]
    names: dict[str, None] = {}
    for number, line in enumerate(lines):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{url}, row {number}: {error}; repair it (JSONL has one object per line)") from error
        if not isinstance(row, dict):
            raise ValueError(f"{url}, row {number}: expected an object with columns; JSONL has one per line")
        names |= dict.fromkeys(row)
    return tuple(names)


@contextlib.contextmanager
def _readable(url: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise ValueError(f"{url} is damaged ({' '.join(str(error).split())}); repair or remove it") from error
    except (OSError, ImportError) as error:
        raise RuntimeError(f"{url} cannot be read: {' '.join(str(error).split())}") from error


def _read_index(path: Path, shards: Shards) -> ShardIndex | None:
    try:
        with np.load(path, allow_pickle=False) as saved:
            columns, digests = tuple(saved["columns"].tolist()), tuple(saved["digests"].tolist())
            arrays = (saved[name] for name in ("files", "begins", "ends", "sizes"))
            return ShardIndex(shards.urls, shards.is_parquet, columns, digests, *arrays)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None  # There is none yet, or a power cut damaged it.


def _write_index(path: Path, index: ShardIndex) -> None:
    arrays = {name: getattr(index, name) for name in ("files", "begins", "ends", "sizes")}
    data = io.BytesIO()
    np.savez(data, columns=np.array(index.columns), digests=np.array(index.digests), **arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, data.getvalue())
    except OSError as error:
        logger.warning("the index of %d files could not be kept in %s: %s", len(index.urls), path.parent, error)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
