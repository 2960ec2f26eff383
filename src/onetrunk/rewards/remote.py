"""A reward model behind HTTP: vLLM's `/classify` or `/score`, or any JSON service.

In a recipe it is named by its address, options behind '#', which no server ever sees:

    reward_funcs:
      - http://127.0.0.1:8000/classify#model=my-reward-model&tokenizer=runs/reward
      - https://scores.example.com/rate#api_key_env=SCORES_KEY&batch_size=32&name=safety

A path that ends in /classify or /score is vLLM's; any other is a JSON service, which is sent {"prompts": [...],
"completions": [...], "completion_stopped": [...]} (texts or messages, as the dataset has them; false for a completion
that was cut off at max_completion_length) and answers {"scores": [number or null, ...]}.
Options are the arguments of `RemoteReward`. Knows no policy and no trainer.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import parse_qsl

import httpx2

from onetrunk.judges.calls import CallError, CallRun, Pace, RetryPolicy, ask_patiently, run_async
from onetrunk.judges.chat import is_same_model
from onetrunk.judges.http import (
    check_host,
    check_url,
    failure_of,
    failure_of_response,
    guarded_client,
    is_html,
    read_secret,
    shown,
)
from onetrunk.models.loading import read_tokenizer
from onetrunk.models.scorer import READS_END
from onetrunk.models.sources import load_config
from onetrunk.rewards.base import Completion
from onetrunk.rewards.model import encode_rows
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


logger = logging.getLogger(__name__)

WHAT = "the address of a reward server"
NO_LIMIT = 10**9
TRIAL_PROMPT, TRIAL_COMPLETIONS = "Say hello.", ("Hello!", "No, and go away.")


class RemoteReward:
    """Scores of a reward model behind HTTP, in batches, several at once, asked again after errors that pass.

    A row that finally has no score is None, and so left out of the update and counted as unscored. A server that
    stays away, or refuses every row, stops the run with one sentence.

    Args:
        url: of the endpoint.
        kind: "classify", "score" or "json"; None goes by the end of the path.
        model: its name on the server; None where the server has one model.
        tokenizer: classify: folder or Hub name of the reward model. Rows are then tokenized here exactly as
            `ModelReward` does it, chat template, end token and longest row included. None: texts are sent, and
            conversations as messages for the server's own chat template (one row a call; vLLM 0.13 or later).
        api_key_env: environment variable that holds the key; None sends no credentials.
        batch_size: rows of one call.
        max_concurrency: calls at once, at most.
        timeout_s: deadline of one call.
        allow_http: plain http also to hosts outside this machine and private networks.
        name: for metrics; None takes the model's, else the end of the path.
        policy: waits, numbers of calls and deadlines; None for up to 5 minutes of patience.

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
        if self.kind not in KINDS:
            raise ValueError(f"{self}: kind is {kind!r}; expected {', '.join(KINDS)}")
        if batch_size < 1:
            raise ValueError(f"{self}: batch_size is {batch_size}; a call takes at least 1 row")
        if tokenizer is not None and self.kind != "classify":
            raise ValueError(f"{self}: tokenizer is for /classify alone, which takes token ids; leave it out")
        read_secret(api_key_env)
        self.model, self.api_key_env, self.allow_http = model, api_key_env, allow_http
        self.batch_size = batch_size
        # Unscored rows are the trainer's to count; here a run ends where no call is answered at all.
        self.policy = policy or RetryPolicy(call_timeout_s=timeout_s, patience_s=300.0)
        self.pace = Pace(max_concurrency)
        self._encoder = None if tokenizer is None else _Encoder(tokenizer)
        self.__name__ = re.sub(r"[^A-Za-z0-9._-]+", "-", name or (model or self.url).rstrip("/").rpartition("/")[2])

    def __str__(self) -> str:
        return f"reward server {shown(self.url)}"

    def check(self) -> None:
        """Score two completions, so that what is wrong with address, key or model is found before training.

        Raises:
            ValueError: an address that may not be called.
            RuntimeError: no server, or no reward model: one sentence.
        """
        check_host(self.url, WHAT, self.allow_http)
        rows = [TRIAL_PROMPT] * 2, TRIAL_COMPLETIONS, [True] * 2

        async def trial() -> list[float | None]:
            async with self._client() as client:
                return await ask_patiently(lambda: self._call(client, *rows), self.policy)

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
        self,
        prompts: list[Prompt],
        completions: list[Completion],
        completion_ids: list[list[int]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return n scores, None where there is none. Of the columns only `completion_stopped` is read.

        Raises:
            ServerUnavailable: no call was answered for as long as `policy` has patience.
            RuntimeError: the server refuses every row.
        """
        scores: list[float | None] = [None] * len(prompts)
        if not prompts:
            return scores
        stopped = columns.get("completion_stopped") or [True] * len(prompts)
        at_once = rows_per_call(self.kind, not isinstance(prompts[0], str), self._encoder is not None, self.batch_size)
        batches = [range(i, min(i + at_once, len(prompts))) for i in range(0, len(prompts), at_once)]
        async with self._client() as client:
            failed = await self._score(client, batches, (prompts, completions, stopped), scores)
            # One row that is too long must not take the others of its batch with it.
            alone = [range(i, i + 1) for batch, e in failed if e.kind == "refused" and len(batch) > 1 for i in batch]
            failed = [(batch, e) for batch, e in failed if e.kind != "refused" or len(batch) == 1]
            if alone:
                failed += await self._score(client, alone, (prompts, completions, stopped), scores)
        num_failed = sum(len(batch) for batch, _ in failed)
        if num_failed == len(prompts) > 1 and all(error.kind == "refused" for _, error in failed):
            raise RuntimeError(f"{self} refuses every row: {failed[-1][1]}")
        if failed:
            logger.warning("%s: %d of %d rows have no score (%s)", self, num_failed, len(prompts), failed[-1][1])
        return scores

    def _client(self) -> httpx2.AsyncClient:
        return guarded_client(self.url, read_secret(self.api_key_env), self.pace.max_concurrency)

    async def _score(
        self,
        client: httpx2.AsyncClient,
        batches: Sequence[range],
        columns: tuple[Sequence[Prompt], Sequence[Completion], Sequence[bool]],
        scores: list[float | None],
    ) -> list[tuple[range, CallError]]:
        """Fill in the scores of some batches; return those that have none, each with its error."""
        failed: list[tuple[range, CallError]] = []

        async def call(index: int) -> list[float | None]:
            prompts, completions, stopped = ([column[i] for i in batches[index]] for column in columns)
            return await self._call(client, prompts, completions, stopped)

        def done(index: int, outcome: list[float | None] | CallError) -> None:
            if isinstance(outcome, CallError):
                failed.append((batches[index], outcome))
                return
            for row, score in zip(batches[index], outcome, strict=True):
                scores[row] = score

        def control() -> Awaitable[list[float | None]]:
            return self._call(client, [TRIAL_PROMPT] * 2, TRIAL_COMPLETIONS, [True] * 2)

        await CallRun(str(self), self.policy, self.pace, call, done, control=control).answer_all(len(batches))
        return failed

    async def _call(
        self,
        client: httpx2.AsyncClient,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        stopped: Sequence[bool],
    ) -> list[float | None]:
        token_ids = None if self._encoder is None else self._encoder(prompts, completions, stopped, self.__name__)
        body = body_of(self.kind, prompts, completions, stopped, self.model, token_ids)
        secret = read_secret(self.api_key_env)
        try:
            response = await client.post(self.url, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise failure_of(error, secret) from None
        if not response.is_success:
            raise failure_of_response(response, secret)
        try:
            answer = response.json()
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            html = is_html(response.headers.get("content-type", ""), response.text)
            raise CallError(
                "an HTML page where JSON was expected" if html else "a body that is not whole JSON"
            ) from None
        reported = answer.get("model") if isinstance(answer, dict) else None
        if self.model is not None and isinstance(reported, str) and not is_same_model(self.model, reported):
            raise CallError(f"scores of model {reported!r}, where {self.model!r} was asked")
        return scores_of(self.kind, answer, len(prompts))


class _Encoder:
    """Token ids of rows, as the reward model itself was trained to read them."""

    def __init__(self, source: str):
        self.tokenizer = read_tokenizer(source)
        config = load_config(source)
        self.end_token = bool(config.to_dict().get(READS_END, False))
        limits = [getattr(config.get_text_config(), "max_position_embeddings", None), self.tokenizer.model_max_length]
        self.max_length = min((limit for limit in limits if limit is not None and 0 < limit < NO_LIMIT), default=None)

    def __call__(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], stopped: Sequence[bool], name: str
    ) -> list[list[int]]:
        return encode_rows(self.tokenizer, prompts, completions, self.max_length, self.end_token, name, stopped)[0]


# What may stand behind '#', and how it is read.
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


def remote_reward(spec: str) -> RemoteReward:
    """Return the checked reward server that "http://host/path#option=value&option=value" means.

    Raises:
        ValueError: an option that there is not, or what RemoteReward refuses.
        RuntimeError: what `RemoteReward.check` finds.
    """
    url, _, fragment = spec.partition("#")
    options: dict[str, Any] = {}
    for key, value in parse_qsl(fragment, keep_blank_values=True):
        if key not in OPTIONS:
            near = difflib.get_close_matches(key, OPTIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(OPTIONS)}"
            raise ValueError(f"{WHAT} {shown(url)} has an unknown option {key!r} behind '#'; {hint}")
        try:
            options[key] = OPTIONS[key](value)
        except (ValueError, KeyError):
            raise ValueError(f"{WHAT} {shown(url)}: {value!r} is no value for {key}") from None
    reward = RemoteReward(url, **options)
    reward.check()
    return reward
