"""HTTP for judges and reward servers: URL checks, secrets, a client with limits, and what failures mean.

A redirect or a changed DNS entry could lead a call to a cloud's metadata service or carry a key to another server.
So secrets come from environment variables only and go to one server only, over https or to a nearby address;
redirects are not followed, the address actually called is checked, and only a limited part of an answer is read.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx2

from onetrunk.utils.calls import CallError
from onetrunk.utils.files import parse_json
from onetrunk.utils.redaction import add_secret, redact

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Where clouds hand out credentials to any process inside. Link-local addresses are rejected as a whole.
METADATA_HOST = "metadata.google.internal"
METADATA_ADDRESSES = frozenset(
    ipaddress.ip_address(text)
    # AWS, Google, Azure and others; AWS and Google by IPv6; Azure's host; Alibaba; Oracle.
    for text in ("169.254.169.254", "fd00:ec2::254", "fd20:ce::254", "168.63.129.16", "100.100.100.200", "192.0.0.192")
)
FORBIDDEN = "where clouds hand out credentials; name the host of a judge or reward model"
# IPv4 addresses inside IPv6 addresses (RFC 6052).
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# 13,000 tokens with 20 candidates each fit. Parsed, such an answer takes about ten times as much memory.
MAX_BYTES = 16 * 2**20
# Answers nest less than ten deep; Python's parser fails at a thousand.
MAX_DEPTH = 100
LONGEST_EXCERPT = 200
AN_HTML_PAGE = "an HTML page where JSON was expected"

# Besides all statuses from 500 on; 425: too early. 529: overloaded (several hosted servers).
AGAIN = frozenset((408, 409, 425, 429))
OVERLOADED = frozenset((408, 429, 503, 504, 529))
# A deadline of the server, or of a proxy in front of it.
TIMED_OUT = frozenset((408, 504, 522, 524))
# Besides 4xx: the server has not answered. Another 5xx may come from a proxy whose server has.
UNPAID = frozenset((500, 503, 529))
# A wrong key, used-up credit, an unknown path or model: every question would fail in the same way.
FOR_ALL = {
    401: "check the key in the variable that api_key_env names (vllm_api_key_env, judge_api_key_env)",
    402: "its account has no credit left",
    404: "check the URL's path and the model's name",
    405: "check the URL's path",
    407: "the proxy wants credentials",
}


def check_url(url: str, what: str = "the judge's address", allow_http: bool = False) -> str:
    """Return the URL of a server without a trailing slash, after all checks that need no network.

    Args:
        url: http or https; http for this machine and private networks only.
        what: the setting that it comes from, for errors.
        allow_http: allows http for any other host too, where the network can read everything.

    Raises:
        ValueError: names the setting and what to change, without repeating a password in the URL.
    """
    example = "expected one such as https://host/v1"
    if not isinstance(url, str) or re.search(r"[\s\x00-\x1f\x7f\\]", url):
        raise ValueError(f"{what} is no URL: it holds a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{what} is no URL ({error}); {example}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"{what} holds a user name or password before '@'; put the key into an environment variable and give its"
            " name as api_key_env"
        )
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{what} is {shown(url)!r}; expected http:// or https://, such as https://host/v1")
    if not host:
        raise ValueError(f"{what} is {shown(url)!r}, which names no host; {example}")
    if parts.query or parts.fragment:
        raise ValueError(f"{what} is {shown(url)!r} with '?' or '#' after it; give the address alone")
    if host.rstrip(".").lower() == METADATA_HOST:
        raise ValueError(f"{what}: {host} is {FORBIDDEN}")
    address = _as_address(host)
    if address is not None:
        _check_addresses([address], url, what, allow_http)
    return url.rstrip("/")


def check_host(url: str, what: str = "the judge's address", allow_http: bool = False) -> None:
    """Look the host up and check every address of its name: ValueError as in `check_url`, RuntimeError for no host.

    An unknown name passes if the call goes through a proxy, because the proxy looks names up itself.
    """
    parts = urlsplit(url)
    try:
        entries = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if uses_proxy(url):
            return
        raise RuntimeError(
            f"{what} {shown(url)}: the host {parts.hostname} is unknown ({error}); check its name and the network"
        ) from None
    _check_addresses([_socket_address(entry[4]) for entry in entries], url, what, allow_http)


def _check_addresses(addresses: Sequence[Address], url: str, what: str, allow_http: bool) -> None:
    parts = urlsplit(url)
    for address in addresses:
        check_address(address, parts.hostname, what)
    if parts.scheme == "http" and not allow_http and not all(map(_is_near, addresses)):
        raise ValueError(
            f"{what} {shown(url)} is plain http to a host that is neither this machine nor in a private network, where"
            " others can read prompts and keys; use https"
        )


def check_address(address: Address, host: str, what: str) -> None:
    """Raise ValueError for the address of a metadata service, a link-local address, or 0.0.0.0."""
    address = _inner_address(address)
    if address in METADATA_ADDRESSES or address.is_link_local:
        raise ValueError(f"{what}: {host} is {address}, {FORBIDDEN}")
    if address.is_unspecified:
        raise ValueError(f"{what}: {host} is {address}, which is no server's address; for this machine: 127.0.0.1")


def uses_proxy(url: str) -> bool:
    """Return whether calls of this URL go through a proxy that the environment names; calls nearby never do."""
    parts = urlsplit(url)
    address = _as_address(parts.hostname or "")
    near = parts.hostname == "localhost" or (address is not None and _is_near(address))
    return not near and (parts.scheme in getproxies() or "all" in getproxies())


def shown(url: str) -> str:
    """Return a URL for a message, without user, password and query, which may hold secrets."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _as_address(host: str) -> Address | None:
    """Return the address that a host spells out, also in the short and hexadecimal forms of IPv4; None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host.rstrip(".")))
    except (OSError, ValueError):
        return None


def _socket_address(entry: tuple[Any, ...]) -> Address:
    return ipaddress.ip_address(entry[0].partition("%")[0])


def _inner_address(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_near(address: Address) -> bool:
    """Return whether an address is this machine's or private; those of shared carriers (RFC 6598) are neither."""
    address = _inner_address(address)
    return address.is_loopback or address.is_private


def read_secret(variable: str | None) -> str | None:
    """Return the value of an environment variable; None without a variable.

    Raises:
        ValueError: the name looks like a key itself, or the variable is not set, or its value cannot be a header.
    """
    if variable is None:
        return None
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", variable) or re.match(r"(sk|hf|gsk|xai)[-_]", variable):
        # Not repeated: it may be the key.
        raise ValueError("api_key_env is not the name of an environment variable; give the name, never the key itself")
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ValueError(
            f"api_key_env: the environment variable {variable} is not set; export it, or drop api_key_env"
        )
    if not secret.isascii() or re.search(r"[\s\x00-\x1f\x7f]", secret):
        raise ValueError(f"api_key_env: the value of {variable} holds spaces or other characters that no key has")
    add_secret(secret, variable)
    return secret


def guarded_client(url: str, secret: str | None, max_connections: int) -> httpx2.AsyncClient:
    """Return a client for one server, for `send` alone; a secret goes along as a bearer token."""
    return httpx2.AsyncClient(
        headers={} if secret is None else {"authorization": f"Bearer {secret}"},
        follow_redirects=False,
        trust_env=uses_proxy(url),
        verify=_ssl_context(),
        # Each call has its own deadline, from its start to the last byte.
        timeout=None,
        limits=httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
    )


# Reading the certificates takes longer than everything else about a client.
_ssl_context = functools.cache(httpx2.create_ssl_context)


async def send(
    client: httpx2.AsyncClient, method: str, url: str, secret: str | None, body: Any = None
) -> httpx2.Response:
    """Return a response of any status, read to its end within MAX_BYTES and MAX_DEPTH.

    `secret` is removed from messages. `body` is sent as JSON.

    Raises:
        CallError: no response, a redirect, or one that is too long or too deep; its connection is closed.
    """
    try:
        async with client.stream(method, url, json=body) as response:
            _check_peer(response, url)
            if response.is_redirect:
                target = response.request.url.join(response.headers.get("location", ""))
                target = target.copy_with(userinfo=b"", query=None, fragment=None)
                target = _one_line(str(target), secret)
                raise CallError(f"a redirect to {target} instead of an answer", may_be_paid=False)
            content, problem = await _bounded_body(response)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        if isinstance(error, httpx2.DecodingError):
            raise CallError("an answer that cannot be unpacked") from None
        what = "the connection" if isinstance(error, httpx2.TransportError) else "the call"
        raise CallError(
            f"{what} failed ({_one_line(str(error), secret) or type(error).__name__})",
            may_be_paid=not isinstance(error, httpx2.ConnectError),
        ) from None
    if problem:
        # Not raised in `_bounded_body`: the error would keep its frame, and so the whole body, in memory.
        raise CallError(problem)
    # The body is unpacked, so the headers that describe the packing are left out.
    packed = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in packed]
    return httpx2.Response(response.status_code, headers=headers, content=content, request=response.request)


async def post_json(client: httpx2.AsyncClient, url: str, body: Any, secret: str | None) -> Any:
    """Return the JSON value that a server answers; raises CallError as `send`, for an error, and for another body."""
    response = await send(client, "POST", url, secret, body)
    if not response.is_success:
        raise failure_of_response(response, secret)
    return json_of(response, secret)


def json_of(response: httpx2.Response, secret: str | None) -> Any:
    """Return the JSON value of a response. If a secret was sent, all secrets are removed: a server may repeat headers.

    Raises:
        CallError: a body that is not JSON.
    """
    try:
        value = parse_json(response.content)
        if secret is None:
            return value
        # Written again, every text is spelled in one way, whatever escapes the server has used.
        text = json.dumps(value)
        clean = redact(text)
        return value if clean == text else parse_json(clean)
    except ValueError:
        raise CallError(AN_HTML_PAGE if is_html(response) else "a body that is not whole JSON") from None


def _check_peer(response: httpx2.Response, url: str) -> None:
    # `check_host` ran before the run; the owner of the name may have changed its address since.
    stream = response.extensions.get("network_stream")
    peer = None if stream is None else stream.get_extra_info("server_addr")
    if isinstance(peer, tuple):
        try:
            check_address(_socket_address(peer), urlsplit(url).hostname, "the server's address")
        except ValueError as error:
            raise CallError(str(error), "stop") from None


async def _bounded_body(response: httpx2.Response) -> tuple[bytes, str | None]:
    """Return the unpacked body and no problem, or nothing and what is wrong with it."""
    parts, size = [], 0
    # Parts of at most 1 MiB each, however much a packed one holds.
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_BYTES:
            return b"", f"an answer of more than {MAX_BYTES // 2**20} MiB"
        parts.append(part)
    body = b"".join(parts)
    return (b"", f"an answer that nests more than {MAX_DEPTH} deep") if nesting(body) > MAX_DEPTH else (body, None)


def nesting(body: bytes) -> int:
    """Return how deep the lists and objects of a JSON text nest; brackets inside its strings do not count."""
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    steps = (1 if bracket in b"[{" else -1 for bracket in outside if bracket in b"[]{}")
    return max(accumulate(steps, initial=0))


def failure_of_response(response: httpx2.Response, secret: str | None) -> CallError:
    """Return what a response with an error status means for the call."""
    status = response.status_code
    reason = f"HTTP {status}: {_excerpt(response, secret)}"
    may_be_paid = status in TIMED_OUT or (status >= 500 and status not in UNPAID)
    if status in FOR_ALL:
        return CallError(f"{reason}; {FOR_ALL[status]}", "stop", may_be_paid=may_be_paid)
    if status in AGAIN or status >= 500:
        after_s = retry_after_s(response.headers, time.time()) if status in (429, 503, 529) else None
        return CallError(
            reason,
            overloaded=status in OVERLOADED,
            retry_after_s=after_s,
            timed_out=status in TIMED_OUT,
            may_be_paid=may_be_paid,
        )
    return CallError(reason, "refused", may_be_paid=may_be_paid)


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or as a date; None without a usable one.

    A date is compared with the server's own clock if the response has it, else with `now`, in seconds since 1970.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value) if math.isfinite(float(value)) else None
    until, server_now = _timestamp(value), _timestamp(headers.get("date", ""))
    return None if until is None else max(0.0, until - (now if server_now is None else server_now))


def is_html(response: httpx2.Response) -> bool:
    """Return whether a body is a web page, such as a proxy, a login or a wrong path returns."""
    is_page = re.match(r"(?i)\s*<(!doctype|html|head|body)", response.text)
    return "html" in response.headers.get("content-type", "").lower() or is_page is not None


def _excerpt(response: httpx2.Response, secret: str | None) -> str:
    """Return a response for a message: the message of its error, the beginning of its text, or "an HTML page"."""
    if is_html(response):
        return "an HTML page"
    try:
        value = json_of(response, secret)
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


def _timestamp(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
