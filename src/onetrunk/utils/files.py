"""Atomic writes, checked reads of JSON, YAML and tensors, checks of output folders and names, and locks.

A write goes to a temporary file in the same folder, is synced to disk and renamed over the target, and the folder is
synced: a process killed at any moment leaves the old file or the new one, never a part of one. It may also leave a
hidden `.<name>.<random>.tmp`, which nothing reads.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 1e300
LONGEST_YAML, MOST_YAML_VALUES, DEEPEST_YAML = 2**20, 100_000, 50
NAME = re.compile(r"[A-Za-z0-9._-]{1,96}")

# safetensors is imported inside the functions, so that the command line answers `--help` without loading torch.


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str], is_durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write to; if the block succeeds, it replaces `path`. Missing folders are created.

    The temporary name is random, and a link at `path` is replaced itself, so nothing is written through a link.

    Args:
        is_durable: False: do not sync it to the disk, if it has no value after a crash of the machine.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
        if is_durable:
            sync(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync(target.parent)


def delete_temporaries(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Delete the temporary files that killed writers of `name` (None: of any file) left directly in a folder.

    The caller holds the folder's lock. Heartbeats are written without it, so only their own `name` deletes theirs:
    another process may be about to rename one.
    """
    pattern = "*" if name is None else glob.escape(name)
    for temporary in Path(folder).glob(f".{pattern}.{'[0-9a-f]' * 16}.tmp"):
        if name is not None or not temporary.name.startswith("._heartbeat-"):
            temporary.unlink(missing_ok=True)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` atomically, as UTF-8 (half a surrogate pair as `?`) and with its line ends unchanged."""
    atomic_write_bytes(path, text.encode("utf-8", "replace"))


def atomic_write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write `data` to `path` atomically, as indented JSON with the keys in their order."""
    atomic_write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors to a safetensors file atomically. Tensors that share memory are stored separately."""
    from safetensors.torch import save

    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    # Not `save_file`, which makes the file unreadable to the group whatever the umask is.
    atomic_write_bytes(path, save(copies))


def sync(path: str | os.PathLike[str]) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file."""
    with _reading(path, "JSON", ValueError):
        return parse_json(Path(path).read_bytes())


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, for files and answers that others write.

    An integer beyond the range of a float is infinite, as 1e400 is, so that no number overflows where it is used.
    """
    try:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 300 else float(digits))
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def read_number(value: Any, kind: type = float) -> Any:
    """Return a number from a file or an answer as a float or an int; TypeError for any other value."""
    # Whole numbers may be too large for a float, where isfinite would raise.
    if type(value) not in (int, float) or not -LARGEST <= value <= LARGEST or kind(value) != value:
        raise TypeError(f"{value!r:.80} where a finite {kind.__name__} is expected")
    return kind(value)


@contextlib.contextmanager
def reading_content(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what a wrong name, type or number in a file raises inside the block into one error that names the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"{path} is not of the expected form ({fault}); restore it from an older copy") from error


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that rejects a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            if str(key.value) in first_lines:
                problem = f"{key.value} is already given in line {first_lines[key.value]}; keep one of the two"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            first_lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _check_size(root: yaml.Node | None) -> None:
    """Raise YAMLError for a file whose aliases, written out, are deeper or more than anyone writes, or endless."""
    left, count = [(root, 0)], 0
    while left:
        node, depth = left.pop()
        count += 1
        if count > MOST_YAML_VALUES or depth > DEEPEST_YAML:
            raise yaml.YAMLError(f"it holds more than {MOST_YAML_VALUES:,} values or {DEEPEST_YAML} levels")
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        for part in parts:
            left += [(inner, depth + 1) for inner in (part if isinstance(part, tuple) else (part,))]


def read_yaml(path: Path, place: str | None = None) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file and the line number of each top-level key."""
    place = str(path) if place is None else place
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > LONGEST_YAML:
            raise yaml.YAMLError(f"it has more than {LONGEST_YAML:,} characters")
        node = yaml.compose(text, yaml.SafeLoader)
        _check_size(node)
        content = yaml.load(text, _StrictLoader)  # noqa: S506  a SafeLoader
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text ({error.reason}); give a YAML file") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f" line {mark.line + 1}" if mark else ""
        fault = "" if isinstance(error, yaml.constructor.ConstructorError) else " is not YAML"
        raise ValueError(f"{place}{where}{fault}: {problem or error}") from error
    except RecursionError as error:
        raise ValueError(f"{place} holds a value that cannot be read: it is nested too deeply") from error
    except ValueError as error:  # Such as a date that does not exist.
        raise ValueError(f"{place} holds a value that cannot be read: {error}; put it in quotes") from error
    lines = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        lines[key.value] = key.start_mark.line + 1
        if key.tag != "tag:yaml.org,2002:str":
            raise ValueError(
                f"{place} line {lines[key.value]}: the key {key.value!r:.100} is not text for YAML"
                f" ({key.tag.rpartition(':')[2]}); write a name, in quotes where YAML reads it otherwise"
            )
    return content, lines


def digest(value: Any) -> str:
    """Return the sha256 of a JSON value, the same for equal values."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the named tensors of a safetensors file, on the CPU; raises as `read_json`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with _reading(path, "safetensors", SafetensorError):
        return load_file(path)


def check_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], why: str
) -> None:
    """Raise ValueError unless tensors of a file have the names and shapes of `expected`, and finite numbers."""
    shapes, needed = ({name: tuple(t.shape) for name, t in part.items()} for part in (tensors, expected))
    if shapes != needed:
        raise ValueError(f"{path} holds {shapes}, this run needs {needed}: {why}")
    require_finite_tensors(path, tensors)


def require_finite_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for numbers of a file that are not finite."""
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        raise ValueError(f"{path}: {bad[0]} is not finite; resume from an older checkpoint, or take an older copy")


@contextlib.contextmanager
def _reading(path: str | os.PathLike[str], kind: str, *damage: type[Exception]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"{path} cannot be read ({error.strerror or error}); check the folder's name") from error
    except damage as error:
        raise RuntimeError(f"{path} is damaged or not {kind} ({error}); restore it from an older copy") from error


def looks_like_path(name: str, suffixes: Container[str] = ()) -> bool:
    """Return whether a name that does not exist here was meant as a path, and not as a name on the Hub.

    Args:
        suffixes: that only files have, such as ".jsonl".
    """
    if name.startswith((".", "/", "~")) or "\\" in name or Path(name).suffix in suffixes:
        return True
    # A name on the Hub is "owner/name", so one separator does not make a path.
    return name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def require_output_dir(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a folder that exists and can be written to; create it if it is missing."""
    folder = Path(path)
    if not os.fspath(path) or os.path.abspath(folder) == "/":
        raise ValueError(f"the output folder is {os.fspath(path)!r}; name a folder of the run's own")
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"the output folder {folder} is a file; name a folder, or move the file away")
        folder.mkdir(parents=True, exist_ok=True)
        # Only a real file shows whether it works: permission bits do not apply to root, nor to a read-only mount.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RuntimeError(
            f"the output folder {folder!s:.300} cannot be written ({error.strerror}); name another, or change its"
            " permissions"
        ) from error
    return folder


def require_name(name: str, what: str) -> str:
    """Return a name after checking that it can safely become one part of a path.

    `what` names the setting in the error message.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == "." or name.startswith(".."):
        shown = name[:100] if isinstance(name, str) else name
        raise ValueError(
            f"{what} is {shown!r}; a name has 1 to 96 of the characters A-Z a-z 0-9 . _ - and does not begin with '..'"
        )
    return name


def unique_names(names: Sequence[str]) -> list[str]:
    """Return different names: the second of a name becomes name_2."""
    unique: list[str] = []
    for name in names:
        numbered = chain([name], (f"{name}_{number}" for number in count(2)))
        unique.append(next(candidate for candidate in numbered if candidate not in unique))
    return unique


@contextlib.contextmanager
def write_lock(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the exclusive right to write to a file or folder inside the block. A process that holds it may enter again.

    The lock file `<path>.lock` may stay after the block. The folder of `path` exists.
    """
    lock = FileLock(f"{Path(path).resolve()}.lock", thread_local=False, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise RuntimeError(
            f"{path} is being written by another process (`fuser {lock.lock_file}` names it); wait for it, or stop it"
        ) from error
    try:
        yield
    finally:
        lock.release()


def held_folder(folder: str | os.PathLike[str], part: str = "") -> contextlib.AbstractContextManager[None]:
    """Return the `write_lock` of a run's folder, which exists.

    `part` names the part of the folder that this process writes, if several processes share it.
    """
    # A name with an underscore is not uploaded to the Hub.
    return write_lock(Path(folder) / f"_run{part}")
