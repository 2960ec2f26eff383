"""Which servers may be asked, with which secrets, by which HTTP client. Knows nothing of what is asked.

A URL from a recipe may be wrong or hostile: it could point at a cloud's metadata service, carry a password into logs,
or lead elsewhere by a redirect. Secrets come from environment variables alone and go to one server alone.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import socket
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

import httpx2
from huggingface_hub import get_async_session, set_async_client_factory

from onetrunk.judges.bounds import BoundedClient
from onetrunk.judges.retries import CallError
from onetrunk.redaction import add_secret

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Where clouds hand out credentials to whoever asks from inside. Link-local addresses are refused as a whole.
METADATA_NAMES = frozenset(
    ("metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal")
)
METADATA_ADDRESSES = frozenset(
    ipaddress.ip_address(text)
    # AWS, Google, Azure and others; AWS and Google by IPv6; Azure's host; Alibaba; Oracle.
    for text in ("169.254.169.254", "fd00:ec2::254", "fd20:ce::254", "168.63.129.16", "100.100.100.200", "192.0.0.192")
)
# IPv4 addresses in IPv6 clothes (RFC 6052).
NAT64 = ipaddress.ip_network("64:ff9b::/96")


def check_url(url: str, what: str = "the judge's address", allow_http: bool = False) -> str:
    """Return the URL of a server, without a slash at its end, after all checks that need no network.

    Args:
        url: http or https; http for this machine and private networks only.
        what: the setting that it comes from, for errors.
        allow_http: also for any other host, where whoever stands between reads along.

    Raises:
        ValueError: names the setting and what to change; a password in the URL is not repeated.
    """
    if not isinstance(url, str) or re.search(r"[\s\x00-\x1f\x7f\\]", url):
        raise ValueError(f"{what} is no URL: it holds a space, a backslash or a control character")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{what} is no URL ({error}); expected one such as https://host/v1") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"{what} holds a user name or password before '@'; put the key into an environment variable and give its"
            " name as api_key_env"
        )
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{what} is {shown(url)!r}; expected http:// or https://, such as https://host/v1")
    if not host:
        raise ValueError(f"{what} is {shown(url)!r}, which names no host; expected one such as https://host/v1")
    if parts.query or parts.fragment:
        raise ValueError(f"{what} is {shown(url)!r} with '?' or '#' after it; give the address alone")
    _refuse_host(host, what)
    address = _as_address(host)
    if address is not None:
        refuse_address(address, host, what)
    if parts.scheme == "http" and not allow_http and address is not None and not _is_near(address):
        raise ValueError(_plain_http(what, url))
    return url.rstrip("/")


def check_host(url: str, what: str = "the judge's address", allow_http: bool = False) -> None:
    """Look the host up and check the addresses behind its name, of which none may be a metadata service.

    Where a proxy stands between, it is the proxy that looks names up; a name that is unknown here is then let pass.

    Raises:
        ValueError: an address that is refused, or plain http to a host that is neither here nor private.
        RuntimeError: no such host.
    """
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if uses_proxy(url):
            return
        raise RuntimeError(
            f"{what} {shown(url)}: the host {parts.hostname} is unknown ({error}); check its name and the network"
        ) from None
    addresses = [ipaddress.ip_address(entry[4][0].partition("%")[0]) for entry in found]
    for address in addresses:
        refuse_address(address, parts.hostname, what)
    if parts.scheme == "http" and not allow_http and not all(_is_near(address) for address in addresses):
        raise ValueError(_plain_http(what, url))


def refuse_address(address: Address, host: str, what: str) -> None:
    """Raise ValueError for an address that is a metadata service, link-local, or nothing one can connect to."""
    address = _inner_address(address)
    if address in METADATA_ADDRESSES or address.is_link_local:
        raise ValueError(
            f"{what}: {host} is {address}, where clouds hand out credentials; name the host of a judge or reward model"
        )
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{what}: {host} is {address}, which is no server's address; for this machine: 127.0.0.1")


def uses_proxy(url: str) -> bool:
    """Say whether calls of this URL go through a proxy that the environment names; never those to near addresses."""
    parts = urlsplit(url)
    address = _as_address(parts.hostname or "")
    near = parts.hostname == "localhost" or (address is not None and _is_near(address))
    return not near and (parts.scheme in getproxies() or "all" in getproxies())


def shown(url: str) -> str:
    """Return a URL for a sentence: no user, no password, no query, which may hold secrets."""
    parts: SplitResult = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def read_secret(variable: str | None, what: str = "api_key_env") -> str | None:
    """Return the value of an environment variable; None where no variable is named.

    Raises:
        ValueError: what is named looks like a key itself, or is not set, or cannot go into a header.
    """
    if variable is None:
        return None
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", variable) or re.match(r"(sk|hf|gsk|xai)[-_]", variable):
        # Not repeated: it may be the key.
        raise ValueError(f"{what} is not the name of an environment variable; give the name, never the key itself")
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ValueError(f"{what}: the environment variable {variable} is not set; export it, or drop {what}")
    if not secret.isascii() or re.search(r"[\s\x00-\x1f\x7f]", secret):
        raise ValueError(f"{what}: the value of {variable} holds spaces or other characters that no key has")
    add_secret(secret, variable)
    return secret


def redact(text: str, secret: str | None) -> str:
    """Return `text` with every occurrence of the secret replaced, and of whatever else looks like a bearer token."""
    if secret:
        text = text.replace(secret, "[redacted]")
    return re.sub(r"(?i)(bearer\s+)\S+", r"\1[redacted]", text)


def guarded_client(url: str, secret: str | None, max_connections: int) -> httpx2.AsyncClient:
    """Return a client for one server: it follows no redirect, sends the secret or no credentials at all, and reads
    answers within bounds.

    Args:
        url: the server's, checked.
        secret: sent as a bearer token; None: an authorization that others have put there is taken away, such as the
            Hub token of whoever is logged in, which AsyncInferenceClient sends to any server.
        max_connections: open at once.
    """
    origin = httpx2.URL(url)

    async def before(request: httpx2.Request) -> None:
        if (request.url.scheme, request.url.host, request.url.port) != (origin.scheme, origin.host, origin.port):
            raise CallError(f"a call meant for {origin.host} was about to go to {request.url.host}", "stop")
        request.headers.pop("authorization", None)
        if secret is not None:
            request.headers["authorization"] = f"Bearer {secret}"

    async def after(response: httpx2.Response) -> None:
        # The name was looked up before the run; whoever owns it may have pointed it elsewhere since.
        stream = response.extensions.get("network_stream")
        peer = None if stream is None else stream.get_extra_info("server_addr")
        if isinstance(peer, tuple):
            try:
                refuse_address(ipaddress.ip_address(peer[0].partition("%")[0]), origin.host, "the server's address")
            except ValueError as error:
                raise CallError(str(error), "stop") from None
        if response.is_redirect:
            raise CallError(f"a redirect to {_target(response)} instead of an answer")

    return BoundedClient(
        event_hooks={"request": [before], "response": [after]},
        follow_redirects=False,
        trust_env=uses_proxy(url),
        verify=_ssl_context(),
        timeout=None,
        limits=httpx2.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
    )


# Reading the certificates takes longer than everything else about a client.
_ssl_context = functools.cache(httpx2.create_ssl_context)
_OWN_CLIENT: ContextVar[Callable[[], httpx2.AsyncClient] | None] = ContextVar("onetrunk_http_client", default=None)
_FACTORY: list[Callable[[], httpx2.AsyncClient]] = []


def use_client(make: Callable[[], httpx2.AsyncClient]) -> None:
    """Let the AsyncInferenceClients of this context (an asyncio task and what it starts) take their HTTP client here.

    huggingface_hub has one factory for the process and none for a client. Others go on getting what they got before.
    """
    if not _FACTORY:
        # The hub tells no one its factory, but shows what it makes.
        sample = get_async_session()
        settings: dict[str, Any] = {"event_hooks": sample.event_hooks, "follow_redirects": sample.follow_redirects}

        def factory() -> httpx2.AsyncClient:
            own = _OWN_CLIENT.get()
            return own() if own is not None else httpx2.AsyncClient(timeout=sample.timeout, **settings)

        _FACTORY.append(factory)
    set_async_client_factory(_FACTORY[0])
    _OWN_CLIENT.set(make)


def _target(response: httpx2.Response) -> str:
    try:
        return shown(str(response.request.url.join(response.headers.get("location", ""))))
    except (httpx2.InvalidURL, ValueError):
        return "nowhere"


def _refuse_host(host: str, what: str) -> None:
    if host.rstrip(".").lower() in METADATA_NAMES:
        raise ValueError(
            f"{what}: {host} is where clouds hand out credentials; name the host of a judge or reward model"
        )


def _as_address(host: str) -> Address | None:
    """Return the address that a host is without looking it up, in the short and hexadecimal forms of IPv4 too."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host.rstrip(".")))
    except (OSError, ValueError):
        return None


def _inner_address(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_near(address: Address) -> bool:
    """Say whether an address is this machine's or a private network's; those of shared carriers (RFC 6598) are not."""
    address = _inner_address(address)
    return address.is_loopback or address.is_private


def _plain_http(what: str, url: str) -> str:
    return (
        f"{what} {shown(url)} is plain http to a host that is neither this machine nor in a private network, where"
        " others can read prompts and keys; use https"
    )
