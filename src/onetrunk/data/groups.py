"""Completions that exist already: pairs, groups and logged conversations, in the usual shapes of datasets.

pairs    `chosen`, `rejected`, and `prompt` (text, messages, or left out): the first is better
lists    the same with lists of texts (RewardBench 2): each of the first is better than each of the second
groups   `prompt`, `completions`: texts, or dicts with `text`, `response`, `completion` or `content`
logs     `prompt` and `completion`, or `messages`: rows of one prompt belong together

`pairs.py` reads the pairs, as for a reward model. Optional columns: `subset`, `reference` (an answer that is known to
be good), `probability` (that `chosen` is better) and the flags `*_stopped` of `rows.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onetrunk.data.pairs import messages_of, pair_of, prompt_of, require, text_of
from onetrunk.data.rows import SIDES, bad_row, probability_fault, prompt_fault, text_fault, type_fault
from onetrunk.types import Prompt, as_text

Row = Mapping[str, Any]
# Where the text of a completion stands in a dict.
TEXT_KEYS = ("text", "response", "completion", "content")
ALL = "all"
EXPECTED = "chosen and rejected (with or without prompt), prompt and completions, prompt and completion, or messages"


@dataclass(frozen=True)
class Group:
    """Completions of one prompt.

    Args:
        prompt: text or conversation.
        texts: the completions, as a judge reads them.
        num_better: the first n are better than each of the others; 0: nothing is known.
        probability: how likely they are better, from 0.5 (people call them equal) to 1.
        stopped: False for a completion that was cut off at a length limit.
        subset: the part of the dataset that it belongs to.
        reference: an answer that is known to be good; None without one.
    """

    prompt: Prompt
    texts: tuple[str, ...]
    num_better: int = 0
    probability: float = 1.0
    stopped: tuple[bool, ...] = ()
    subset: str = ALL
    reference: str | None = None

    def is_whole(self, index: int) -> bool:
        """Return whether a completion ended by itself."""
        return self.stopped[index] if self.stopped else True

    def pairs(self) -> list[tuple[int, int]]:
        """Return the labelled pairs as indices of `texts`: each better completion with each of the others."""
        others = range(self.num_better, len(self.texts))
        return [(better, other) for better in range(self.num_better) for other in others]


def shape_of(columns: Iterable[str], row: Row) -> str:
    """Return the name of the shape of rows with these columns, the first of which is `row`."""
    names = set(columns)
    if set(SIDES) <= names:
        is_list = all(isinstance(row[name], list) and row[name] for name in SIDES)
        return "lists" if is_list and any(isinstance(row[name][0], str) for name in SIDES) else "pairs"
    if {"prompt", "completions"} <= names:
        return "groups"
    if {"prompt", "completion"} <= names or "messages" in names:
        return "logs"
    raise ValueError(
        f"the dataset has the columns {', '.join(sorted(names))}; expected {EXPECTED}: say which yours are:"
        " dataset_columns {chosen: yours} in a recipe"
    )


def _group_of(row: Row, shape: str, subset: str) -> Group:
    """Return a row as a group; ValueError says in a phrase what is wrong with it."""
    group = READERS[shape](row)
    subset = row.get("subset") or subset
    if shape in ("pairs", "lists"):
        group = _oriented(row, group)
    require(prompt_fault(group.prompt, isinstance(group.prompt, list)), "prompt")
    reference = row.get("reference")
    if reference is not None:
        require(text_fault(reference), "reference")
    return replace(group, subset=str(subset), reference=reference)


def read_groups(rows: Iterable[Row], columns: Iterable[str], subset: str = ALL) -> Iterator[Group]:
    """Yield the groups of rows; logs are joined by their prompt, in the order of its first row."""
    shape, logs = None, {}
    for index, row in enumerate(rows):
        shape = shape or shape_of(columns, row)
        try:
            group = _group_of(row, shape, subset)
        except ValueError as fault:
            raise bad_row(index, str(fault)) from fault
        if shape == "logs":
            logs.setdefault(json.dumps(group.prompt, sort_keys=True), []).append(group)
        else:
            yield group
    yield from (_joined(parts) for parts in logs.values())


def labelled_groups(rows: Iterable[Row], columns: Sequence[str], subset: str = ALL) -> list[Group]:
    """Return the groups of rows that say which completion is better."""
    groups = list(read_groups(rows, columns, subset))
    if groups and not groups[0].num_better:
        raise ValueError(
            f"the dataset has the columns {', '.join(sorted(columns))}, which say of no completion that it is better;"
            " expected chosen and rejected"
        )
    return groups


def _joined(parts: Sequence[Group]) -> Group:
    return replace(
        parts[0], texts=tuple(part.texts[0] for part in parts), stopped=tuple(part.is_whole(0) for part in parts)
    )


def _oriented(row: Row, group: Group) -> Group:
    """Return a labelled group with its better side first, and its probability from 0.5 to 1."""
    if not 0 < group.num_better < len(group.texts):
        raise ValueError("names no better completion, or no other one")
    if len({text.strip() for text in group.texts}) < len(group.texts) and len(group.texts) == 2:
        raise ValueError("chosen and rejected are identical: there is nothing to prefer")
    probability = row.get("probability")
    probability = 1.0 if probability is None else probability
    require(probability_fault(probability), "probability")
    if probability >= 0.5:
        return replace(group, probability=float(probability))
    if len(group.texts) != 2:
        raise ValueError(f"probability is {probability} of several completions; put the better ones into chosen")
    flipped = replace(group, texts=group.texts[::-1], stopped=group.stopped[::-1])
    return replace(flipped, probability=1 - float(probability))


def _pair(row: Row) -> Group:
    prompt, sides = pair_of(row)
    stopped = tuple(_stopped(row, name) for name in SIDES)
    return Group(prompt, tuple(as_text(side) for side in sides), 1, stopped=stopped)


def _lists(row: Row) -> Group:
    chosen, rejected = (tuple(text_of(text, name) for text in row[name]) for name in SIDES)
    return Group(prompt_of(row.get("prompt")), chosen + rejected, len(chosen))


def _group(row: Row) -> Group:
    completions = row["completions"]
    require(type_fault(completions, (list,), "a list"), "completions")
    texts = []
    for index, entry in enumerate(completions):
        text = entry
        if isinstance(entry, Mapping):
            text = next((entry[key] for key in TEXT_KEYS if entry.get(key)), None)
        elif isinstance(entry, list):
            text = as_text(messages_of(entry, f"completion {index}"))
        texts.append(text_of(text, f"completion {index}"))
    return Group(prompt_of(row["prompt"]), tuple(texts))


def _log(row: Row) -> Group:
    stopped = (_stopped(row, "completion"),)
    if row.get("completion") is not None:
        completion = row["completion"]
        read = messages_of if isinstance(completion, list) else text_of
        completion = read(completion, "completion")
        return Group(prompt_of(row["prompt"]), (as_text(completion),), stopped=stopped)
    messages = messages_of(row.get("messages"), "messages")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("messages does not end with an answer of the assistant")
    return Group(messages[:-1], (as_text(messages[-1:]),), stopped=stopped)


READERS: dict[str, Callable[[Row], Group]] = {"pairs": _pair, "lists": _lists, "groups": _group, "logs": _log}


def _stopped(row: Row, name: str) -> bool:
    """Return whether a completion ended by itself; also where only other rows have the column, which is None here."""
    return row.get(f"{name}_stopped") is not False
