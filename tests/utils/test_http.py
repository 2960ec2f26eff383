"""Which addresses may be called, where secrets go, what bounds an answer, and what failures mean."""

import asyncio
import ipaddress
import json
import socket

import httpx2
import pytest

from onetrunk.judges.chat import ChatServer
from onetrunk.utils.calls import CallError
from onetrunk.utils.http import (
    MAX_DEPTH,
    check_address,
    check_host,
    check_url,
    failure_of_response,
    guarded_client,
    json_of,
    nesting,
    read_secret,
    retry_after_s,
    send,
    shown,
    uses_proxy,
)
from tests.judges.stub_server import StubServer


@pytest.mark.parametrize(
    "url",
    [
        "https://judge.example.com/v1",
        "https://judge.example.com:8443/v1/",
        "http://127.0.0.1:8000/v1",
        "http://[::1]:8000/v1",
        "http://localhost:8000",
        "http://10.1.2.3:8000/v1",
        "http://192.168.1.7/v1",
        "http://[fd12::1]:8000/v1",
        "https://8.8.8.8/v1",
    ],
)
def test_servers_by_https_anywhere_and_by_http_nearby_are_allowed(url):
    assert check_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/v1", "expected http"),
        ("file:///etc/passwd", "expected http"),
        ("host:8000/v1", "expected http"),
        ("https:///v1", "names no host"),
        ("https://host:99999999/v1", "no URL"),
        ("https://[::1/v1", "no URL"),
        ("https://host/v1 ", "no URL"),
        ("https://host/\nv1", "no URL"),
        ("https://good.example\\@evil.example/v1", "no URL"),
        ("https://host/v1?key=abc", r"after it"),
        ("https://host/v1#x", r"after it"),
        ("http://8.8.8.8/v1", "plain http"),
        ("http://169.254.169.254/latest", "credentials"),
        ("https://169.254.169.254", "credentials"),
        ("http://169.254.170.2/v2/credentials", "credentials"),
        ("http://[fd00:ec2::254]/", "credentials"),
        ("http://[fe80::1]/", "credentials"),
        ("http://[::ffff:169.254.169.254]/", "credentials"),
        ("http://[64:ff9b::a9fe:a9fe]/", "credentials"),
        ("http://2852039166/", "credentials"),
        ("http://0xa9fea9fe/", "credentials"),
        ("http://0251.0376.0251.0376/", "credentials"),
        ("http://metadata.google.internal/computeMetadata/v1/", "credentials"),
        ("http://METADATA.google.internal./", "credentials"),
        ("http://100.100.100.200/", "credentials"),
        ("http://168.63.129.16/", "credentials"),
        ("http://0.0.0.0:8000/v1", "127.0.0.1"),
    ],
)
def test_everything_else_is_refused_with_one_error_message(url, message):
    with pytest.raises(ValueError, match=message) as error:
        check_url(url)
    assert "the judge's address" in str(error.value) and "\n" not in str(error.value)


def test_a_password_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="api_key_env") as error:
        check_url("https://me:hunter2@host/v1")
    assert "hunter2" not in str(error.value)
    assert shown("https://me:hunter2@host/v1?token=hunter2") == "https://host/v1"


def test_plain_http_to_strangers_needs_a_word():
    assert check_url("http://8.8.8.8/v1", allow_http=True) == "http://8.8.8.8/v1"
    with pytest.raises(ValueError, match="credentials"):
        check_url("http://169.254.169.254/", allow_http=True)


def lookups(monkeypatch, *addresses):
    """Let every name have these addresses: what a hostile or mistaken DNS would say."""
    found = [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 443)) for a in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)


@pytest.mark.parametrize("address", ["169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254", "fe80::1%eth0"])
def test_a_name_that_leads_to_a_metadata_service_is_refused(monkeypatch, address):
    lookups(monkeypatch, "93.184.216.34", address)
    with pytest.raises(ValueError, match="credentials"):
        check_host("https://judge.example.com/v1")


def test_plain_http_is_judged_by_the_addresses_behind_a_name(monkeypatch):
    lookups(monkeypatch, "10.0.0.7")
    check_host("http://judge.cluster.local:8000/v1")
    lookups(monkeypatch, "10.0.0.7", "93.184.216.34")
    with pytest.raises(ValueError, match="plain http"):
        check_host("http://judge.cluster.local:8000/v1")
    check_host("https://judge.cluster.local:8000/v1")


def test_an_unknown_host_is_named(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="nowhere.invalid is unknown"):
        check_host("https://nowhere.invalid/v1")
    # Behind a proxy names are the proxy's business; this machine's own servers are not behind it.
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    check_host("https://nowhere.invalid/v1")
    assert uses_proxy("https://nowhere.invalid/v1") and not uses_proxy("https://127.0.0.1:8000/v1")


def test_a_secret_comes_from_a_variable_and_from_nowhere_else(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", " tok-123 ")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert read_secret(None) is None
    assert read_secret("JUDGE_KEY") == "tok-123"
    with pytest.raises(ValueError, match="NO_SUCH_KEY is not set"):
        read_secret("NO_SUCH_KEY")
    for key in ("sk-proj-abcdef", "hf_abcdefghijk", "tok.en"):
        with pytest.raises(ValueError, match="never the key itself") as error:
            read_secret(key)
        assert key not in str(error.value)
    monkeypatch.setenv("JUDGE_KEY", "two words")
    with pytest.raises(ValueError, match="spaces") as error:
        read_secret("JUDGE_KEY")
    assert "two words" not in str(error.value)


async def chat(url, model="judge-1", **settings):
    server = ChatServer(url, model, **settings)
    async with server.session(2) as client:
        return await server.reply(client, [{"role": "user", "content": "A or B?"}], max_tokens=4, seed=1)


def test_the_key_goes_to_the_server_and_into_no_error(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "tok-123")
    with StubServer(key="tok-123") as stub:
        assert asyncio.run(chat(stub.url, api_key_env="JUDGE_KEY")).text in ("A", "B")
    with StubServer(key="another") as stub:
        with pytest.raises(CallError, match="HTTP 401") as error:
            asyncio.run(chat(stub.url, api_key_env="JUDGE_KEY"))
        assert error.value.kind == "stop" and "tok-123" not in str(error.value)
    assert "tok-123" not in repr(vars(ChatServer("http://127.0.0.1:1/v1", "m", "JUDGE_KEY")))


def test_the_hub_token_of_whoever_is_logged_in_is_sent_to_no_server(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with StubServer() as stub:
        asyncio.run(chat(stub.url))
    assert all("authorization" not in headers for headers in stub.headers)
    assert all("hf_secret" not in value for headers in stub.headers for value in headers.values())


def test_a_redirect_is_not_followed_and_says_where_it_led():
    with StubServer() as elsewhere:
        with StubServer(fault="redirect", redirect_to=f"{elsewhere.url}/chat/completions?key=1") as stub:
            with pytest.raises(CallError, match=f"a redirect to {elsewhere.url}/chat/completions instead") as error:
                asyncio.run(chat(stub.url))
    assert elsewhere.headers == [] and "key=1" not in str(error.value)


def test_the_address_that_was_really_called_is_looked_at(monkeypatch):
    # The name may lead elsewhere by the time of the call; loopback stands for a metadata service here.
    monkeypatch.setattr("onetrunk.utils.http.METADATA_ADDRESSES", {ipaddress.ip_address("127.0.0.1")})
    with StubServer() as stub:
        with pytest.raises(CallError, match="credentials") as error:

            async def call():
                async with guarded_client(stub.url, None, 1) as client:
                    await send(client, "GET", f"{stub.url}/models", None)

            asyncio.run(call())
    assert error.value.kind == "stop"


def test_addresses_that_are_servers_pass():
    for text in ("127.0.0.1", "10.0.0.1", "8.8.8.8", "::1", "2001:4860:4860::8888"):
        check_address(ipaddress.ip_address(text), "host", "the address")


@pytest.mark.parametrize(
    ("value", "depth"),
    [
        (1, 0),
        ([], 1),
        ({"a": [[], {}]}, 3),
        ([[]] * 5, 2),
        (["[[[[", "\\", '"[', '\\"[{', "\\\\"], 1),
        ({"[{": "]}"}, 1),
    ],
)
def test_the_depth_is_that_of_lists_and_objects_outside_strings(value, depth):
    assert nesting(json.dumps(value).encode()) == depth


def test_a_text_that_is_cut_is_as_deep_as_it_got():
    assert nesting(b'[[[{"a[[[') == 4 and nesting(b"]]]]") == 0 and nesting(b"") == 0


def test_a_response_within_bounds_is_as_it_was():
    deep = {"scores": [1.0], "more": json.loads("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))}
    with StubServer(routes={"/rate": lambda body: (418, deep)}) as stub:

        async def post():
            async with guarded_client(stub.root, None, 1) as client:
                return await send(client, "POST", f"{stub.root}/rate", None, {})

        response = asyncio.run(post())
    assert (response.status_code, response.json()) == (418, deep)
    assert response.headers["content-type"] == "application/json" and "date" in response.headers
    assert response.request.method == "POST" and not response.is_success


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "120"}, 120.0),
        ({"retry-after": " 1.5 "}, 1.5),
        # The server's own clock counts, whatever ours says.
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 30.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT", "date": "Wed, 21 Oct 2015 07:29:00 GMT"}, 0.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:20:00 GMT"}, 200.0),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "9" * 400}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_as_seconds_and_as_a_date(headers, seconds):
    assert retry_after_s(httpx2.Headers(headers), now=1000.0) == seconds


def response(status, body="", content_type="application/json", **headers):
    request = httpx2.Request("POST", "http://127.0.0.1/v1/chat/completions")
    headers = {"content-type": content_type, **headers}
    return httpx2.Response(status, headers=headers, content=body.encode(), request=request)


@pytest.mark.parametrize(
    ("status", "kind", "overloaded"),
    [
        (429, "again", True),
        (500, "again", False),
        (502, "again", False),
        (503, "again", True),
        (529, "again", True),
        (599, "again", False),
        (400, "refused", False),
        (413, "refused", False),
        (422, "refused", False),
        (401, "stop", False),
        (404, "stop", False),
    ],
)
def test_each_status_is_for_again_for_this_question_or_for_all(status, kind, overloaded):
    error = failure_of_response(response(status), None)
    assert (error.kind, error.overloaded) == (kind, overloaded)


def test_a_key_is_removed_from_an_answer_however_it_is_spelled_and_nothing_else_is_changed(monkeypatch):
    monkeypatch.setenv("JUDGE_ACCESS", 'key-"9"-abc')
    secret = read_secret("JUDGE_ACCESS")
    body = r'{"token": ["A", {"key-\"9\"-abc": 0.1}], "x": ["Bearer k\u0065y-\u00229\"-abc, ?token=z\"", null]}'
    expected = {"token": ["A", {"<redacted JUDGE_ACCESS>": 0.1}]}
    expected["x"] = ['Bearer <redacted JUDGE_ACCESS>, ?token=<redacted query value>"', None]
    assert json_of(response(200, body), secret) == expected


def test_a_reason_is_one_short_line_without_the_secret():
    body = '{"error": {"message": "bad key\\n tok-123 in Bearer tok-123 and Bearer another-token"}}'
    assert str(failure_of_response(response(400, body), "tok-123")) == (
        "HTTP 400: bad key <redacted key> in Bearer <redacted key> and Bearer <redacted authorization>"
    )
    escaped = r'{"said": "\u0074oken-1234 and \u0074ok-123"}'
    assert str(failure_of_response(response(400, escaped), "tok-123")) == (
        'HTTP 400: {"said": "token-1234 and <redacted key>"}'
    )
    page = response(502, "<html>" + "x" * 5000, "text/html")
    assert str(failure_of_response(page, None)) == "HTTP 502: an HTML page"
    assert len(str(failure_of_response(response(500, "y" * 5000, "text/plain"), None))) < 250
