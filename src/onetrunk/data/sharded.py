"""Rows of many Parquet files, on a disk, the Hub or in a store, read while a run trains.

Startup reads the footers of the files, which say where each row group (a block) begins. A row is read by its number,
so a resumed run needs no history, and every process reads only the row groups that hold its rows. `BlockOrder`
shuffles blocks, and then the rows of a window of blocks; only the rows of about one window are in memory. Files of
other formats are converted once by `datasets`, into its cache.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from onetrunk.data.files import check_renaming, dataset_builder, row_errors
from onetrunk.utils.randomness import PROMPTS_STREAM, WINDOWS_STREAM, generator_of

logger = logging.getLogger(__name__)

Row = dict[str, Any]

# Rows that are checked before training, and from how many blocks; all others are checked when they are read.
SAMPLE_ROWS, SAMPLE_BLOCKS = 512, 8
# Parquet files that are held open, and footers that are read at the same time.
OPEN_FILES, THREADS = 8, 16
# A row group is in memory whole, and several are shuffled together.
MOST_GROUP_BYTES = 1 << 30
# Rows of a row group that conversion writes.
CONVERTED_GROUP_ROWS = 1000


@dataclass(frozen=True, eq=False)
class BlockOrder:
    """The order of rows in a pass: blocks are permuted, then the rows within each window of consecutive blocks.

    Everything derives from (seed, pass), and any part of the order is computed without the part before it.

    Args:
        sizes: rows of each block [num_blocks], in the order of the files.
        window: rows that are shuffled together, at least 1; blocks that begin within a window belong to it.
    """

    sizes: np.ndarray
    window: int

    @cached_property
    def starts(self) -> np.ndarray:
        """Number of the first row of each block, and the number of all rows [num_blocks + 1]."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def block_of(self, row: int) -> int:
        """Return the block of a row."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def rows(self, seed: int, number: int, first: int, last: int) -> np.ndarray:
        """Return the rows at the places `first` to `last` (excluded) of the pass `number`."""
        windows = _permuted_windows(self, seed, number)
        begin = int(np.searchsorted(windows.starts, first, side="right")) - 1
        end = int(np.searchsorted(windows.starts, last, side="left"))
        parts = [self._shuffled(windows.blocks[i], seed, number, i) for i in range(begin, end)]
        joined = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        return joined[first - windows.starts[begin] : last - windows.starts[begin]]

    def iterate(self, seed: int, number: int) -> Iterator[int]:
        """Yield all rows of the pass `number`; one window is in memory."""
        for window, blocks in enumerate(_permuted_windows(self, seed, number).blocks):
            yield from self._shuffled(blocks, seed, number, window).tolist()

    def _shuffled(self, blocks: np.ndarray, seed: int, number: int, window: int) -> np.ndarray:
        rows = np.concatenate([np.arange(self.starts[b], self.starts[b + 1]) for b in blocks])
        return generator_of((seed, WINDOWS_STREAM, number, window)).permutation(rows)


@dataclass(frozen=True)
class _Windows:
    """The blocks of each window of a pass, and the place where each window begins, ending with the number of rows."""

    blocks: list[np.ndarray]
    starts: np.ndarray


@lru_cache(maxsize=4)
def _permuted_windows(order: BlockOrder, seed: int, number: int) -> _Windows:
    blocks = generator_of((seed, PROMPTS_STREAM, number)).permutation(len(order.sizes))
    starts = np.concatenate([[0], np.cumsum(order.sizes[blocks])])
    _, bounds = np.unique(starts[:-1] // order.window, return_index=True)
    return _Windows(np.split(blocks, bounds[1:]), np.append(starts[bounds], starts[-1]))


class BlockSampler:
    """A sampler for a DataLoader: the rows of the pass `epoch` in their order.

    Args:
        seed: decides the permutation; None: the order of the files in every pass.
    """

    def __init__(self, order: BlockOrder, seed: int | None):
        self.order, self.seed, self.epoch = order, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass; Trainer and accelerate call this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self))) if self.seed is None else self.order.iterate(self.seed, self.epoch)


@dataclass(frozen=True)
class ShardIndex:
    """The row groups of Parquet files, in the order of the files.

    Args:
        source: what was converted into these files; None if nothing was.
        contents: a digest of all footers, which hold sizes, places and statistics of the row groups.
        files: the file of each row group [n], a place in `urls`.
        groups: the number of each row group in its file [n].
        sizes: rows of each row group [n].
    """

    urls: tuple[str, ...]
    source: str | None
    columns: tuple[str, ...]
    contents: str
    files: np.ndarray
    groups: np.ndarray
    sizes: np.ndarray

    @property
    def layout(self) -> str:
        """A digest of the files' names, without their folder, and of their row groups."""
        names = "\n".join(url.rsplit("/", 1)[-1] for url in self.urls).encode()
        return _digest([names, self.files.tobytes(), self.sizes.tobytes()])


def _digest(parts: Sequence[bytes]) -> str:
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(digests).hexdigest()[:16]


def _find_files(name: str, split: str, config_name: str | None) -> tuple[tuple[str, ...], str | None]:
    """Return the Parquet files of a dataset, and its name if they had to be converted."""
    if "[" in split:
        raise ValueError(f"streaming reads whole splits, got {split!r}; name the split alone, or fewer files")
    builder = dataset_builder(name, config_name, writer_batch_size=CONVERTED_GROUP_ROWS)
    by_split = builder.config.data_files or {}
    if split not in by_split:
        raise ValueError(f"{name} has the splits {', '.join(by_split) or 'none'}, got {split!r}; name one of them")
    urls = tuple(str(url) for url in by_split[split])
    if all(url.endswith(".parquet") for url in urls):
        return urls, None
    folder = Path(builder.cache_dir) / f"parquet-{CONVERTED_GROUP_ROWS}"
    with row_errors(name, split):
        builder.download_and_prepare(str(folder), file_format="parquet")
    paths = (*folder.glob(f"*-{split}.parquet"), *folder.glob(f"*-{split}-?????-of-?????.parquet"))
    return tuple(map(str, sorted(paths))), name


def _read_footer(url: str) -> tuple[pq.FileMetaData, bytes]:
    """Return the footer of a Parquet file, parsed and as bytes."""
    with _readable(url), fsspec.open(url, "rb") as file:
        footer = pq.ParquetFile(file).metadata
        file.seek(-8 - footer.serialized_size, os.SEEK_END)
        data = file.read()
    largest = max((footer.row_group(i).total_byte_size for i in range(footer.num_row_groups)), default=0)
    if largest > MOST_GROUP_BYTES:
        raise ValueError(
            f"{url} has a row group of {largest / 2**30:.1f} GiB, read as a whole; write smaller row groups:"
            " pyarrow.parquet.write_table(table, path, row_group_size=10_000)"
        )
    return footer, data


@contextlib.contextmanager
def _readable(url: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise ValueError(f"{url} is damaged ({' '.join(str(error).split())}); repair or remove it") from error
    except (OSError, ImportError) as error:
        raise RuntimeError(f"{url} cannot be read: {' '.join(str(error).split())}") from error


def _index_files(urls: tuple[str, ...], source: str | None) -> ShardIndex:
    with ThreadPoolExecutor(THREADS) as pool:
        footers, data = zip(*pool.map(_read_footer, urls), strict=True)
    columns = [footer.schema.to_arrow_schema().names for footer in footers]
    for url, names in zip(urls, columns, strict=True):
        if set(names) != set(columns[0]):
            raise ValueError(
                f"{url} has the columns {', '.join(sorted(names))}, and {urls[0]} has"
                f" {', '.join(sorted(columns[0]))}; give files with equal columns"
            )
    counts = [footer.num_row_groups for footer in footers]
    sizes = [footer.row_group(i).num_rows for footer in footers for i in range(footer.num_row_groups)]
    files, groups = np.repeat(np.arange(len(urls)), counts), np.concatenate([np.arange(count) for count in counts])
    sizes = np.array(sizes, dtype=np.int64)
    full = sizes > 0
    if not full.any():
        raise ValueError(f"{source or ', '.join(urls[:3])} hold no rows; give files with at least one")
    return ShardIndex(urls, source, tuple(columns[0]), _digest(data), files[full], groups[full], sizes[full])


class ShardedRows:
    """Rows that are read by number when they are needed: a map-style dataset for a DataLoader.

    Args:
        index: where the rows are.
        window: rows that are shuffled together; about as many are in memory.
        columns: our name -> the files' name.

    Raises:
        ValueError: `columns` names columns that the files lack.
    """

    def __init__(self, index: ShardIndex, window: int = 10_000, columns: Mapping[str, str] | None = None):
        check_renaming(index.columns, columns or {})
        self.index = index
        self.order = BlockOrder(index.sizes, window)
        self._theirs = {name: name for name in index.columns if name not in (columns or {}).values()}
        self._theirs |= dict(columns or {})
        self._added: tuple[str, ...] = ()
        self._steps: tuple[Callable[[Row], Row | None], ...] = ()
        self._encoders: tuple[Callable[[list[Row]], Sequence[Row | None]], ...] = ()
        self.about = ""
        self._blocks: OrderedDict[int, pa.Table] = OrderedDict()
        # The rows of samples, as they are in the files: each check before training looks at them.
        self._sampled: dict[int, Row] = {}
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._pid = os.getpid()
        self.num_replaced = 0

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return [*self._theirs, *self._added]

    @property
    def digest(self) -> str:
        """The files and their numbers of rows, and how they are shuffled: what the order of the rows depends on."""
        shape = f"{self.index.layout}, shuffled in windows of {self.order.window}"
        return f"{len(self)} rows in {len(self.index.urls)} files, sha256 {shape}"

    @property
    def contents(self) -> str:
        """A digest of the contents of the files, and what else the rows depend on."""
        return f"sha256 {self.index.contents}{self.about and f', {self.about}'}"

    def __len__(self) -> int:
        return len(self.order)

    def select_columns(self, names: Sequence[str]) -> ShardedRows:
        """Return these rows with only some of the files' columns; the others are not read."""
        return self._changed(_theirs={name: self._theirs[name] for name in names}, _sampled={})

    def then(self, step: Callable[[Row], Row | None], added: Sequence[str] = ()) -> ShardedRows:
        """Return these rows with another step after each is read.

        Args:
            step: returns the row, changed or not, or None for a row that is left out; a ValueError says what is wrong
                with a row, and gets the row's file and number.
            added: names of columns that the step adds.
        """
        return self._changed(_steps=(*self._steps, step), _added=(*self._added, *added))

    def encoded(self, encode: Callable[[list[Row]], Sequence[Row | None]], about: str = "") -> ShardedRows:
        """Return these rows with another step that gets the rows of a batch together, after the steps of each row.

        Args:
            encode: returns as many rows, None for one that is left out.
            about: what the result depends on besides the rows; part of `contents`.
        """
        return self._changed(_encoders=(*self._encoders, encode), about=self.about + about)

    def _changed(self, **attributes: Any) -> ShardedRows:
        other = copy.copy(self)
        other._blocks, other._open = OrderedDict(), OrderedDict()
        for name, value in attributes.items():
            setattr(other, name, value)
        return other

    def __getitem__(self, rows: int | slice | Sequence[int]) -> Any:
        """Return a row, or of several rows a dict of columns, as datasets.Dataset does."""
        if isinstance(rows, int | np.integer):
            return self.__getitems__([int(rows)])[0]
        read = self.__getitems__(range(len(self))[rows] if isinstance(rows, slice) else rows)
        return {name: [row[name] for row in read] for name in read[0]}

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        """Return several rows; a row that is left out is replaced by the next one of its block."""
        return [
            self._replacement(i) if row is None else row for i, row in zip(rows, self._finished(rows), strict=True)
        ]

    def select(self, rows: Sequence[int]) -> Dataset:
        """Return some rows in memory; those that are left out are missing."""
        return Dataset.from_list([row for row in self._finished(list(rows)) if row is not None])

    def sample(self, most: int = SAMPLE_ROWS) -> Dataset:
        """Return the first rows of blocks that are spread evenly over the files, in memory."""
        blocks = np.unique(np.linspace(0, len(self.order.sizes) - 1, SAMPLE_BLOCKS).astype(int))
        share = -(-most // len(blocks))
        rows = [int(self.order.starts[b]) + i for b in blocks for i in range(min(share, int(self.order.sizes[b])))]
        self._sampled.update(zip(rows[:most], self._read(rows[:most]), strict=True))
        return self.select(rows[:most])

    def where(self, row: int) -> str:
        """Return the file of a row, and its number there, from 0; of converted files the number among all rows."""
        if self.index.source is not None:
            return f"{self.index.source}, row {row}"
        file = self.index.files[self.order.block_of(row)]
        first = self.order.starts[int(np.searchsorted(self.index.files, file))]
        return f"{self.index.urls[file]}, row {row - first}"

    def _finished(self, rows: Sequence[int]) -> list[Row | None]:
        read = self._read(rows)
        for place, number in enumerate(rows):
            for step in self._steps:
                try:
                    read[place] = None if read[place] is None else step(read[place])
                except ValueError as error:
                    raise ValueError(f"{self.where(number)}: {error}; repair or remove it") from error
        for encode in self._encoders:
            present = [place for place, row in enumerate(read) if row is not None]
            encoded = encode([read[place] for place in present]) if present else []
            for place, row in zip(present, encoded, strict=True):
                read[place] = row
        return read

    def _replacement(self, row: int) -> Row:
        block = self.order.block_of(row)
        first, size = int(self.order.starts[block]), int(self.order.sizes[block])
        for step in range(1, size):
            other = self._finished([first + (row - first + step) % size])[0]
            if other is not None:
                if not self.num_replaced:
                    logger.warning(
                        "%s is left out (it is too long, or has no token to learn from); the next row takes its place."
                        " Further cases are not reported",
                        self.where(row),
                    )
                self.num_replaced += 1
                return other
        raise ValueError(
            f"{self.where(first)} and the {size - 1} rows after it are all left out (longer than the limit on their"
            " length?); raise the limit, or remove them"
        )

    def _read(self, rows: Sequence[int]) -> list[Row]:
        read: list[Row] = [{}] * len(rows)
        # Block by block, so that none is loaded twice.
        for place in sorted(range(len(rows)), key=lambda place: rows[place]):
            number = rows[place]
            if number in self._sampled:
                read[place] = dict(self._sampled[number])
                continue
            if not 0 <= number < len(self):
                raise IndexError(f"row {number} of {len(self)} rows")
            block = self.order.block_of(number)
            table, row = self._block(block), number - int(self.order.starts[block])
            read[place] = {ours: table.column(theirs)[row].as_py() for ours, theirs in self._theirs.items()}
        return read

    def _block(self, number: int) -> pa.Table:
        if self._pid != os.getpid():  # A worker of a DataLoader: open files belong to the process that opened them.
            self._open, self._pid = OrderedDict(), os.getpid()
        if number not in self._blocks:
            self._blocks[number] = self._loaded(number)
            most = self.order.window + 2 * int(self.order.sizes.max())
            while sum(len(block) for block in self._blocks.values()) > most:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def _loaded(self, number: int) -> pa.Table:
        try:
            return self._row_group(number)
        except (OSError, pa.ArrowException) as error:
            url, reason = self.index.urls[self.index.files[number]], " ".join(str(error).split())
            raise RuntimeError(
                f"{url} can no longer be read ({reason}); restore it, and run the same command with --resume auto"
            ) from error

    def _row_group(self, number: int) -> pa.Table:
        file = int(self.index.files[number])
        if file not in self._open:
            self._open[file] = pq.ParquetFile(fsspec.open(self.index.urls[file], "rb").open(), pre_buffer=True)
        self._open.move_to_end(file)
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)
        table = self._open[file].read_row_group(int(self.index.groups[number]), columns=list(self._theirs.values()))
        if len(table) != self.index.sizes[number]:
            raise OSError(f"{self.index.urls[file]} has changed since the run began")
        return table


def load_sharded_rows(
    name: str,
    *,
    split: str = "train",
    config_name: str | None = None,
    columns: Mapping[str, str] | None = None,
    window: int = 10_000,
) -> ShardedRows:
    """Find the files of a dataset and read their footers.

    Args:
        name: files (`rows/*.parquet`, `hf://datasets/owner/name/*.parquet`, `s3://bucket/rows/*.parquet`), a folder,
            or a dataset on the Hub. Formats other than Parquet are converted once.
        split: its name; a slice is not possible.
        config_name, columns: see `load_rows`.
        window: rows that are shuffled together.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as for `load_rows`; also files with unequal columns.
    """
    return ShardedRows(_index_files(*_find_files(name, split, config_name)), window, columns)


def known_rows(rows: Dataset | ShardedRows) -> Dataset:
    """Return the rows that can be looked at before training: all of a Dataset, a sample of sharded rows."""
    return rows.sample() if isinstance(rows, ShardedRows) else rows
