"""What a pipeline remembers of its stages, and how it sees that something they rest on has changed.

A stage rests on its config, its options, and every file and folder that these name. Each is known by the sha256 of
what is in it; a stage is done while all of them are as they were when it ended, and its outputs are there, whole.
Settings that are free (`Stage.free`) may change. What a Python file imports in its turn is not followed. Knows files;
starts nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.folders import described
from onetrunk.models.scorer import SCALE_FILE
from onetrunk.stages.resuming import last_finished_checkpoint, left_by_a_run, result_problems
from onetrunk.stages.run.pipeline import RESUMING_VERBS, Pipeline, Stage, texts_in
from onetrunk.utils.files import atomic_write_json, read_json
from onetrunk.utils.redaction import redact, redact_all

STATE_FILE = "pipeline.json"
CONFIG = "its config"
# What a run leaves beside its result, and nobody reads on.
BESIDE = ("checkpoint-*", "runs", "__pycache__", ".*", "events.out.tfevents.*")
# Specs that name a path behind a word, or before one: "reward:folder", "rewards.py:polite".
PREFIXES = ("reward:",)
UNCHANGED = "nothing has changed"
# The length of a training: it resumes and trains to the new end.
LENGTHS = ("num_rollouts", "max_steps", "num_train_epochs")
# Where `prefs` writes its rows, which it replaces where other settings decide them.
ROWS = "data"
# What `prefs` and `eval` keep of judges' answers; without them the outputs are as good.
KEPT = "ledger/"


@dataclass(frozen=True)
class Plan:
    """What is to be done with a stage.

    Args:
        stage: the stage.
        action: "done" (nothing), "run" (for the first time, or again since something changed), "resume".
        reason: in words.
        inputs: what it rests on -> digest; None while an earlier stage has yet to write it.
        deletes: names in its output folder that it would delete, for which it needs `--overwrite`.
    """

    stage: Stage
    action: str
    reason: str
    inputs: dict[str, str | None]
    deletes: tuple[str, ...] = ()


class PipelineState:
    """The record of a pipeline's stages, in `pipeline.json` of its output folder.

    Args:
        pipeline: whose stages.

    Raises:
        RuntimeError: the record is damaged.
    """

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.path = pipeline.output_dir / STATE_FILE
        kept = read_json(self.path) if self.path.exists() else {}
        if not isinstance(kept, dict) or not all(isinstance(kept.get(k, {}), dict) for k in ("stages", "digests")):
            raise RuntimeError(
                f"{self.path} is not the record of a pipeline; delete it, and every stage runs again (with --overwrite"
                " where it has left a run)"
            )
        self.stages: dict[str, dict[str, Any]] = kept.get("stages", {})
        self._digests: dict[str, list[Any]] = kept.get("digests", {})

    def plan(self, stage: Stage, waits_for: Iterable[Stage] = (), is_forced: bool = False) -> Plan:
        """Return what is to be done with a stage.

        Args:
            stage: the stage.
            waits_for: earlier stages that are still to run.
            is_forced: start it over even if it is done.
        """
        inputs = self._inputs(stage, waits_for)
        left = tuple(left_behind(stage))
        record = self.stages.get(stage.name)
        if is_forced or record is None:
            return Plan(stage, "run", "forced" if is_forced else "never ran", inputs, left)
        is_resumable = self.resumable(stage)
        changed, coming = _changes(stage, inputs, record), [name for name in inputs if inputs[name] is None]
        if changed:
            reason = f"changed: {'; '.join(changed)}"
            if stage.settings.get("allow_config_change") is True and is_resumable:
                return Plan(stage, "resume", f"{reason} (allow_config_change is set)", inputs)
            return Plan(stage, "run", reason, inputs, left)
        if coming:
            return Plan(stage, "run", f"waits for {', '.join(coming)}", inputs)
        if record.get("status") != "done":
            return Plan(stage, "resume", f"was {record.get('status')}", inputs)
        reason = _damage(stage, record) or _other_length(stage, record)
        if reason is None:
            return Plan(stage, "done", _free_changes(stage, record) or UNCHANGED, inputs)
        if is_resumable:
            return Plan(stage, "resume", reason, inputs)
        # The rows of `prefs` are made again from its ledger.
        return Plan(stage, "run", reason, inputs, left if stage.verb in RESUMING_VERBS else ())

    def resumable(self, stage: Stage) -> bool:
        """Return whether a stage that trains has left a checkpoint since it last started over."""
        if stage.verb not in RESUMING_VERBS:
            return False
        checkpoint = last_finished_checkpoint(stage.outputs[0])
        # What lay there before a run began is of a run that rested on something else.
        stale = self.stages.get(stage.name, {}).get("stale", {})
        return checkpoint is not None and stale.get(checkpoint.name) != checkpoint.stat().st_mtime_ns

    def note(self, plan: Plan, status: str, **more: Any) -> None:
        """Write down how a stage stands: "running", "failed", "interrupted" or "done"."""
        stage = plan.stage
        self.stages[stage.name] = {
            "status": status,
            "command": redact(stage.shown()),
            "inputs": plan.inputs,
            "settings": _compared(stage),
            **({"files": _files_left(stage)} if status == "done" else {}),
            **more,
        }
        self._write()

    def _write(self) -> None:
        # Of files that are gone, digests are of no use.
        self._digests = {name: entry for name, entry in self._digests.items() if Path(name).exists()}
        record = {"pipeline": str(self.pipeline.path), "stages": self.stages, "digests": self._digests}
        atomic_write_json(self.path, record)

    def _inputs(self, stage: Stage, waits_for: Iterable[Stage]) -> dict[str, str | None]:
        coming = [(output.resolve(), other) for other in waits_for for output in other.outputs]
        inputs: dict[str, str | None] = {}
        if stage.verb is None:
            inputs[str(stage.path)] = self._digest(stage.path)
        bound = {name: value for name, value in stage.settings.items() if name not in stage.free}
        for path in sorted(set(paths_in(bound)), key=str):
            if any(_is_within(path, output) for output in stage.outputs):
                continue
            if any(_is_within(path, output) or _is_within(output, path) for output, _ in coming):
                inputs[str(path)] = None
            elif path.exists():
                inputs[str(path)] = self._digest(path)
        return inputs

    def _digest(self, path: Path) -> str:
        if path.is_file():
            return self._file_digest(path)
        names = hashlib.sha256()
        for file in files_of(path):
            names.update(f"{_relative(file, path)} {self._file_digest(file)}\n".encode())
        return names.hexdigest()

    def _file_digest(self, path: Path) -> str:
        about = path.stat()
        stamp = [about.st_size, about.st_mtime_ns]
        known = self._digests.get(str(path))
        if known is None or known[:2] != stamp:
            with path.open("rb") as file:
                known = [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
            self._digests[str(path)] = known
        return known[2]


def _changes(stage: Stage, inputs: dict[str, str | None], record: dict[str, Any]) -> list[str]:
    """Return everything that a stage depends on and that has changed, a phrase each.

    Free settings may change. Files that an earlier stage has yet to write are left out.
    """
    before = {name: digest for name, digest in record.get("inputs", {}).items() if name != CONFIG}
    then, now = record.get("settings"), _compared(stage)
    if then is None:
        # Written by an older version, which kept a digest of the settings.
        changed = [CONFIG] if record.get("inputs", {}).get(CONFIG) != _settings_digest(stage) else []
    else:
        names = sorted(name for name in {*then, *now} - stage.free if then.get(name) != now.get(name))
        changed = [_change(name, then, now) for name in names]
    free_paths = {str(path) for path in paths_in({name: stage.settings.get(name) for name in stage.free})}
    gone = {name for name in before.keys() - inputs.keys() if name not in free_paths}
    other = {name for name, digest in inputs.items() if digest is not None and digest != before.get(name)}
    return changed + sorted(gone | other)


def _other_length(stage: Stage, record: dict[str, Any]) -> str | None:
    """Return how the planned length of a training has changed since it ended. A free change, but the stage resumes."""
    then, now = record.get("settings"), _compared(stage)
    names = [name for name in LENGTHS if then and name in stage.free and then.get(name) != now.get(name)]
    return f"another length: {', '.join(_change(name, then, now) for name in names)}" if names else None


def _free_changes(stage: Stage, record: dict[str, Any]) -> str | None:
    """Return which free settings have changed since a stage ended, as a phrase; None where none has."""
    then, now = record.get("settings", {}), _compared(stage)
    names = sorted(name for name in stage.free if then and then.get(name) != now.get(name))
    return f"only free settings have changed: {', '.join(names)}" if names else None


def _change(name: str, then: dict[str, Any], now: dict[str, Any]) -> str:
    return f"{name}: {_short(then.get(name))} -> {_short(now.get(name))}"


def _compared(stage: Stage) -> dict[str, Any]:
    """Return the settings of a stage as they come back from its record."""
    about = {"verb": stage.verb} if stage.verb else {"outputs": [str(output) for output in stage.outputs]}
    return json.loads(json.dumps(redact_all({**about, **stage.settings}), default=str))


def _short(value: Any) -> str:
    text = "not set" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}..."


def left_behind(stage: Stage) -> list[str]:
    """Return the names of what a stage has left and deletes when it starts over."""
    if stage.verb in RESUMING_VERBS:
        return left_by_a_run(stage.outputs[0])
    has_rows = stage.verb == "prefs" and any((stage.outputs[0] / ROWS).glob("*"))
    return [ROWS] if has_rows else []


def _damage(stage: Stage, record: dict[str, Any]) -> str | None:
    """Return what is wrong with the outputs of a finished stage; None if they are all there.

    A result with a manifest has to be as it was written. Other outputs may have been edited by hand: only missing
    files count.
    """
    missing = [str(output) for output in stage.outputs if not output.exists()]
    if missing:
        return f"{', '.join(missing)} is gone"
    if stage.verb in RESUMING_VERBS:
        found = result_problems(stage.outputs[0])
        if stage.verb in ("reward", "distill") and not (stage.outputs[0] / SCALE_FILE).is_file():
            found.append(f"{SCALE_FILE}: missing")
        return f"{stage.outputs[0]} is damaged ({described(found)})" if found else None
    gone = [
        str(Path(output) / name)
        for output, names in record.get("files", {}).items()
        for name in names
        if not (Path(output) / name).is_file()
    ]
    return f"{described(gone)} is gone" if gone else None


def _files_left(stage: Stage) -> dict[str, list[str]]:
    """Return the files in the folders that a stage has left; those of a training are in its manifest."""
    if stage.verb in RESUMING_VERBS:
        return {}
    return {
        str(output): [name for file in files_of(output) if not (name := _relative(file, output)).startswith(KEPT)]
        for output in stage.outputs
        if output.is_dir()
    }


def _relative(file: Path, folder: Path) -> str:
    return file.relative_to(folder).as_posix()


def _settings_digest(stage: Stage) -> str:
    about = {"verb": stage.verb, "settings": stage.settings, "outputs": [str(o) for o in stage.outputs]}
    return hashlib.sha256(repr(_ordered(about)).encode()).hexdigest()


def _ordered(value: Any) -> Any:
    """Return a value whose text does not depend on the order of keys."""
    if isinstance(value, dict):
        return sorted((str(key), _ordered(entry)) for key, entry in value.items())
    return [_ordered(entry) for entry in value] if isinstance(value, list) else value


def paths_in(settings: dict[str, Any]) -> Iterator[Path]:
    """Yield what may be a path among the texts of some settings: whole, or before or behind a colon."""
    for text in texts_in(settings):
        for prefix in PREFIXES:
            text = text.removeprefix(prefix)
        before, colon, _ = text.rpartition(":")
        for candidate in (text, before) if colon else (text,):
            if candidate and len(candidate) < 1000 and "\n" not in candidate and "://" not in candidate:
                yield Path(candidate).expanduser()


def files_of(folder: Path) -> list[Path]:
    """Return the files of a folder that a later stage may read, sorted; a link to a folder is not followed."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_beside(name)]
        found += [Path(root) / name for name in names if not _is_beside(name)]
    return sorted(file for file in found if file.is_file())


def _is_beside(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in BESIDE)


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
