"""What an HTTP error of a server means: ask again, leave this question, or stop. Knows no judge and no reward.

Every reason is one line, without the secret, and short: servers answer errors with whole HTML pages.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError

from onetrunk.judges.retries import CallError
from onetrunk.judges.urls import redact

# 425 too early, 529 overloaded (several hosted servers), 520 to 524 a proxy's words for a server that does not answer.
AGAIN = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529))
OVERLOADED = frozenset((408, 429, 503, 504, 529))
# A deadline of the server's, or of a proxy before it.
TIMED_OUT = frozenset((408, 504, 522, 524))
# A key that is not taken, credit that is used up, a path or model that is not there: so it will be for every question.
FOR_ALL = {
    401: "check the key in the variable that api_key_env names",
    402: "its account has no credit left",
    404: "check the URL's path and the model's name",
    405: "check the URL's path",
    407: "the proxy wants credentials",
}
LONGEST_EXCERPT = 200


def failure_of(error: Exception, secret: str | None) -> CallError:
    """Return what an error of huggingface_hub or httpx means.

    Raises:
        Exception: the error itself, where it is none of a server or of the network.
    """
    if isinstance(error, CallError):
        return error
    if isinstance(error, (httpx2.HTTPStatusError, HfHubHTTPError)):
        return failure_of_response(error.response, secret)
    if isinstance(error, (InferenceTimeoutError, httpx2.TimeoutException)):
        return CallError("no answer in time", overloaded=True, timed_out=True)
    if isinstance(error, httpx2.TransportError):
        reason = redact(str(error), secret) or type(error).__name__
        return CallError(f"the connection failed ({_one_line(reason)})")
    if isinstance(error, httpx2.DecodingError):
        return CallError("an answer that cannot be unpacked")
    if isinstance(error, (httpx2.HTTPError, httpx2.InvalidURL)):
        return CallError(f"the call failed ({_one_line(redact(str(error), secret))})")
    raise error


def failure_of_response(response: httpx2.Response, secret: str | None) -> CallError:
    """Return what a response with an error status means."""
    status = response.status_code
    reason = f"HTTP {status}: {excerpt(response, secret)}"
    if status in FOR_ALL:
        return CallError(f"{reason}; {FOR_ALL[status]}", "stop")
    if status in AGAIN or status >= 500:
        after_s = retry_after_s(response.headers, time.time()) if status in (429, 503, 529) else None
        return CallError(reason, overloaded=status in OVERLOADED, retry_after_s=after_s, timed_out=status in TIMED_OUT)
    return CallError(reason, "refused")


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or as a date; None without a usable one.

    Args:
        headers: of the response.
        now: seconds since 1970; a date is compared with the server's own clock where the response tells it.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        seconds = float(value)
        return seconds if math.isfinite(seconds) else None
    asked = _timestamp(value)
    if asked is None:
        return None
    server_now = _timestamp(headers.get("date", ""))
    return max(0.0, asked - (now if server_now is None else server_now))


def excerpt(response: httpx2.Response, secret: str | None) -> str:
    """Return what a response says, for a sentence: an error's message, the beginning of a text, or "an HTML page"."""
    try:
        text = response.text
    except (httpx2.StreamError, httpx2.HTTPError, LookupError):
        return "no text"
    if is_html(response.headers.get("content-type", ""), text):
        return "an HTML page"
    try:
        text = _message(json.loads(text)) or text
    except (ValueError, RecursionError):
        pass
    return _one_line(redact(text, secret)) or "an empty answer"


def is_html(content_type: str, text: str) -> bool:
    """Say whether a body is a page for people, as a proxy, a login or a wrong path gives it."""
    return "html" in content_type.lower() or re.match(r"(?i)\s*<(!doctype|html|head|body)", text) is not None


def _message(body: Any) -> str | None:
    """Return the message of an error in the forms of OpenAI, vLLM, TGI and FastAPI."""
    for key in ("error", "message", "detail"):
        if isinstance(body, Mapping) and body.get(key):
            inner = body[key]
            return inner if isinstance(inner, str) else _message(inner) or json.dumps(inner)
    return None


def _one_line(text: str) -> str:
    line = re.sub(r"[\s\x00-\x1f\x7f]+", " ", text).strip()
    return line if len(line) <= LONGEST_EXCERPT else f"{line[:LONGEST_EXCERPT]}..."


def _timestamp(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
