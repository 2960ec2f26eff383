"""What goes to a reward server and what comes back, for each kind of server: rows in, one number per row out.

Knows bodies alone: no HTTP, no retries. Sources of the forms: vLLM's classification and score API, whose fields are
those of `vllm/entrypoints/pooling` (2026), and a form of our own for any other service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from onetrunk.judges.retries import CallError
from onetrunk.rewards.base import Completion
from onetrunk.types import Prompt

Kind = Literal["classify", "score", "json"]
FORMS = {
    "classify": '{"data": [{"probs": [number]}, ...]}',
    "score": '{"data": [{"score": number}, ...]}',
    "json": '{"scores": [number or null, ...]}',
}
KINDS = tuple(FORMS)


def kind_of(url: str) -> Kind:
    """Return the kind of server that the end of a path means: /classify, /score, and any other a JSON service."""
    last = url.rstrip("/").rpartition("/")[2]
    return last if last in KINDS else "json"


def body_of(
    kind: Kind,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    stopped: Sequence[bool],
    model: str | None,
    token_ids: Sequence[list[int]] | None = None,
) -> dict[str, Any]:
    """Return what is sent for some rows.

    classify: {"input": texts or token ids, "use_activation": false}; a conversation that was not made into token ids
    is {"messages": ...}, one row at a time, rendered by the server's chat template. score: {"text_1": prompts,
    "text_2": completions, "use_activation": false}. json: {"prompts": ..., "completions": ..., "completion_stopped":
    ...}, texts or lists of messages as the dataset has them. All with {"model": name} where one is named. A completion
    that was cut off is sent with "continue_final_message" among messages, so that no end token follows it.

    Args:
        kind: of the server.
        prompts: n texts or conversations.
        completions: n texts, or lists of one message.
        stopped: n booleans, False for a completion that was cut off.
        model: its name on the server; None leaves it out.
        token_ids: n lists, for classify.
    """
    named = {} if model is None else {"model": model}
    if kind == "json":
        columns = {"prompts": prompts, "completions": completions, "completion_stopped": stopped}
        return {**named, **{name: list(values) for name, values in columns.items()}}
    # Raw scores: a sigmoid flattens what differs most, and a softmax over one label is 1 whatever the text.
    raw = {**named, "use_activation": False}
    if kind == "score":
        return {**raw, "text_1": [_text(p) for p in prompts], "text_2": [_text(c) for c in completions]}
    if token_ids is not None:
        return {**raw, "input": list(token_ids)}
    if isinstance(prompts[0], str):
        return {**raw, "input": [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]}
    cut = {} if stopped[0] else {"continue_final_message": True}
    return {**raw, "messages": [*prompts[0], *completions[0]], **cut}


def rows_per_call(kind: Kind, conversational: bool, has_token_ids: bool, batch_size: int) -> int:
    """Return how many rows one call takes: a conversation as messages goes alone."""
    return 1 if kind == "classify" and conversational and not has_token_ids else batch_size


def scores_of(kind: Kind, answer: Any, num_rows: int) -> list[float | None]:
    """Return the n scores in an answer; None where a JSON service says null.

    Raises:
        CallError: the answer has another form, or another number of rows.
    """
    expected = FORMS[kind]
    if kind == "json":
        entries = answer.get("scores") if isinstance(answer, Mapping) else answer
    else:
        entries = _in_order(answer.get("data") if isinstance(answer, Mapping) else None)
    if not isinstance(entries, list):
        raise CallError(f"an answer of another form than {expected}")
    if len(entries) != num_rows:
        raise CallError(f"{len(entries)} scores for {num_rows} completions")
    if kind != "json":
        entries = [_score(kind, entry, expected) for entry in entries]
    for entry in entries:
        if entry is not None and (isinstance(entry, bool) or not isinstance(entry, (int, float))):
            raise CallError(f"a score that is no number ({str(entry)[:40]}); expected {expected}")
    return [None if entry is None else float(entry) for entry in entries]


def _score(kind: Kind, entry: Mapping[str, Any], expected: str) -> Any:
    if kind == "score":
        return entry.get("score")
    probs = entry.get("probs")
    if not isinstance(probs, list) or not probs:
        raise CallError(f"an answer of another form than {expected}")
    if len(probs) > 1:
        raise CallError(
            f"probabilities of {len(probs)} labels, which is a classifier and no reward model: a reward model has one",
            "stop",
        )
    return probs[0]


def _in_order(entries: Any) -> Any:
    """Return the rows by their `index`, where they have one: a server may answer in any order."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return None
    places = [entry.get("index") for entry in entries]
    if places == [None] * len(entries):
        return entries
    in_order = {place: entry for place, entry in zip(places, entries, strict=True) if isinstance(place, int)}
    return [in_order[i] for i in range(len(entries))] if set(in_order) == set(range(len(entries))) else None


def _text(value: Prompt | Completion) -> str:
    return value if isinstance(value, str) else "\n\n".join(message["content"] for message in value)
