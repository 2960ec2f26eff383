"""A reward model behind HTTP: vLLM's `/classify` or `/score`, or any JSON service.

In a recipe it is named by its URL. The arguments of `RemoteReward` follow '#' and are not sent to the server:

    reward_funcs:
      - http://127.0.0.1:8000/classify#model=my-reward-model&tokenizer=runs/reward
      - https://scores.example.com/rate#api_key_env=SCORES_KEY&batch_size=32&name=safety

A path that ends in /classify or /score is vLLM's. Any other is a JSON service: it is sent {"prompts": [...],
"completions": [...], "completion_stopped": [...]} (texts or messages, as in the dataset; false for a completion that
was cut off at max_completion_length) and answers {"scores": [number or null, ...]}.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import parse_qsl

import httpx2

from onetrunk.judges.chat import is_same_model
from onetrunk.models.loading import load_config, read_tokenizer
from onetrunk.models.reward_model import encode_rows, length_limit, reads_end_token
from onetrunk.rewards.reward import Completion
from onetrunk.types import Prompt
from onetrunk.utils.calls import CallError, CallRun, Pace, RetryPolicy, ask_patiently, run_async
from onetrunk.utils.http import check_host, check_url, guarded_client, post_json, read_secret, shown

logger = logging.getLogger(__name__)

Kind = Literal["classify", "score", "json"]
# The answer that each kind of server should give.
FORMS = {
    "classify": '{"data": [{"probs": [number]}, ...]}',
    "score": '{"data": [{"score": number}, ...]}',
    "json": '{"scores": [number or null, ...]}',
}
# The options after '#', and how each is parsed.
OPTIONS = {
    "kind": str,
    "model": str,
    "tokenizer": str,
    "api_key_env": str,
    "batch_size": int,
    "max_concurrency": int,
    "timeout_s": float,
    "allow_http": {"true": True, "false": False}.__getitem__,
    "name": str,
}
# Prompts, completions, and whether each completion stopped by itself: n entries each.
Rows = tuple[Sequence[Prompt], Sequence[Completion], Sequence[bool]]
TRIAL_ROWS: Rows = (["Say hello."] * 2, ("Hello!", "No, and go away."), [True] * 2)
WHAT = "the address of a reward server"


def remote_reward(spec: str) -> RemoteReward:
    """Return the checked reward server that "http://host/path#option=value&option=value" names.

    Raises:
        ValueError: an unknown option, or a setting that RemoteReward rejects.
        RuntimeError: `RemoteReward.check` failed.
    """
    url, _, fragment = spec.partition("#")
    options: dict[str, Any] = {}
    for key, value in parse_qsl(fragment, keep_blank_values=True):
        if key not in OPTIONS:
            near = difflib.get_close_matches(key, OPTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPTIONS)}"
            raise ValueError(f"{WHAT} {shown(url)} has an unknown option {key!r} after '#'; {hint}")
        try:
            options[key] = OPTIONS[key](value)
        except (ValueError, KeyError):
            raise ValueError(f"{WHAT} {shown(url)}: {value!r} is no value for {key}") from None
    reward = RemoteReward(url, **options)
    reward.check()
    return reward


class RemoteReward:
    """Scores of a reward model behind HTTP, in concurrent batches; calls are retried after temporary errors.

    A row that still has no score is None: it is left out of the update and counted as unscored. The run stops if the
    server stays unreachable or rejects every row. A run that samples ahead asks for rows as they arrive.

    Args:
        url: of the endpoint.
        kind: "classify", "score" or "json"; None: from the end of the path.
        model: its name on the server; None if the server has only one.
        tokenizer: for classify: folder or Hub name of the reward model. Rows are then tokenized here exactly as
            `ModelReward` does (chat template, end token, length limit). None: texts are sent, and conversations as
            messages for the server's own chat template (one row per call; vLLM 0.13 or later).
        api_key_env: environment variable that holds the key; None sends no credentials.
        batch_size: rows per call.
        max_concurrency: largest number of calls at the same time.
        timeout_s: deadline of one call.
        allow_http: plain http also to hosts outside this machine and private networks.
        name: for metrics; None: the model's name, else the end of the path.
        policy: waits, numbers of calls and deadlines; None: retries for up to 5 minutes.

    Raises:
        ValueError: a setting that cannot work.
    """

    def __init__(
        self,
        url: str,
        kind: str | None = None,
        *,
        model: str | None = None,
        tokenizer: str | None = None,
        api_key_env: str | None = None,
        batch_size: int = 16,
        max_concurrency: int = 8,
        timeout_s: float = 60.0,
        allow_http: bool = False,
        name: str | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.url = check_url(url, WHAT, allow_http)
        self.kind = kind or kind_of(self.url)
        if self.kind not in FORMS:
            raise ValueError(f"{self}: kind is {kind!r}; expected {', '.join(FORMS)}")
        if batch_size < 1:
            raise ValueError(f"{self}: batch_size is {batch_size}; a call takes at least 1 row")
        if tokenizer is not None and self.kind != "classify":
            raise ValueError(f"{self}: tokenizer is for /classify alone, which takes token ids; leave it out")
        read_secret(api_key_env)
        self.model, self.api_key_env, self.allow_http = model, api_key_env, allow_http
        self.batch_size = batch_size
        # The trainer limits the number of unscored rows; here the run ends only if no call is answered at all.
        self.policy = policy or RetryPolicy(call_timeout_s=timeout_s, patience_s=300.0)
        self.pace = Pace(max_concurrency)
        self.__name__ = re.sub(r"[^A-Za-z0-9._-]+", "-", name or (model or self.url).rstrip("/").rpartition("/")[2])
        self._encode = None if tokenizer is None else _encoder(tokenizer, self.__name__)

    def __str__(self) -> str:
        return f"reward server {shown(self.url)}"

    def check(self) -> None:
        """Score two completions, so that a wrong URL, key or model is detected before training starts.

        Raises:
            ValueError: an address that may not be called.
            RuntimeError: no server answers there, or it is not a reward model.
        """
        check_host(self.url, WHAT, self.allow_http)

        async def trial() -> list[float | None]:
            async with self._client() as client:
                return await ask_patiently(lambda: self._call(client, TRIAL_ROWS), self.policy)

        try:
            scores = run_async(trial())
        except CallError as error:
            raise RuntimeError(f"{self} cannot be used: {error}") from None
        if self.kind == "classify" and scores == [1.0, 1.0]:
            raise RuntimeError(
                f"{self} gives two different completions the probability 1: a softmax over its one label; serve it"
                " with a vLLM that knows use_activation, or with a pooler without softmax"
            )

    async def __call__(
        self, prompts: list[Prompt], completions: list[Completion], **columns: Any
    ) -> list[float | None]:
        """Return n scores, None where there is none. Of the columns only `completion_stopped` counts.

        Raises:
            ServerUnavailable: no call was answered within the patience of `policy`.
            RuntimeError: the server rejects every row.
        """
        scores: list[float | None] = [None] * len(prompts)
        if not prompts:
            return scores
        rows = (prompts, completions, columns.get("completion_stopped") or [True] * len(prompts))
        # A conversation that is sent as messages needs a call of its own.
        as_messages = self.kind == "classify" and not isinstance(prompts[0], str) and self._encode is None
        size = 1 if as_messages else self.batch_size
        batches = [range(i, min(i + size, len(prompts))) for i in range(0, len(prompts), size)]
        async with self._client() as client:
            failed = await self._score(client, batches, rows, scores)
            # One row that is too long must not cost the others of its batch their scores.
            alone = [range(i, i + 1) for batch, e in failed if e.kind == "refused" and len(batch) > 1 for i in batch]
            failed = [(batch, e) for batch, e in failed if e.kind != "refused" or len(batch) == 1]
            if alone:
                failed += await self._score(client, alone, rows, scores)
        num_failed = sum(len(batch) for batch, _ in failed)
        if num_failed == len(prompts) > 1 and all(error.kind == "refused" for _, error in failed):
            raise RuntimeError(f"{self} refuses every row: {failed[-1][1]}")
        if failed:
            logger.warning("%s: %d of %d rows have no score (%s)", self, num_failed, len(prompts), failed[-1][1])
        return scores

    def _client(self) -> httpx2.AsyncClient:
        return guarded_client(self.url, read_secret(self.api_key_env), self.pace.max_concurrency)

    async def _score(
        self, client: httpx2.AsyncClient, batches: Sequence[range], rows: Rows, scores: list[float | None]
    ) -> list[tuple[range, CallError]]:
        """Fill in the scores of some batches; return the batches that have none, with their errors."""
        failed: list[tuple[range, CallError]] = []

        async def call(index: int) -> list[float | None]:
            return await self._call(client, tuple([column[i] for i in batches[index]] for column in rows))

        def done(index: int, outcome: list[float | None] | CallError) -> None:
            if isinstance(outcome, CallError):
                failed.append((batches[index], outcome))
                return
            for row, score in zip(batches[index], outcome, strict=True):
                scores[row] = score

        run = CallRun(str(self), self.policy, self.pace, call, done, control=lambda: self._call(client, TRIAL_ROWS))
        await run.answer_all(len(batches))
        return failed

    async def _call(self, client: httpx2.AsyncClient, rows: Rows) -> list[float | None]:
        prompts, completions, stopped = rows
        token_ids = None if self._encode is None else self._encode(prompts, completions, stopped=stopped)[0]
        body = _request_body(self.kind, rows, self.model, token_ids)
        answer = await post_json(client, self.url, body, read_secret(self.api_key_env))
        reported = answer.get("model") if isinstance(answer, dict) else None
        if self.model is not None and isinstance(reported, str) and not is_same_model(self.model, reported):
            raise CallError(f"scores of model {reported!r}, where {self.model!r} was asked")
        return _scores(self.kind, answer, len(prompts))


def _encoder(source: str, name: str) -> Callable[..., tuple[list[list[int]], int]]:
    """Return a function that tokenizes rows as the reward model at `source` was trained to read them."""
    # Of a model, `length_limit` and `reads_end_token` read only its config.
    tokenizer, model = read_tokenizer(source), SimpleNamespace(config=load_config(source))
    limit, end_token = length_limit(model, tokenizer), reads_end_token(model)
    return partial(encode_rows, tokenizer, max_length=limit, end_token=end_token, name=name)


def kind_of(url: str) -> Kind:
    """Return the kind of server that the end of a path names: /classify, /score, else a JSON service."""
    last = url.rstrip("/").rpartition("/")[2]
    return last if last in FORMS else "json"


def _request_body(kind: Kind, rows: Rows, model: str | None, token_ids: list[list[int]] | None) -> dict[str, Any]:
    """Return the JSON that is sent for some rows.

    classify: {"input": texts or token ids}, or, for one conversation without token ids, {"messages": ...} with
    "continue_final_message" if the completion was cut off, so that no end token follows it. score: {"text_1": prompts,
    "text_2": completions}. json: the columns as in the dataset. All with {"model": name} if there is one.
    """
    prompts, completions, stopped = map(list, rows)
    named = {} if model is None else {"model": model}
    if kind == "json":
        return {**named, "prompts": prompts, "completions": completions, "completion_stopped": stopped}
    # Raw scores: a sigmoid flattens large differences, and a softmax over one label is always 1.
    raw = {**named, "use_activation": False}
    if kind == "score":
        return {**raw, "text_1": list(map(_text, prompts)), "text_2": list(map(_text, completions))}
    if token_ids is not None:
        return {**raw, "input": token_ids}
    if isinstance(prompts[0], str):
        return {**raw, "input": [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]}
    cut = {} if stopped[0] else {"continue_final_message": True}
    return {**raw, "messages": [*prompts[0], *completions[0]], **cut}


def _text(value: Prompt | Completion) -> str:
    return value if isinstance(value, str) else "\n\n".join(message["content"] for message in value)


def _scores(kind: Kind, answer: Any, num_rows: int) -> list[float | None]:
    """Return the n scores in an answer, None where a JSON service gives null; another form raises a CallError."""
    if kind == "json":
        entries = answer.get("scores") if isinstance(answer, Mapping) else answer
    else:
        entries = _in_order(answer.get("data") if isinstance(answer, Mapping) else None)
    if not isinstance(entries, list):
        raise CallError(f"an answer of another form than {FORMS[kind]}")
    if len(entries) != num_rows:
        raise CallError(f"{len(entries)} scores for {num_rows} completions")
    if kind == "score":
        entries = [entry.get("score") for entry in entries]
    elif kind == "classify":
        entries = [_probability(entry.get("probs")) for entry in entries]
    for entry in entries:
        if type(entry) not in (int, float, type(None)):
            raise CallError(f"a score that is no number ({str(entry)[:40]}); expected {FORMS[kind]}")
    return [None if entry is None else float(entry) for entry in entries]


def _probability(probs: Any) -> Any:
    if not isinstance(probs, list) or not probs:
        raise CallError(f"an answer of another form than {FORMS['classify']}")
    if len(probs) > 1:
        raise CallError(
            f"probabilities of {len(probs)} labels, which is a classifier and no reward model: a reward model has one",
            "stop",
        )
    return probs[0]


def _in_order(entries: Any) -> list[Mapping[str, Any]] | None:
    """Sort the rows of an answer by their `index`, if they have one: a server may answer in any order."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        return None
    places = [entry.get("index") for entry in entries]
    if places == [None] * len(entries):
        return entries
    in_order = {place: entry for place, entry in zip(places, entries, strict=True) if isinstance(place, int)}
    return [in_order[i] for i in range(len(entries))] if set(in_order) == set(range(len(entries))) else None
