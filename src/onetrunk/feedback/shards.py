"""Write rows to files that are whole or absent, and divide prompts among jobs by their content.

A prompt belongs to shard `hash mod n`, wherever it stands in the input. So the shards of any division are disjoint and
together hold every prompt.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.utils.files import atomic_path, delete_temporaries, parse_json

Rows = Sequence[dict[str, Any]]
_SHARD = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Shard:
    """Number `index` (from 0) of `count` parts."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "i/n"."""
        match = _SHARD.fullmatch(text.strip())
        index, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not index < count:
            raise ValueError(f"shard is {text!r}; write i/n with i from 0 to n-1, such as 0/4 to 3/4")
        return cls(index, count)

    def takes(self, prompt_key: str) -> bool:
        """Return whether a prompt with this key belongs to the shard."""
        return int(prompt_key, 16) % self.count == self.index

    def suffix(self) -> str:
        """Return what a file's name has before its extension; nothing for the only shard."""
        return "" if self.count == 1 else f"-{self.index:05d}-of-{self.count:05d}"


def prompt_words(key: str) -> tuple[int, int]:
    """Return 64 bits of a key as two integers below 2**32, for random draws that depend on the prompt."""
    return int(key[:8], 16), int(key[8:16], 16)


@contextlib.contextmanager
def rows_file(path: Path) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that appends rows as JSON lines; `path` appears when the block ends without an error.

    First deletes the temporary files of a killed writer: the caller holds the folder's lock.
    """
    delete_temporaries(path.parent, path.name)
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8", errors="replace") as file:
        yield lambda rows: file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that `rows_file` wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            yield from (parse_json(line) for line in file)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{path} cannot be read ({error}); delete it and make it again") from error


def shard_files(path: Path, count: int) -> list[Path]:
    """Return the files of `count` shards of `path`, in order."""
    files = [path.with_name(f"{path.stem}{Shard(i, count).suffix()}{path.suffix}") for i in range(count)]
    missing = [f"{i}/{count}" for i, file in enumerate(files) if not file.is_file()]
    if missing:
        raise RuntimeError(
            f"{path.parent} lacks the {path.suffix[1:]} file of the shards {', '.join(missing)}; run those first, with"
            " the same settings and output_dir"
        )
    return files
