"""A server that speaks OpenAI's chat protocol, and what its replies say: a label, or probabilities of labels.

Replies are read strictly, never guessed: log probabilities count only if they are present, are probabilities, and
belong to the text of the reply, whatever the server was asked for.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import httpx2

from onetrunk.judges.judge import Usage
from onetrunk.judges.template import Opinion, is_mark
from onetrunk.types import Message
from onetrunk.utils.calls import CallError
from onetrunk.utils.files import parse_json
from onetrunk.utils.http import (
    AN_HTML_PAGE,
    check_host,
    check_url,
    guarded_client,
    is_html,
    json_of,
    post_json,
    read_secret,
    send,
    shown,
)

logger = logging.getLogger(__name__)

CHAT_PATH = "/chat/completions"
# A label may be in quotes, brackets or bold type; a sentence around it is not a verdict.
BEFORE, AFTER = r"[\s\"'`*(\[<]*", r"[\s\"'`*)\]>.:]*"
VERDICT_KEYS = ("label", "verdict", "answer", "choice", "better", "winner", "score", "rating")
# What a server adds to the name of a model that it pins: a date or a revision.
PINNED = r"[-@:](\d{4}|\d{4}-?\d\d-?\d\d|latest|main|[0-9a-f]{7,40})"
# How tokenizers write the space before a word.
SPACE_MARKS = "\u0120\u2581"
# With less probability on the labels their order says little about what the model wanted to write.
LEAST_LABEL_MASS = 0.5
# Rounding of the server: probabilities of a position may add up to a little more than 1.
ROUNDING = 0.02
LONGEST_EXCERPT = 60
# More tokens than a chat template adds to a conversation, with its own system prompt.
TEMPLATE_TOKENS = 1024
# Of a call that reports no tokens: UTF-8 bytes per token of its prompt. Most texts have more, so this counts too many.
BYTES_PER_TOKEN = 2
# A call that reports as many tokens is not believed.
TOO_MANY_TOKENS = 10**9
# Characters of a thought that is kept; the middle of a longer one is left out.
LONGEST_THOUGHT = 4000
MORE_TOKENS = (
    "raise judge_verdict_tokens, or turn the model's reasoning off, such as by judge_extra_body"
    " {chat_template_kwargs: {enable_thinking: false}}"
)


class ChatServer:
    """One model of a chat server.

    Args:
        url: of the API, such as "http://127.0.0.1:8000/v1", or the whole path that ends in /chat/completions.
        model: its name on the server.
        api_key_env, allow_http: as in `read_secret` and `check_url`.
        extra_body: more entries for the body of every call.

    `usage` counts calls, and tokens as the server reports them, or an estimate where it reports none.

    Raises:
        ValueError: a URL that may not be called, no model, or a variable that is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key_env: str | None = None,
        allow_http: bool = False,
        extra_body: dict[str, Any] | None = None,
    ):
        self.url = check_url(url, allow_http=allow_http)
        if not model or not model.strip():
            raise ValueError(f"judge_model is not set; name the model that {shown(self.url)} should answer with")
        self.model, self.api_key_env, self.allow_http = model, api_key_env, allow_http
        self.extra_body = extra_body or {}
        self.usage = Usage()
        base = self.url.removesuffix(CHAT_PATH)
        # The base of the API; a bare address stands for its /v1.
        self._api = base if base != self.url or base.endswith("/v1") else f"{base}/v1"
        read_secret(api_key_env)

    def __str__(self) -> str:
        return f"judge server {shown(self.url)}"

    def check_host(self) -> None:
        """Look up the host and check its addresses (see `http.check_host`)."""
        check_host(self.url, allow_http=self.allow_http)

    def session(self, max_connections: int = 1) -> httpx2.AsyncClient:
        """Return a client for this server."""
        return guarded_client(self.url, self._secret(), max_connections)

    def _secret(self) -> str | None:
        # Read for every call and not stored, so that no attribute of a judge holds its key.
        return read_secret(self.api_key_env)

    async def reply(
        self,
        client: httpx2.AsyncClient,
        messages: list[Message],
        *,
        max_tokens: int,
        seed: int,
        top_logprobs: int = 0,
    ) -> Reply:
        """Return a reply, sampled at temperature 1 from all tokens.

        Args:
            client: from `session`.
            messages, max_tokens: the conversation, and the limit of the reply.
            seed: makes replies differ; below 2**31.
            top_logprobs: candidates per token to return log probabilities of; 0 for none.

        Raises:
            CallError: no reply, or one of an unexpected form.
            EndOfCalls: the budget has no room for the call; nothing was sent.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "seed": seed,
            "temperature": 1.0,
            "top_p": 1.0,
            "stream": False,
        }
        logprobs = {"logprobs": True, "top_logprobs": top_logprobs} if top_logprobs else {}
        body = body | logprobs | self.extra_body
        most, usage = most_tokens(body), self.usage
        if usage.budget is not None:
            usage.budget(*most)
        usage.calls += 1
        is_settled = False
        try:
            output = await post_json(client, self._api + CHAT_PATH, body, self._secret())
            # Counted first: a reply that cannot be used is paid for too.
            self._count_tokens(output, *most)
            is_settled = True
            return checked_reply(output, self.model)
        except BaseException as error:  # A deadline cancels the call.
            usage.failed_calls += 1
            is_settled = is_settled or not getattr(error, "may_be_paid", True)
            raise
        finally:
            # A call whose cost is not known keeps its reservation.
            if usage.budget is not None and is_settled:
                usage.release(*most)

    def _count_tokens(self, output: Any, most_prompt: int, most_completion: int) -> None:
        reported = output.get("usage") if isinstance(output, Mapping) else None
        reported, usage = reported if isinstance(reported, Mapping) else {}, self.usage
        prompt, completion = reported.get("prompt_tokens"), reported.get("completion_tokens")
        # A prompt always has tokens.
        is_read, is_written = _is_count(prompt) and prompt > 0, _is_count(completion)
        usage.prompt_tokens += prompt if is_read else most_prompt // BYTES_PER_TOKEN
        usage.completion_tokens += completion if is_written else most_completion
        if not (is_read and is_written):
            usage.estimated_calls += 1
            if usage.estimated_calls == 1:
                logger.warning(
                    "%s does not report the tokens of a call (usage); they are estimated: a token of the prompt per %d"
                    " bytes, and as many written as a reply may have",
                    self,
                    BYTES_PER_TOKEN,
                )

    async def served_models(self) -> list[str] | None:
        """Return the names of the models that the server lists.

        None if it has no such list or fails to read it (transformers serve without a Hub cache answers HTTP 500).

        Raises:
            CallError: no server, or one that answers with web pages.
        """
        async with self.session() as client:
            response = await send(client, "GET", f"{self._api}/models", self._secret())
        if not response.is_success:
            return None
        if is_html(response):
            raise CallError(AN_HTML_PAGE, "stop")
        try:
            return [str(entry["id"]) for entry in json_of(response, self._secret())["data"]]
        except (CallError, TypeError, KeyError):
            return None

    async def rendered(self, messages: list[Message]) -> tuple[str, list[str]] | None:
        """Return a conversation as the server's chat template renders it, and the names of its tokens.

        Uses `/tokenize` and `/detokenize` of vLLM. None from a server without them, or whose template does not take
        the conversation.
        """
        root, secret = self._api.removesuffix("/v1"), self._secret()
        body = {"model": self.model, "messages": messages, "add_generation_prompt": True, "return_token_strs": True}
        try:
            async with self.session() as client:
                tokenized = await post_json(client, f"{root}/tokenize", body, secret)
                body = {"model": self.model, "tokens": tokenized["tokens"]}
                text = (await post_json(client, f"{root}/detokenize", body, secret))["prompt"]
                names = tokenized.get("token_strs")
        except (CallError, TypeError, AttributeError, KeyError):
            return None
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        return (text, names) if isinstance(text, str) else None


@dataclass(frozen=True)
class Reply:
    """A reply of the expected form.

    Args:
        text: what the model wrote, without its hidden reasoning.
        is_whole: False if it was cut at the token limit.
        positions: per token of the reply (the token, {candidate: probability}); None without usable ones.
        thought: the hidden reasoning, wherever the server puts it.
        refusal: what the server sent instead of an answer, if it did.
    """

    text: str
    is_whole: bool
    positions: tuple[tuple[str, dict[str, float]], ...] | None
    thought: str = ""
    refusal: str | None = None

    @property
    def is_all_reasoning(self) -> bool:
        """Whether the token limit was reached before the reasoning ended."""
        return bool(self.thought) and not self.is_whole and not self.text.strip()


def most_tokens(body: Mapping[str, Any]) -> tuple[int, int]:
    """Return the most tokens that a call with this body reads and writes: no token is shorter than a byte."""
    size = len(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    limits = [body["max_tokens"], body.get("max_completion_tokens")]
    return size + TEMPLATE_TOKENS, max(limit for limit in limits if _is_count(limit))


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < TOO_MANY_TOKENS


def checked_reply(output: Any, model: str) -> Reply:
    """Return the reply in a parsed body of `/chat/completions`; raises CallError for none, or of another model."""
    if not isinstance(output, Mapping):
        raise CallError(f"a body of another form than a chat completion ({type(output).__name__})")
    if output.get("error"):
        raise CallError(f"an error in place of a reply ({str(output['error'])[:200]})")
    reported = output.get("model")
    if isinstance(reported, str) and reported and not is_same_model(model, reported):
        raise CallError(f"a reply of model {reported!r}, where {model!r} was asked")
    choices = output.get("choices")
    if not isinstance(choices, Sequence) or not choices or not isinstance(choices[0], Mapping):
        raise CallError("a reply without choices")
    message = choices[0].get("message")
    message = message if isinstance(message, Mapping) else {}
    text, ending = message.get("content"), choices[0].get("finish_reason")
    # The two names under which servers send reasoning apart from the text.
    thought = message.get("reasoning") or message.get("reasoning_content") or ""
    refusal = message.get("refusal") or ("its content filter" if ending == "content_filter" else None)
    if not isinstance(text, str):
        # A server sends no text if the reasoning fills the whole reply, or if it refuses to answer.
        if text is not None or not (thought or refusal):
            raise CallError("a reply without text")
        text = ""
    verdict = _after_thinking(text)
    # After reasoning the first token does not belong to the verdict.
    thought = str(thought) or text.removesuffix(verdict)
    positions = None if thought else _positions(choices[0].get("logprobs"), text)
    return Reply(verdict, ending != "length", positions, thought, None if refusal is None else str(refusal))


def is_same_model(model: str, reported: str) -> bool:
    """Return whether two names mean one model: the second may differ in its owner and have a date or revision."""
    ours, theirs = (name.rstrip("/").rpartition("/")[2].lower() for name in (model, reported))
    return ours == theirs or re.fullmatch(re.escape(ours) + PINNED, theirs) is not None


def read_label(text: str, labels: Sequence[str]) -> str | None:
    """Return the label that a reply consists of; None for any other reply.

    Accepts the label alone, a word such as "Answer:" before it, and JSON with one of VERDICT_KEYS, fenced or not.
    """
    fenced = re.fullmatch(r"\s*```\w*\n?(.*?)\n?```\s*", text, flags=re.DOTALL)
    text = fenced.group(1) if fenced else text
    if text.lstrip().startswith("{"):
        return _label_in_json(text, labels)
    either = "|".join(map(re.escape, sorted(labels, key=len, reverse=True)))
    word = rf"(?i:{BEFORE}(?:final |my )?(?:{'|'.join(VERDICT_KEYS)})(?: is)?{BEFORE}[:=]{AFTER})?"
    match = re.fullmatch(rf"{word}{BEFORE}({either}){AFTER}", text)
    return match.group(1) if match else None


def label_probabilities(reply: Reply, labels: Sequence[str]) -> dict[str, float] | None:
    """Return the probability of each label at the first token that is not blank; None without log probabilities.

    They do not add up to 1; the rest is the probability of everything else. A label that is not among the candidates
    is less probable than each of them and counts as 0.
    """
    for token, candidates in reply.positions or ():
        if not _bare(token):
            continue
        if len(candidates) < 2:
            # The written token alone says nothing about the other labels.
            return None
        probabilities = dict.fromkeys(labels, 0.0)
        for candidate, probability in candidates.items():
            if _bare(candidate) in probabilities:
                probabilities[_bare(candidate)] += probability
        return probabilities
    return None


@dataclass(frozen=True)
class Vote:
    """One reply to one question.

    Args:
        label: None for a reply that is not a label.
        probabilities: per label, as from `label_probabilities`; None without log probabilities.
        reasoning: what the model wrote before.
        problem: why the reply is not a label; None if it is one.
    """

    label: str | None
    probabilities: dict[str, float] | None = None
    reasoning: str | None = None
    problem: str | None = None


def read_vote(reply: Reply, labels: Sequence[str], reasoning: str | None = None) -> Vote:
    """Return the vote that a reply is."""
    label = read_label(reply.text, labels)
    # The first token of an empty reply is its end, so its probabilities are no measurement.
    probabilities = label_probabilities(reply, labels) if reply.text.strip() else None
    thought = (reasoning or reply.thought or "").strip()
    if len(thought) > LONGEST_THOUGHT:
        half = LONGEST_THOUGHT // 2
        thought = f"{thought[:half]}\n[{len(thought) - 2 * half} characters are left out here]\n{thought[-half:]}"
    return Vote(label, probabilities, thought or None, _problem_of(reply) if label is None else None)


def opinion_of_probabilities(votes: Sequence[Vote]) -> Opinion:
    """Return the opinion of replies with log probabilities: the mean of the labels' probabilities over the replies.

    Those of a reply are scaled to add up to 1. It does not count if the model would probably have written something
    else than a label; without a reply that counts, the opinion is an abstention.
    """
    masses = [sum(vote.probabilities.values()) for vote in votes]
    details: dict[str, Any] = {"method": "logprobs", "label_mass": round(min(fmean(masses), 1.0), 6)}
    counted = [(vote, mass) for vote, mass in zip(votes, masses, strict=True) if mass >= LEAST_LABEL_MASS]
    if not counted:
        return Opinion(None, f"the labels have {fmean(masses):.0%} of the probability", details)
    shares = [{label: p / mass for label, p in vote.probabilities.items()} for vote, mass in counted]
    if len(votes) > 1:
        by_sample = [{label: round(p, 6) for label, p in share.items()} for share in shares]
        details |= {"samples": len(votes), "by_sample": by_sample}
    thoughts = [vote.reasoning for vote, _ in counted]
    return Opinion({label: fmean(s[label] for s in shares) for label in shares[0]}, *_thoughts(thoughts, details))


def _thoughts(thoughts: Sequence[str | None], details: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the first thought as the reason, and details with the others."""
    known = [thought for thought in thoughts if thought]
    return (known[0] if known else None), (details | {"thoughts": known[1:]} if len(known) > 1 else details)


def opinion_of_votes(votes: Sequence[Vote], labels: Sequence[str]) -> Opinion:
    """Return the share of each label among the votes that are labels; no shares if fewer than half are labels.

    Unlike an abstention, no shares mean that nothing was measured: another reply may be a label.
    """
    counts = {label: sum(vote.label == label for vote in votes) for label in labels}
    read = sum(counts.values())
    details = {"method": "votes", "votes": {**counts, "unread": len(votes) - read}}
    if 2 * read < len(votes):
        problem = next(vote.problem for vote in votes if vote.label is None)
        return Opinion(None, f"{len(votes) - read} of {len(votes)} replies are no label (one: {problem})", details)
    shares = {label: count / read for label, count in counts.items()}
    return Opinion(shares, *_thoughts([vote.reasoning for vote in votes], details))


def _problem_of(reply: Reply) -> str:
    """Return why a reply is not a label, and what to change if that is known."""
    begins = json.dumps(reply.text.strip()[:LONGEST_EXCERPT], ensure_ascii=True)
    if reply.refusal is not None:
        return f"the server refused to answer: {json.dumps(reply.refusal[:LONGEST_EXCERPT], ensure_ascii=True)}"
    if reply.is_all_reasoning:
        return f"all its tokens went to the model's reasoning; {MORE_TOKENS}"
    if not reply.text.strip():
        return "it is empty"
    if not reply.is_whole:
        return f"it reached the token limit and begins {begins}; if the model reasons first, {MORE_TOKENS}"
    return f"it begins {begins}"


def _label_in_json(text: str, labels: Sequence[str]) -> str | None:
    try:
        value = parse_json(text)
    except ValueError:
        return None
    entries = [str(value[key]).strip() for key in VERDICT_KEYS if key in value] if isinstance(value, dict) else []
    return entries[0] if len(entries) == 1 and entries[0] in labels else None


def _after_thinking(text: str) -> str:
    """Return the text after the reasoning that some models write into their reply; empty if it does not end."""
    _, ended, after = text.rpartition("</think>")
    return after if ended or not text.lstrip().startswith("<think>") else ""


def _positions(logprobs: Any, text: str) -> tuple[tuple[str, dict[str, float]], ...] | None:
    """Return the positions that a reply has; None if they have another form or are those of another text."""
    try:
        positions = [(_token(entry), _candidates(entry["top_logprobs"])) for entry in logprobs["content"]]
    except (TypeError, KeyError, ValueError):
        return None
    return tuple(positions) if positions and _spell([token for token, _ in positions], text) else None


def _candidates(entries: Any) -> dict[str, float]:
    probabilities: dict[str, float] = {}
    for entry in entries:
        token, logprob = _token(entry), entry["logprob"]
        if not logprob <= ROUNDING:
            raise ValueError(f"{logprob} is no log probability")
        # Two tokens may have the same text, such as bytes that are no text.
        probabilities[token] = probabilities.get(token, 0.0) + math.exp(logprob)
    if sum(probabilities.values()) > 1 + ROUNDING:
        raise ValueError("probabilities of more than 1 together")
    return probabilities


def _token(entry: Any) -> str:
    if not isinstance(entry["token"], str):
        raise TypeError("a token that is no text")
    return entry["token"]


def _spell(tokens: Sequence[str], text: str) -> bool:
    """Return whether tokens are those of a text, one by one; the tokens may end before the text does.

    Servers leave control tokens out of the text, so those are skipped, and so is the last token if it ended the reply.
    Blanks and non-ASCII characters, of which a token may hold a part, are not compared.
    """
    left = _comparable(text)
    for number, token in enumerate(tokens):
        part = _comparable(token)
        if left.startswith(part):
            left = left[len(part) :]
        elif not is_mark(token.strip()) and (left or number < len(tokens) - 1):
            return False
    return True


def _comparable(text: str) -> str:
    return "".join(character for character in text if character.isascii() and not character.isspace())


def _bare(text: str) -> str:
    for mark in SPACE_MARKS:
        text = text.replace(mark, " ")
    return text.strip()
