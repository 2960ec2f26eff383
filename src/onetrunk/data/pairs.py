"""Preference rows in their usual shapes become `prompt`, `chosen` and `rejected`, all texts or all conversations.

    prompt  chosen, rejected
    text    texts, or conversations that repeat the prompt (UltraFeedback binarized), or begin after it
    none    conversations, or transcripts (HH): the prompt is what both share, up to where the answer begins
    list    conversations that repeat the prompt, or begin after it; or texts

A prompt that is cut from two texts ends where the last answer begins that both share ("\\n\\nAssistant:"). Texts
without such a mark are cut between words, and where the prompt of another row begins this one, after that.

`read_groups` takes completions that exist already:

    pairs   as above; the first is better
    lists   the same with lists of texts (RewardBench 2): each of the first is better than each of the second
    groups  `prompt`, `completions`: texts, or dicts with `text`, `response`, `completion` or `content`
    logs    `prompt` and `completion`, or `messages`: rows of one prompt belong together

Optional columns: `subset`, `reference` (an answer that is known to be good), `probability` (that `chosen` is better)
and the flags `*_stopped` of `rows.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, Features, Value

from onetrunk.data.rows import (
    SIDES,
    Rows,
    bad_row,
    conversation_fault,
    probability_fault,
    prompt_fault,
    require_rows,
    text_fault,
    type_fault,
)
from onetrunk.data.sharded import ShardedRows
from onetrunk.types import Completion, Message, Prompt, as_completion, as_text

# What stands before an answer in a transcript, at the beginning of a line, or in the usual chat templates.
ANSWER = re.compile(
    r"(?:^|\n)[#* ]*(?:assistant|ai|bot|response|answer|summary|tl;dr)[* ]*:"
    r"|<\|im_start\|>assistant\n|<\|assistant\|>\n?|<start_of_turn>model\n|\[/INST\]"
    r"|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",
    re.IGNORECASE,
)
# From here on scripts are written without spaces between words.
FIRST_CJK = "\u2e80"
Pair = tuple[Prompt, list[Completion]]


def read_pairs(rows: Rows) -> Rows:
    """Return rows of pairs with the columns of `pair_of`; rows that have them already are returned as they are."""
    if not set(SIDES) <= set(rows.column_names):
        return rows
    require_rows(rows)
    if is_read(rows[0]):
        return rows
    if isinstance(rows, ShardedRows):
        return rows.then(_read, added=["prompt"] if "prompt" not in rows.column_names else ())
    cuts = None
    if "prompt" not in rows.column_names and isinstance(rows[0]["chosen"], str):
        cuts = _cuts(rows)

    def read(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        try:
            return _read(row, None if cuts is None else cuts[index])
        except ValueError as error:
            raise bad_row(index, str(error)) from error

    names = [name for name in ("prompt", *SIDES) if isinstance(rows[0].get(name), list)]
    form = rows.features[names[-1]] if names else Value("string")
    features = Features({**rows.features, **dict.fromkeys(("prompt", *SIDES), form)})
    return rows.map(read, with_indices=True, features=features, load_from_cache_file=False, desc="prompts")


def is_read(row: Mapping[str, Any]) -> bool:
    """Return whether `read_pairs` leaves a row as it is; also where something is wrong with it."""
    try:
        prompt, sides = pair_of(row)
    except ValueError:
        return "prompt" in row
    return isinstance(prompt, str) is isinstance(row.get("prompt"), str) and all(
        len(side) == len(row[name]) for name, side in zip(SIDES, sides, strict=True)
    )


def how_read(rows: Dataset | ShardedRows) -> str | None:
    """Return a line that says how pairs are read, with the first row's as an example; None for pairs as they are."""
    if not set(SIDES) <= set(rows.column_names) or not len(rows) or is_read(rows[0]):
        return None
    try:
        prompt, sides = pair_of(rows[0])
    except ValueError:  # `read_pairs` names the row.
        return None
    if isinstance(prompt, list):
        number = f"{len(prompt)} message{'' if len(prompt) == 1 else 's'}"
        return f"prompts are read as conversations (the first has {number}), chosen and rejected begin after them"
    return (
        "rows without a column prompt: the prompt is what chosen and rejected share, up to the last answer or word;"
        f" the first ends in {prompt[-40:]!r}, then chosen begins with {sides[0][:40]!r}"
    )


def _read(row: Mapping[str, Any], cut: int | None = None) -> dict[str, Any]:
    prompt, sides = pair_of(row, cut)
    return {**row, "prompt": prompt, **dict(zip(SIDES, sides, strict=True))}


def pair_of(row: Mapping[str, Any], cut: int | None = None) -> Pair:
    """Return the prompt of a row and its two completions; ValueError says in a phrase what is wrong with it.

    Args:
        cut: number of characters of the prompt, where it is cut from texts; None: by these two texts alone.
    """
    prompt, sides = row.get("prompt"), [row[name] for name in SIDES]
    if any(isinstance(side, list) for side in sides):
        first, second = (messages_of(side, name) for side, name in zip(sides, SIDES, strict=True))
        prompt = None if prompt is None else prompt_of(prompt)
        return _without_prompt(prompt, first, second)
    chosen, rejected = (text_of(side, name) for side, name in zip(sides, SIDES, strict=True))
    if "prompt" in row:
        prompt = prompt_of(prompt)
        return prompt, [as_completion(prompt, text) for text in (chosen, rejected)]
    cut = _cut(chosen, rejected)[0] if cut is None else cut
    if not chosen[:cut].strip():
        raise ValueError("has no prompt, and chosen and rejected share no words at their beginning")
    return chosen[:cut], [chosen[cut:], rejected[cut:]]


def _without_prompt(prompt: Prompt | None, first: list[Message], second: list[Message]) -> Pair:
    """Return the prompt of two conversations, and what follows it in each."""
    if isinstance(prompt, list):
        repeats = all(len(side) > len(prompt) and side[: len(prompt)] == prompt for side in (first, second))
        shared = len(prompt) if repeats else 0
        return prompt, [first[shared:], second[shared:]]
    shared = 0
    while shared < min(len(first), len(second)) - 1 and first[shared] == second[shared]:
        shared += 1
    while shared and first[shared - 1]["role"] == "assistant":  # An answer that both begin with is not a prompt.
        shared -= 1
    if shared and first[0]["role"] != "assistant":
        # The sides begin with the prompt, which a text in the column prompt only repeats.
        return first[:shared], [first[shared:], second[shared:]]
    if prompt is None:
        raise ValueError("has no prompt, and chosen and rejected share no message at their beginning")
    return [{"role": "user", "content": prompt}], [first, second]


def _cuts(rows: Dataset) -> list[int]:
    """Return the length of each prompt that two texts share; one that begins others ends them all."""
    cuts: list[int] = []
    guessed: list[tuple[str, int]] = []
    for index, (chosen, rejected) in enumerate(zip(rows["chosen"], rows["rejected"], strict=True)):
        is_pair = isinstance(chosen, str) and isinstance(rejected, str)
        cut, is_answer = _cut(chosen, rejected) if is_pair else (0, True)
        cuts.append(cut)
        if cut and not is_answer:
            guessed.append((chosen[:cut], index))
    shortest = None
    for prompt, index in sorted(guessed):
        if shortest and prompt.startswith(shortest) and (prompt == shortest or _is_border(prompt, len(shortest))):
            cuts[index] = len(shortest)
        else:
            shortest = prompt
    return cuts


def _cut(chosen: str, rejected: str) -> tuple[int, bool]:
    """Return where the prompt of two texts ends, and whether an answer is marked there; else it is between words."""
    shared = len(os.path.commonprefix([chosen, rejected]))
    marks = [match.end() for match in ANSWER.finditer(chosen, 0, shared)]
    if marks:
        return marks[-1], True
    borders = (at for at in range(shared, 0, -1) if _is_border(chosen, at) and _is_border(rejected, at))
    return next(borders, 0), False


def _is_border(text: str, at: int) -> bool:
    """Return whether a word may begin here: before a space, after a line end, or in a script without spaces."""
    if at >= len(text):
        return False
    before, after = text[at - 1], text[at]
    return after.isspace() or before == "\n" or max(before, after) >= FIRST_CJK


def prompt_of(prompt: Any) -> Prompt:
    """Return a checked prompt, a text or a conversation."""
    return messages_of(prompt, "prompt") if isinstance(prompt, list) else text_of(prompt, "prompt")


def messages_of(messages: Any, name: str) -> list[Message]:
    """Return checked messages without the keys that only other messages of the file have."""
    require(conversation_fault(messages), name)
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]


def text_of(text: Any, name: str) -> str:
    """Return a checked text."""
    require(text_fault(text), name)
    return text


def require(fault: str | None, name: str) -> None:
    """Raise ValueError with a fault of the column `name`, if there is one."""
    if fault:
        raise ValueError(f"{name} {fault}")


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
        f"the dataset has the columns {', '.join(sorted(names))}; expected {EXPECTED}; map yours:"
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
            f"the dataset has the columns {', '.join(sorted(columns))}, none of which says which completion is better;"
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
        raise ValueError("names no better completion, or no worse one")
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
    for side, name in zip(sides, SIDES, strict=True):
        _require_one_answer(side, name)
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
            text = as_text(_require_one_answer(messages_of(entry, f"completion {index}"), f"completion {index}"))
        texts.append(text_of(text, f"completion {index}"))
    return Group(prompt_of(row["prompt"]), tuple(texts))


def _log(row: Row) -> Group:
    stopped = (_stopped(row, "completion"),)
    if row.get("completion") is not None:
        completion = row["completion"]
        read = messages_of if isinstance(completion, list) else text_of
        completion = read(completion, "completion")
        _require_one_answer(completion, "completion")
        return Group(prompt_of(row["prompt"]), (as_text(completion),), stopped=stopped)
    messages = messages_of(row.get("messages"), "messages")
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError("messages does not end with an answer of the assistant")
    return Group(messages[:-1], (as_text(messages[-1:]),), stopped=stopped)


def _require_one_answer(side: Completion, name: str) -> Completion:
    """Return a completion, unless it is a conversation of its own, whose roles the text for a judge would not show."""
    if isinstance(side, list) and len(side) > 1:
        raise ValueError(
            f"{name} has {len(side)} messages after the prompt; a judge compares single answers of the assistant: put"
            " the earlier messages into the prompt, or leave the row out"
        )
    return side


READERS: dict[str, Callable[[Row], Group]] = {"pairs": _pair, "lists": _lists, "groups": _group, "logs": _log}


def _stopped(row: Row, name: str) -> bool:
    """Return whether a completion ended by itself; also where only other rows have the column, which is None here."""
    return row.get(f"{name}_stopped") is not False
