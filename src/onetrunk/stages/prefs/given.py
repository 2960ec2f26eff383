"""Completions that the rows bring: pairs, groups of several models, and logged conversations. No model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from onetrunk.data.groups import Bad, Group, group_of, read_groups, shape_of
from onetrunk.feedback.sampling import PromptItem
from onetrunk.judges.judge import digest, prompt_key
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.prefs.sampling import open_stream
from onetrunk.stages.rows import load_dataset_rows
from onetrunk.types import SampledText
from onetrunk.utils.disk_set import DiskSet


@dataclass(frozen=True)
class GivenItem(PromptItem):
    """A prompt with its completions. Its key is of prompt and completions: a prompt may stand in several rows."""

    group: Group

    def texts(self) -> list[SampledText]:
        """Return the completions."""
        return [SampledText(text, self.group.is_whole(index)) for index, text in enumerate(self.group.texts)]


class GivenSource:
    """Iterates over the groups of a run's shard as items, without repetitions.

    A prompt belongs to a shard by its content, as when it is sampled. Rows are read as they are needed and not held;
    logs are grouped by their prompt first, which holds them.

    Raises:
        ValueError: no known shape, bad rows, or texts and conversations mixed. Of a stream they are found while it
            is read.
    """

    def __init__(self, args: PrefsArguments):
        self.args, self.counts = args, Counter[str]()
        self._rows: Dataset | None = None if args.streaming else load_dataset_rows(args)
        self.total: int | None = None
        # Also known for an empty shard, whose file has the columns of the others.
        self.conversational = False
        for group in self._groups():
            self.conversational = isinstance(group.prompt, list)
            if self._rows is None:
                break
            # All rows are checked before a judge is asked.
            self.total = (self.total or 0) + args.part.takes(prompt_key(group.prompt))

    def __iter__(self) -> Iterator[GivenItem]:
        with DiskSet() as seen:
            for group in self._groups():
                if not self.args.part.takes(prompt_key(group.prompt)):
                    continue
                key = digest([group.prompt, list(group.texts)])
                is_new = seen.add(bytes.fromhex(key))
                self.counts["prompts" if is_new else "repeated_prompts"] += 1
                if is_new:
                    yield GivenItem(group.prompt, key, [], group)

    def _groups(self) -> Iterator[Group]:
        conversational = None
        for number, group in enumerate(self._read()):
            is_list = isinstance(group.prompt, list)
            if conversational is None:
                conversational = is_list
            elif conversational is not is_list:
                raise ValueError(
                    f"the prompt of group {number} is {'a conversation' if is_list else 'text'}, and that of the first"
                    " is not; give rows of one form, because trainers take only those"
                )
            yield group

    def _read(self) -> Iterable[Group]:
        if self._rows is not None:
            return read_groups(self._rows, self._rows.column_names)
        return streamed_groups(open_stream(self.args))


def streamed_groups(rows: Iterable[dict[str, Any]]) -> Iterator[Group]:
    """Yield the groups of a stream; the first bad row ends it with ValueError.

    Logs are rejected, because rows of one prompt may be anywhere in the stream.
    """
    shape = None
    for number, row in enumerate(rows):
        shape = shape or shape_of(row, row)
        if shape == "logs":
            raise ValueError(
                "streaming reads each row once, and the completions of one prompt stand in several rows; leave"
                " streaming out, or give groups: prompt and completions"
            )
        try:
            yield group_of(row, shape)
        except Bad as bad:
            raise ValueError(f"row {number} of the stream cannot be used: {bad}; repair or remove it") from bad
