"""One server: its address, its key, and calls with limits.

Built on httpx2, which `huggingface_hub` brings. OpenAI's client reads replies of any size, follows redirects with the
key, and retries by itself, which would pass a budget that reserves each call.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2

from onetrunk.servers.errors import OVERLOADED, CallError
from onetrunk.utils.files import parse_json
from onetrunk.utils.redaction import add_secret, redact

logger = logging.getLogger(__name__)

# 13,000 tokens with 20 candidates each fit.
MAX_BYTES = 16 * 2**20
LONGEST_EXCERPT = 200
AN_HTML_PAGE = "an HTML page where JSON was expected; give the address of the API, which often ends in /v1"
# Besides all statuses from 500 on; 425: too early.
AGAIN = frozenset((408, 409, 425, 429))
# A deadline of the server, or of a proxy in front of it.
TIMED_OUT = frozenset((408, 504, 522, 524))
# Besides 4xx: the server has not answered. Another 5xx may come from a proxy whose server has. 529: overloaded.
UNPAID = frozenset((500, 503, 529))
# A wrong key, used-up credit, an unknown path or model: every question would fail in the same way.
FOR_ALL = {
    401: "check the key in the variable that api_key_env names (vllm_api_key_env, judge_api_key_env)",
    402: "its account has no credit left",
    404: "check the URL's path and the model's name",
    405: "check the URL's path",
    407: "the proxy wants credentials",
}
# What a server adds to the name of a model that it pins: a date or a revision.
PINNED = r"[-@:](\d{4}|\d{4}-?\d\d-?\d\d|latest|main|[0-9a-f]{7,40})"


class Server:
    """A server and how to call it.

    Args:
        url: the address of the API, http or https.
        what: the setting that names it, for errors.
        kind: what the server is, for messages, such as "judge server".
        api_key_env: environment variable that holds the key, sent as a bearer token; None sends no credentials.

    Raises:
        ValueError: the URL is not valid, or the variable is not set.
    """

    def __init__(self, url: str, what: str, kind: str, api_key_env: str | None = None):
        self.url, self.kind, self.api_key_env = checked_url(url, what), kind, api_key_env
        if self._secret() is not None and self.url.startswith("http:") and not is_nearby(self.url):
            logger.warning("%s gets its key over plain http, which the network can read; use https", self)

    def __str__(self) -> str:
        return f"{self.kind} {self.url}"

    def _secret(self) -> str | None:
        # Read for every call and not stored, so that no attribute holds the key.
        return read_secret(self.api_key_env)

    @asynccontextmanager
    async def connect(self, max_connections: int = 1) -> AsyncIterator[Connection]:
        """Yield a connection for the calls of one event loop."""
        secret = self._secret()
        async with httpx2.AsyncClient(
            headers={} if secret is None else {"authorization": f"Bearer {secret}"},
            # A redirect could carry the key to another server.
            follow_redirects=False,
            # Calls to this machine and private networks pass by a proxy.
            trust_env=not is_nearby(self.url),
            verify=_ssl_context(),
            # `Fleet` limits a call from its start to the last byte.
            timeout=None,
            limits=httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        ) as client:
            yield Connection(self, client, secret)


# Reading the certificates takes longer than everything else about a client.
_ssl_context = functools.cache(httpx2.create_ssl_context)


class Connection:
    """A server that is being called."""

    def __init__(self, server: Server, client: httpx2.AsyncClient, secret: str | None):
        self.server, self._client, self._secret = server, client, secret

    async def ask(self, method: str, path: str, body: Any = None, *, is_json: bool = True) -> Any:
        """Return the JSON value that the server answers, without secrets: a server may repeat headers.

        Args:
            is_json: False returns the text of any answer.

        Raises:
            CallError: no answer, an error, a redirect, too many bytes, or no JSON.
        """
        response = await self._send(method, self.server.url + path, body)
        if not response.is_success:
            raise _failure(response, self._secret)
        return _json(response, self._secret) if is_json else response.text

    async def _send(self, method: str, url: str, body: Any) -> httpx2.Response:
        try:
            async with self._client.stream(method, url, json=body) as response:
                if response.is_redirect:
                    target = response.request.url.join(response.headers.get("location", ""))
                    target = target.copy_with(userinfo=b"", query=None, fragment=None)
                    raise CallError(
                        f"a redirect to {_one_line(str(target), self._secret)}; give that address, if you trust it",
                        may_be_paid=False,
                    )
                content = await _limited_body(response)
        except httpx2.DecodingError:
            raise CallError("an answer that cannot be unpacked") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = _one_line(str(error), self._secret) or type(error).__name__
            is_unreachable = isinstance(error, httpx2.ConnectError)
            raise CallError(
                f"the connection failed ({reason}); start the server, or correct its address",
                is_unreachable=is_unreachable,
                may_be_paid=not is_unreachable,
            ) from None
        if content is None:
            # Not raised where it is read: the error would keep its frame, and so the whole body, in memory.
            raise CallError(f"an answer of more than {MAX_BYTES // 2**20} MiB")
        # The body is unpacked, so the headers that describe the packing are left out.
        packed = ("content-encoding", "content-length", "transfer-encoding")
        headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in packed]
        return httpx2.Response(response.status_code, headers=headers, content=content, request=response.request)


async def _limited_body(response: httpx2.Response) -> bytes | None:
    parts, size = [], 0
    # Parts of at most 1 MiB each, however much a packed one holds.
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


def checked_url(url: str, what: str) -> str:
    """Return the URL of a server without a trailing slash; ValueError names the setting `what`, and no password."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_valid = is_valid and not re.search(r"[\s\x00-\x1f\x7f\\]", url)
    except (ValueError, AttributeError, TypeError):
        is_valid = False
    if is_valid and parts.username is None and parts.password is None and not (parts.query or parts.fragment):
        return url.rstrip("/")
    raise ValueError(
        f"{what} is not a server's URL; expected one such as https://host/v1, without '?', '#' or a password; put a"
        " key into an environment variable and give its name as api_key_env"
    )


def is_nearby(url: str) -> bool:
    """Return whether a URL names this machine, or an address in a private network."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost"


def is_same_model(model: str, reported: str) -> bool:
    """Return whether two names mean one model: the second may differ in its owner and have a date or revision."""
    ours, theirs = (name.rstrip("/").rpartition("/")[2].lower() for name in (model, reported))
    return ours == theirs or re.fullmatch(re.escape(ours) + PINNED, theirs) is not None


def read_secret(variable: str | None) -> str | None:
    """Return the value of an environment variable, which `redact` knows from then on; None without a variable.

    Raises:
        ValueError: the name looks like a key itself, or the variable is not set.
    """
    if variable is None:
        return None
    secret = os.environ.get(checked_variable(variable), "").strip()
    if not secret:
        raise ValueError(
            f"api_key_env: the environment variable {variable} is not set; export it, or drop api_key_env"
        )
    add_secret(secret, variable)
    return secret


def checked_variable(name: str) -> str:
    """Return the name of an environment variable; raise ValueError for any other text, such as a key itself."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name) or re.match(r"(sk|hf|gsk|xai)[-_]", name):
        # Not repeated: it may be the key.
        raise ValueError("api_key_env is not the name of an environment variable; give the name, never the key itself")
    return name


def _json(response: httpx2.Response, secret: str | None) -> Any:
    try:
        value = parse_json(response.content)
        if secret is None:
            return value
        # Written again, every text is spelled in one way, whatever escapes the server has used.
        text = json.dumps(value)
        clean = redact(text)
        return value if clean == text else parse_json(clean)
    except (ValueError, RecursionError):
        raise CallError(AN_HTML_PAGE if _is_html(response) else "a body that is not complete JSON") from None


def _failure(response: httpx2.Response, secret: str | None) -> CallError:
    """Return what a response with an error status means for the call."""
    status = response.status_code
    reason = f"HTTP {status}: {_excerpt(response, secret)}"
    may_be_paid = status in TIMED_OUT or (status >= 500 and status not in UNPAID)
    if status in FOR_ALL:
        return CallError(f"{reason}; {FOR_ALL[status]}", "stop", status=status, may_be_paid=may_be_paid)
    if status not in AGAIN and status < 500:
        return CallError(reason, "refused", status=status, may_be_paid=may_be_paid)
    after_s = retry_after_s(response.headers) if status in OVERLOADED else None
    timed_out = status in TIMED_OUT
    return CallError(reason, status=status, retry_after_s=after_s, timed_out=timed_out, may_be_paid=may_be_paid)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a Retry-After header asks for; None without a number of them."""
    value = headers.get("retry-after", "").strip()
    return float(value) if re.fullmatch(r"\d{1,9}(\.\d+)?", value) else None


def _is_html(response: httpx2.Response) -> bool:
    is_page = re.match(r"(?i)\s*<(!doctype|html|head|body)", response.text)
    return "html" in response.headers.get("content-type", "").lower() or is_page is not None


def _excerpt(response: httpx2.Response, secret: str | None) -> str:
    """Return a response for a message: the message of its error, the beginning of its text, or "an HTML page"."""
    if _is_html(response):
        return "an HTML page"
    try:
        value = _json(response, secret)
        text = _message(value) or json.dumps(value, ensure_ascii=False)
    except CallError:
        text = response.text
    return _one_line(text, secret) or "an empty answer"


def _message(body: Any) -> str | None:
    """Return the message of an error in the forms of OpenAI, vLLM, TGI and FastAPI."""
    for key in ("error", "message", "detail"):
        if isinstance(body, Mapping) and body.get(key):
            inner = body[key]
            return inner if isinstance(inner, str) else _message(inner) or json.dumps(inner)
    return None


def _one_line(text: str, secret: str | None) -> str:
    """Return the beginning of a text in one line, without the secret, however short, and any other."""
    text = redact(text.replace(secret, "<redacted key>") if secret else text)
    line = re.sub(r"[\s\x00-\x1f\x7f]+", " ", text).strip()
    return line if len(line) <= LONGEST_EXCERPT else f"{line[:LONGEST_EXCERPT]}..."
