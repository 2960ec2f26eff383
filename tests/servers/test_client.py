"""Calls to one server: which addresses are called, where keys go, what bounds an answer, and what failures mean."""

import asyncio
import json
import tracemalloc
from urllib.parse import quote

import httpx2
import pytest

from onetrunk.servers.client import MAX_BYTES, Server, checked_url, read_secret, retry_after_s
from onetrunk.servers.errors import CallError
from tests.servers.stub import Stub

WHAT = "the judge's address"


def ask(url, path="/rate", body=None, method="POST", **settings):
    async def work():
        async with Server(url, WHAT, "server", **settings).connect() as connection:
            return await connection.ask(method, path, {} if body is None else body)

    return asyncio.run(work())


def answering(*answer):
    return Stub({"/rate": lambda _body: answer})


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/v1",
        "host:8000/v1",
        "https:///v1",
        "https://host:99999999/v1",
        "https://host/\nv1",
        "https://good.example\\@evil.example/v1",
        "https://host/v1?key=hunter2",
        "https://me:hunter2@host/v1",
    ],
)
def test_an_address_that_is_none_is_refused_with_one_message_that_repeats_no_password(url):
    with pytest.raises(ValueError, match="expected one such as https://host/v1") as error:
        checked_url(url, WHAT)
    assert WHAT in str(error.value) and "\n" not in str(error.value) and "hunter2" not in str(error.value)
    assert checked_url("https://host:8443/v1/", WHAT) == "https://host:8443/v1"


def test_a_secret_comes_from_a_variable_and_from_nowhere_else(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", " tok-123 ")
    assert read_secret(None) is None and read_secret("JUDGE_KEY") == "tok-123"
    with pytest.raises(ValueError, match="NO_SUCH_KEY is not set"):
        read_secret("NO_SUCH_KEY")
    for key in ("sk-proj-abcdef", "tok.en"):
        with pytest.raises(ValueError, match="never the key itself") as error:
            read_secret(key)
        assert key not in str(error.value)


def test_the_key_goes_to_the_server_and_into_no_error(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", "tok-123")
    with Stub({"/rate": lambda _body: (200, {"x": 1})}, key="tok-123") as stub:
        assert ask(stub.root, api_key_env="JUDGE_KEY") == {"x": 1}
        stub.key = "another"
        with pytest.raises(CallError, match="HTTP 401.*; check the key in the variable") as error:
            ask(stub.root, api_key_env="JUDGE_KEY")
    assert error.value.kind == "stop" and "tok-123" not in str(error.value)
    server = Server("http://judge.example.com", WHAT, "judge server", "JUDGE_KEY")
    assert "tok-123" not in repr(vars(server)) and "gets its key over plain http" in caplog.text


def test_a_redirect_is_not_followed_and_says_where_it_led():
    with answering(200, {}) as elsewhere:
        target = f"{elsewhere.root}/rate"
        with Stub({"/rate": None}, "redirect", redirect_to=f"{target}?key=1") as stub:
            with pytest.raises(CallError, match=f"a redirect to {target}; give that address, if you trust") as error:
                ask(stub.root)
    assert elsewhere.headers == [] and "key=1" not in str(error.value) and not error.value.may_be_paid


@pytest.mark.parametrize("fault", ["endless", "gzip_bomb"])
def test_an_answer_is_read_up_to_its_limit(fault):
    with Stub({"/rate": None}, fault) as stub:
        tracemalloc.start()
        with pytest.raises(CallError, match="an answer of more than 16 MiB"):
            ask(stub.root)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # What was read, what the stub sends, and a little more; 256 MiB and more were on their way.
    assert peak < 2 * MAX_BYTES + 2**24


@pytest.mark.parametrize(
    ("fault", "message", "may_be_paid"),
    [
        ("html_in_200", "an HTML page where JSON was expected; give the address of the API", True),
        ("truncated_json", "a body that is not complete JSON", True),
        ("cut_body", "the connection failed", True),
        ("reset", "the connection failed", True),
        ("500", "HTTP 500: CUDA error", False),
        ("502_html", "HTTP 502: an HTML page", True),
    ],
)
def test_a_failure_says_what_came_and_whether_it_may_be_paid(fault, message, may_be_paid):
    with Stub({"/rate": None}, fault) as stub, pytest.raises(CallError, match=message) as error:
        ask(stub.root)
    assert error.value.kind == "again" and error.value.may_be_paid == may_be_paid


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, "again"), (500, "again"), (503, "again"), (400, "refused"), (422, "refused"), (404, "stop")],
)
def test_each_status_is_for_again_for_this_question_or_for_all(status, kind):
    with answering(status, {"detail": "no"}) as stub, pytest.raises(CallError, match=f"HTTP {status}: no") as error:
        ask(stub.root)
    assert (error.value.kind, error.value.status) == (kind, status)


def test_retry_after_is_read_as_seconds():
    values = {" 1.5 ": 1.5, "30": 30.0, "-5": None, "9" * 400: None, "Thu, 01 Jan 1970 00:20:00 GMT": None}
    assert {value: retry_after_s(httpx2.Headers({"retry-after": value})) for value in values} == values
    assert retry_after_s(httpx2.Headers()) is None


def test_a_key_is_removed_from_an_answer_however_it_is_spelled_and_nothing_else_is_changed(monkeypatch):
    monkeypatch.setenv("JUDGE_ACCESS", 'key-"9"-abc')
    body = r'{"token": ["A", {"key-\"9\"-abc": 0.1}], "x": ["Bearer k\u0065y-\u00229\"-abc, ?token=z\"", null]}'
    expected = {"token": ["A", {"<redacted JUDGE_ACCESS>": 0.1}]}
    expected["x"] = ['Bearer <redacted JUDGE_ACCESS>, ?token=<redacted query value>"', None]
    with answering(200, body) as stub:
        assert ask(stub.root, api_key_env="JUDGE_ACCESS") == expected


def test_a_key_that_a_server_prints_as_python_or_quotes_in_an_address_is_removed_too(monkeypatch):
    key = """it's "9" \\abc/+"""
    monkeypatch.setenv("JUDGE_ACCESS", key)
    body = {"detail": repr({"authorization": key}), "at": quote(key, safe=""), "inner": json.dumps({"key": key})}
    with answering(200, body) as stub:
        answer = ask(stub.root, api_key_env="JUDGE_ACCESS")
    mark = "<redacted JUDGE_ACCESS>"
    assert answer == {"detail": f"{{'authorization': '{mark}'}}", "at": mark, "inner": f'{{"key": "{mark}"}}'}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            {"error": {"message": "bad key\n tok-123 in Bearer tok-123 and Bearer another-token"}},
            "bad key <redacted key> in Bearer <redacted key> and Bearer <redacted authorization>",
        ),
        (r'{"said": "\u0074oken-1234 and \u0074ok-123"}', '{"said": "token-1234 and <redacted key>"}'),
        ("y" * 5000, "y" * 200 + "..."),
    ],
)
def test_a_reason_is_one_short_line_without_the_secret(monkeypatch, body, reason):
    monkeypatch.setenv("JUDGE_KEY", "tok-123")
    with answering(400, body) as stub, pytest.raises(CallError) as error:
        ask(stub.root, api_key_env="JUDGE_KEY")
    assert str(error.value) == f"HTTP 400: {reason}"
