"""Rows of many Parquet or JSONL files, on a disk, the Hub or in a store, read while a run trains.

Nothing is downloaded or read whole. An index (`shard_index.py`) says where each block of rows begins: a row group of
Parquet, 256 lines of JSONL. A row is read by its number, so a resumed run needs no history, and every process reads
only the blocks that hold its rows. `BlockOrder` shuffles blocks, and then the rows of a window of blocks; only the
rows of about one window are in memory.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from onetrunk.data.files import check_renaming
from onetrunk.data.shard_index import ShardIndex, file_system, find_shards, index_shards
from onetrunk.utils.files import parse_json
from onetrunk.utils.randomness import PROMPTS_STREAM, WINDOWS_STREAM, generator_of

logger = logging.getLogger(__name__)

Row = dict[str, Any]

# Rows that are checked before training, from so many blocks; all others are checked when they are read.
SAMPLE_ROWS, SAMPLE_BLOCKS = 512, 8
# Seconds between attempts to read from a store or the Hub.
RETRY_WAITS_S = (1, 4, 16)
# Parquet files that are held open.
OPEN_FILES = 8


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
        windows = self._windows(seed, number)
        starts = windows.starts
        begin = int(np.searchsorted(starts, first, side="right")) - 1
        end = int(np.searchsorted(starts, last, side="left"))
        parts = [self._shuffled(windows, seed, number, window) for window in range(begin, end)]
        joined = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        return joined[first - starts[begin] : last - starts[begin]]

    def iterate(self, seed: int, number: int) -> Iterator[int]:
        """Yield all rows of the pass `number`; one window is in memory."""
        windows = self._windows(seed, number)
        for window in range(len(windows.starts) - 1):
            yield from self._shuffled(windows, seed, number, window).tolist()

    def _shuffled(self, windows: _Windows, seed: int, number: int, window: int) -> np.ndarray:
        blocks = windows.blocks[windows.bounds[window] : windows.bounds[window + 1]]
        rows = np.concatenate([np.arange(self.starts[b], self.starts[b + 1]) for b in blocks])
        return generator_of((seed, WINDOWS_STREAM, number, window)).permutation(rows)

    def _windows(self, seed: int, number: int) -> _Windows:
        return _permuted_windows(self, seed, number)


@dataclass(frozen=True)
class _Windows:
    """The permuted blocks of a pass, cut into windows.

    Args:
        blocks: all blocks, permuted.
        bounds: where each window begins in `blocks`, and their number.
        starts: where each window begins among the rows of the pass, and their number.
    """

    blocks: np.ndarray
    bounds: np.ndarray
    starts: np.ndarray


@lru_cache(maxsize=4)
def _permuted_windows(order: BlockOrder, seed: int, number: int) -> _Windows:
    blocks = generator_of((seed, PROMPTS_STREAM, number)).permutation(len(order.sizes))
    starts = np.concatenate([[0], np.cumsum(order.sizes[blocks])])
    _, bounds = np.unique(starts[:-1] // order.window, return_index=True)
    return _Windows(blocks, np.append(bounds, len(blocks)), np.append(starts[bounds], starts[-1]))


class BlockSampler:
    """A sampler for a DataLoader: the rows of the pass `epoch` in their order.

    Args:
        order: of the rows.
        seed: of the shuffle; None: the order of the files in every pass.
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
        self._blocks: OrderedDict[int, pa.Table | list[bytes]] = OrderedDict()
        self._cached_rows = 0
        # The rows of samples, as they are in the files: each check before training looks at them.
        self._sampled: dict[int, Row] = {}
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._pid = os.getpid()
        self.num_replaced = 0

    # --- what it holds ----------------------------------------------------------------------------------------------

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

    # --- what a row becomes -----------------------------------------------------------------------------------------

    def select_columns(self, names: Sequence[str]) -> ShardedRows:
        """Return these rows with only some of the files' columns; the others are not read from Parquet."""
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
        """Return these rows with another step that gets the rows of a batch together, after those of each row.

        Args:
            encode: returns as many rows, None for one that is left out.
            about: what the result depends on besides the rows; part of `contents`.
        """
        return self._changed(_encoders=(*self._encoders, encode), about=self.about + about)

    def _changed(self, **attributes: Any) -> ShardedRows:
        other = copy.copy(self)
        other._blocks, other._cached_rows, other._open = OrderedDict(), 0, OrderedDict()
        for name, value in attributes.items():
            setattr(other, name, value)
        return other

    # --- reading ----------------------------------------------------------------------------------------------------

    def __getitem__(self, rows: int | slice | Sequence[int]) -> Any:
        """Return a row, or of several rows a dict of columns, as datasets.Dataset does."""
        if isinstance(rows, str):
            raise TypeError(f"the column {rows!r} of {len(self)} rows is not in memory; read it row by row")
        if isinstance(rows, int | np.integer):
            return self.__getitems__([int(rows)])[0]
        rows = range(len(self))[rows] if isinstance(rows, slice) else rows
        read = self.__getitems__(list(rows))
        return {name: [row[name] for row in read] for name in (read[0] if read else self.column_names)}

    def __getitems__(self, rows: Sequence[int]) -> list[Row]:
        """Return several rows; a row that is left out is replaced by the next one of its block."""
        encoded = self._finished(rows)
        return [self._replacement(i) if row is None else row for i, row in zip(rows, encoded, strict=True)]

    def select(self, rows: Sequence[int]) -> Dataset:
        """Return some rows in memory; those that are left out are missing."""
        read = [row for row in self._finished(list(rows)) if row is not None]
        return Dataset.from_list(read)

    def sample(self, most: int = SAMPLE_ROWS) -> Dataset:
        """Return the first rows of blocks that are spread evenly over the files, in memory."""
        blocks = np.unique(np.linspace(0, len(self.order.sizes) - 1, SAMPLE_BLOCKS).astype(int))
        share = -(-most // len(blocks))
        rows = [int(self.order.starts[b]) + i for b in blocks for i in range(min(share, int(self.order.sizes[b])))]
        self._sampled.update(zip(rows[:most], self._read(rows[:most]), strict=True))
        return self.select(rows[:most])

    def where(self, row: int) -> str:
        """Return the file of a row, and its number there, from 0."""
        block = self.order.block_of(row)
        file = self.index.files[block]
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
            encoded = self._apply(encode, [read[place] for place in present], [rows[place] for place in present])
            for place, row in zip(present, encoded, strict=True):
                read[place] = row
        return read

    def _apply(self, encode: Callable[..., Any], rows: list[Row], numbers: list[int]) -> Sequence[Row | None]:
        try:
            return encode(rows) if rows else []
        except ValueError as error:
            for row, number in zip(rows, numbers, strict=True):
                try:
                    encode([row])
                except ValueError as fault:
                    raise ValueError(f"{self.where(number)}: {fault}") from error
            raise

    def _replacement(self, row: int) -> Row:
        block = self.order.block_of(row)
        first, size = int(self.order.starts[block]), int(self.order.sizes[block])
        for step in range(1, size):
            other = self._finished([first + (row - first + step) % size])[0]
            if other is not None:
                if not self.num_replaced:
                    logger.warning(
                        "%s is left out (it is too long, or has no token to learn from); the next row takes its place,"
                        " here and in further cases, which are not reported",
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
            read[place] = self._row(self._block(block), number - int(self.order.starts[block]), number)
        return read

    def _row(self, block: pa.Table | list[bytes], place: int, number: int) -> Row:
        if isinstance(block, pa.Table):
            return {ours: block.column(theirs)[place].as_py() for ours, theirs in self._theirs.items()}
        try:
            row = parse_json(block[place])
        except ValueError as error:
            raise ValueError(f"{self.where(number)}: {error}; repair or remove it") from error
        new = sorted(set(row) - set(self.index.columns)) if isinstance(row, dict) else ["no object"]
        if new:
            raise ValueError(
                f"{self.where(number)} has {', '.join(new)}, and the first rows have the columns"
                f" {', '.join(self.index.columns)}; write all columns into the first row, null where it has none"
            )
        return {ours: row.get(theirs) for ours, theirs in self._theirs.items()}

    def _block(self, number: int) -> pa.Table | list[bytes]:
        if self._pid != os.getpid():  # A worker of a DataLoader: open files belong to the process that opened them.
            self._open, self._pid = OrderedDict(), os.getpid()
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        block = self._loaded(number)
        self._blocks[number] = block
        self._cached_rows += int(self.order.sizes[number])
        most = self.order.window + 2 * int(self.order.sizes.max())
        while self._cached_rows > most:
            old, _ = self._blocks.popitem(last=False)
            self._cached_rows -= int(self.order.sizes[old])
        return block

    def _loaded(self, number: int) -> pa.Table | list[bytes]:
        url = self.index.urls[self.index.files[number]]
        for wait in (*RETRY_WAITS_S, None):
            try:
                return self._parquet(number) if self.index.is_parquet else self._lines(number)
            except (OSError, pa.ArrowException) as error:
                self._open.clear()
                if wait is None or isinstance(error, FileNotFoundError) or "://" not in url:
                    raise RuntimeError(
                        f"{url} cannot be read ({' '.join(str(error).split())}), although it could when the run"
                        " began; when it can, the same command with --resume auto continues"
                    ) from error
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _parquet(self, number: int) -> pa.Table:
        file = int(self.index.files[number])
        if file not in self._open:
            self._open[file] = pq.ParquetFile(fsspec.open(self.index.urls[file], "rb").open(), pre_buffer=True)
        self._open.move_to_end(file)
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)
        table = self._open[file].read_row_group(int(self.index.begins[number]), columns=list(self._theirs.values()))
        self._require_rows(number, len(table))
        return table

    def _lines(self, number: int) -> list[bytes]:
        url = self.index.urls[self.index.files[number]]
        files, path = file_system(url)
        data = files.cat_file(path, start=int(self.index.begins[number]), end=int(self.index.ends[number]))
        lines = [line for line in data.split(b"\n") if line.strip()]
        self._require_rows(number, len(lines))
        return lines

    def _require_rows(self, number: int, count: int) -> None:
        if count != self.index.sizes[number]:
            url = self.index.urls[self.index.files[number]]
            raise OSError(f"{url} has changed since the run began")


def load_sharded_rows(
    name: str,
    *,
    split: str = "train",
    config_name: str | None = None,
    columns: Mapping[str, str] | None = None,
    window: int = 10_000,
) -> ShardedRows:
    """Find the files of a dataset and index their rows.

    Args:
        name: files (`rows/*.parquet`, `hf://datasets/owner/name/*.jsonl`, `s3://bucket/rows/*.parquet`), a folder, or
            a dataset on the Hub; Parquet or JSONL.
        split, config_name, columns: as for `load_rows`.
        window: rows that are shuffled together.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as for `load_rows`; ValueError for other formats.
    """
    return ShardedRows(index_shards(find_shards(name, split, config_name)), window, columns)


def known_rows(rows: Dataset | ShardedRows) -> Dataset:
    """Return the rows that can be looked at before training: all of a Dataset, a sample of sharded rows."""
    return rows.sample() if isinstance(rows, ShardedRows) else rows


def checked_rows(rows: ShardedRows, fault: Callable[[Row], str | None]) -> ShardedRows:
    """Return sharded rows that are checked when they are read; a sample is checked now.

    Args:
        rows: to check.
        fault: returns what is wrong with a row, or None.

    Raises:
        ValueError: a row of the sample is bad.
    """

    def check(row: Row) -> Row:
        if reason := fault(row):
            raise ValueError(reason)
        return row

    rows = rows.then(check)
    rows.sample()
    return rows
