"""A reward model behind HTTP: vLLM's `/classify`, or any JSON service.

In a recipe it is named by its URL. The arguments of `RemoteReward` follow '#' and are not sent to the server:

    reward_funcs:
      - http://127.0.0.1:8000/classify#model=my-reward-model&tokenizer=runs/reward
      - https://scores.example.com/rate#api_key_env=SCORES_KEY&batch_size=32&name=safety

A path that ends in /classify is vLLM's. Any other is a JSON service: it is sent {"prompts": [...],
"completions": [...], "completion_stopped": [...]} (texts or messages, as in the dataset; false for a completion that
was cut off at max_completion_length) and answers {"scores": [number or null, ...]}.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from onetrunk.data.rows import variables_of, without_nulls
from onetrunk.models.loading import load_config, read_tokenizer
from onetrunk.models.reward_model import encode_rows, length_limit, reads_end_token
from onetrunk.rewards.reward import BuiltInReward, Completion, PerToken, PerTurn
from onetrunk.rewards.specs import Policy
from onetrunk.servers.client import Connection, Server, is_same_model
from onetrunk.servers.errors import CallError
from onetrunk.servers.fleet import Fleet, RetryPolicy, run_async
from onetrunk.types import Prompt

logger = logging.getLogger(__name__)

# The answer that each kind of server should give.
FORMS = {
    "classify": '{"data": [{"probs": [number]}, ...]}',
    "json": '{"scores": [number, null, {"per_turn": [number, ...]} or {"per_token": [number, ...]}, ...]}',
}
DENSE = {"per_turn": PerTurn, "per_token": PerToken}
# The options after '#', and how each is parsed.
OPTIONS = {
    "model": str,
    "tokenizer": str,
    "api_key_env": str,
    "batch_size": int,
    "max_concurrency": int,
    "timeout_s": float,
    "name": str,
    "token_ids": int,
}
# Prompts, completions, and whether each completion stopped by itself: n entries each. With `token_ids` also TOKENS.
Rows = tuple[Sequence[Any], ...]
TOKENS = ("completion_ids", "turn_ids")
TRIAL_ROWS: Rows = (["Say hello."] * 2, ("Hello!", "No, and go away."), [True] * 2, [[0], [0, 0]], [[0], [0, 0]])
Score = float | PerTurn | PerToken | None
WHAT = "the address of a reward server"


def remote_reward(spec: str, policy: Policy | None = None) -> RemoteReward:
    """Return the checked reward server that "http://host/path#option=value&option=value" names.

    Raises:
        ValueError: an unknown option, or a setting that RemoteReward rejects.
        RuntimeError: `RemoteReward.check` failed.
    """
    url, _, fragment = spec.partition("#")
    options: dict[str, Any] = {}
    for key, value in parse_qsl(fragment, keep_blank_values=True):
        if key not in OPTIONS:
            raise ValueError(f"{WHAT} has an unknown option {key!r} after '#'; there are {', '.join(OPTIONS)}")
        try:
            options[key] = OPTIONS[key](value)
        except ValueError:
            raise ValueError(f"{WHAT}: {value!r} is not a value for {key}") from None
    reward = RemoteReward(url, **options)
    reward.check()
    return reward


class RemoteReward(BuiltInReward):
    """Scores of a reward model behind HTTP, in concurrent batches; calls are retried after temporary errors.

    A row that still has no score is None: it is left out of the update and counted as unscored. The run stops if the
    server stays unreachable or rejects every row.

    Args:
        url: the address of the endpoint.
        model: its name on the server; None if the server has only one.
        tokenizer: for classify: folder or Hub name of the reward model. Rows are then tokenized here exactly as
            `ModelReward` does (chat template, end token, length limit). None: texts are sent, and conversations as
            messages for the server's own chat template (one row per call; vLLM 0.13 or later).
        api_key_env: environment variable that holds the key; None sends no credentials.
        batch_size: rows per call.
        max_concurrency: largest number of calls at the same time.
        timeout_s: deadline of one call.
        name: the name in metrics; None: the model's name, else the end of the path.
        token_ids: for a JSON service: whether `completion_ids` and `turn_ids` are sent too, for dense rewards.
        policy: waits, numbers of calls and deadlines; None: calls are retried for up to 5 minutes.

    Raises:
        ValueError: a setting that cannot work.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        tokenizer: str | None = None,
        api_key_env: str | None = None,
        batch_size: int = 16,
        max_concurrency: int = 8,
        timeout_s: float = 60.0,
        name: str | None = None,
        token_ids: bool = False,
        policy: RetryPolicy | None = None,
    ) -> None:
        self.server = Server(url, WHAT, "reward server", api_key_env)
        last = self.server.url.rpartition("/")[2]
        self.kind = "classify" if last == "classify" else "json"
        if batch_size < 1 or max_concurrency < 1:
            raise ValueError(
                f"{self.server}: batch_size is {batch_size} and max_concurrency is {max_concurrency}; set both to 1 or"
                " more"
            )
        if tokenizer is not None and self.kind != "classify":
            raise ValueError(f"{self.server}: tokenizer is for /classify alone, which takes token ids; leave it out")
        if token_ids and self.kind == "classify":
            raise ValueError(f"{self.server}: token_ids is for JSON services alone, not for /classify; leave it out")
        self.token_ids = bool(token_ids)
        self.model, self.batch_size, self.max_concurrency = model, batch_size, max_concurrency
        # The trainer limits the number of unscored rows; here the run ends only if no call is answered at all.
        self.policy = policy or RetryPolicy(call_timeout_s=timeout_s, patience_s=300.0)
        self.__name__ = re.sub(r"[^A-Za-z0-9._-]+", "-", name or (model or last).rpartition("/")[2])
        self._encode = None if tokenizer is None else _encoder(tokenizer, self.__name__)

    def check(self) -> None:
        """Score two completions, so that a wrong URL, key or model is detected before training starts.

        Raises:
            RuntimeError: no server answers there, or it is not a reward model.
        """

        async def trial() -> list[Score]:
            async with Fleet([self.server], self.policy) as fleet:
                return await fleet.call(lambda to: self._call(to, TRIAL_ROWS[: 5 if self.token_ids else 3]))

        try:
            scores = run_async(trial())
        except CallError as error:
            raise RuntimeError(f"{self.server} cannot be used: {error}") from None
        if self.kind == "classify" and scores == [1.0, 1.0]:
            raise RuntimeError(
                f"{self.server} gives two different completions the probability 1: a softmax over its one label; serve"
                " it with a vLLM that knows use_activation, or with a pooler without softmax"
            )

    def content(self) -> str:
        return f"server {self.server.url}, model {self.model or 'not named'}"

    async def __call__(self, prompts: list[Prompt], completions: list[Completion], **columns: Any) -> list[Score]:
        """Return n scores, None where there is none. Of the columns `completion_stopped` counts, and TOKENS if sent.

        Raises:
            ServerUnavailable: no call was answered within the patience of `policy`.
            RuntimeError: the server rejects every row.
        """
        scores: list[Score] = [None] * len(prompts)
        if not prompts:
            return scores
        more = [columns[name] for name in TOKENS] if self.token_ids else []
        if self.kind == "classify":
            more = [variables_of(columns, len(prompts))]
            if self._encode is None and any(more[0]):
                raise ValueError(
                    f"{self.server}: the rows have a column tools or chat_template_kwargs, which is not sent; set"
                    " #tokenizer=, with which the rows are tokenized here"
                )
        rows = (prompts, completions, columns.get("completion_stopped") or [True] * len(prompts), *more)
        # A conversation that is sent as messages needs a call of its own.
        as_messages = self.kind == "classify" and not isinstance(prompts[0], str) and self._encode is None
        size = 1 if as_messages else self.batch_size
        failed = await self._score(
            [range(i, min(i + size, len(prompts))) for i in range(0, len(prompts), size)], rows, scores
        )
        # One row that is too long must not cost the others of its batch their scores.
        alone = [
            range(i, i + 1) for batch, error in failed if error.kind == "refused" and len(batch) > 1 for i in batch
        ]
        failed = [(batch, error) for batch, error in failed if error.kind != "refused" or len(batch) == 1]
        failed += await self._score(alone, rows, scores)
        num_failed = sum(len(batch) for batch, _ in failed)
        if num_failed == len(prompts) > 1 and all(error.kind == "refused" for _, error in failed):
            raise RuntimeError(f"{self.server} rejects every row: {failed[-1][1]}")
        if failed:
            logger.warning(
                "%s: %d of %d rows have no score (%s)", self.server, num_failed, len(prompts), failed[-1][1]
            )
        return scores

    async def _score(self, batches: Sequence[range], rows: Rows, scores: list[Score]) -> list[tuple[range, CallError]]:
        """Fill in the scores of some batches; return the batches that have none, with their errors."""
        failed: list[tuple[range, CallError]] = []

        async def call(to: Connection, index: int) -> list[Score]:
            return await self._call(to, tuple([column[i] for i in batches[index]] for column in rows))

        def done(index: int, outcome: list[Score] | CallError) -> None:
            if isinstance(outcome, CallError):
                failed.append((batches[index], outcome))
                return
            for row, score in zip(batches[index], outcome, strict=True):
                scores[row] = score

        async with Fleet([self.server], self.policy, self.max_concurrency) as fleet:
            await fleet.answer_all(len(batches), call, done)
        return failed

    async def _call(self, to: Connection, rows: Rows) -> list[Score]:
        prompts, completions, stopped = rows[:3]
        token_ids = None
        if self._encode is not None:
            variables = rows[3] if len(rows) > 3 else None
            token_ids = self._encode(prompts, completions, stopped=stopped, variables=variables)[0]
        answer = await to.ask("POST", "", _request_body(self.kind, rows, self.model, token_ids))
        reported = answer.get("model") if isinstance(answer, dict) else None
        if self.model is not None and isinstance(reported, str) and not is_same_model(self.model, reported):
            raise CallError(f"scores from model {reported!r}, but {self.model!r} was asked")
        return _scores(self.kind, answer, len(prompts))


def _encoder(source: str, name: str) -> Callable[..., tuple[list[list[int]], int]]:
    """Return a function that tokenizes rows as the reward model at `source` was trained to read them."""
    # Of a model, `length_limit` and `reads_end_token` read only its config.
    tokenizer, model = read_tokenizer(source), SimpleNamespace(config=load_config(source))
    limit, end_token = length_limit(model, tokenizer), reads_end_token(model)
    return partial(encode_rows, tokenizer, max_length=limit, end_token=end_token, name=name)


def _request_body(kind: str, rows: Rows, model: str | None, token_ids: list[list[int]] | None) -> dict[str, Any]:
    """Return the JSON that is sent for some rows, with {"model": name} if there is one.

    classify: {"input": texts or token ids}, or, for one conversation without token ids, {"messages": ...} with
    "continue_final_message" if the completion was cut off, so that no end token follows it. json: the columns as in
    the dataset, and TOKENS if `rows` has them.
    """
    prompts, completions, stopped, *tokens = map(list, rows)
    named = {} if model is None else {"model": model}
    if kind == "json":
        sent = {"prompts": prompts, "completions": completions, "completion_stopped": stopped}
        return {**named, **sent, **dict(zip(TOKENS, tokens, strict=False))}
    # Raw scores: a sigmoid flattens large differences, and a softmax over one label is always 1.
    raw = {**named, "use_activation": False}
    if token_ids is not None:
        return {**raw, "input": token_ids}
    if isinstance(prompts[0], str):
        return {**raw, "input": [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]}
    cut = {} if stopped[0] else {"continue_final_message": True}
    return {**raw, "messages": without_nulls([*prompts[0], *completions[0]]), **cut}


def _scores(kind: str, answer: Any, num_rows: int) -> list[Score]:
    """Return the n scores in an answer, None where a JSON service gives null; another form raises a CallError."""
    entries = answer.get("data" if kind == "classify" else "scores") if isinstance(answer, Mapping) else answer
    other_form = CallError(f"an answer that is not of the form {FORMS[kind]}")
    if not isinstance(entries, list) or (kind == "classify" and entries is answer):
        raise other_form
    if len(entries) != num_rows:
        raise CallError(f"{len(entries)} scores for {num_rows} completions")
    if kind == "classify":
        try:
            # A server may answer in any order.
            rows = {entry.get("index", place): entry for place, entry in enumerate(entries)}
            entries = [_probability(rows[place]["probs"]) for place in range(num_rows)]
        except (AttributeError, KeyError, TypeError):
            raise other_form from None
    return [_score(kind, entry) for entry in entries]


def _score(kind: str, entry: Any) -> Score:
    [(form, numbers)] = entry.items() if isinstance(entry, dict) and len(entry) == 1 else [("", [entry])]
    may_be = (int, float) if form else (int, float, type(None))
    if (form and form not in DENSE) or not isinstance(numbers, list) or any(type(x) not in may_be for x in numbers):
        raise CallError(f"a score that is not a number ({str(entry)[:40]}); expected {FORMS[kind]}")
    if form:
        return DENSE[form](numbers)
    return None if entry is None else float(entry)


def _probability(probs: Any) -> Any:
    if not isinstance(probs, list) or not probs:
        raise CallError(f"an answer that is not of the form {FORMS['classify']}")
    if len(probs) > 1:
        raise CallError(f"probabilities of {len(probs)} labels: that is a classifier; a reward model has one", "stop")
    return probs[0]
