"""No secret survives in a text, a text without one stays as it is, and text of others acts nowhere."""

import html
import json
import os
from unittest import mock
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.table import Table

from onetrunk.utils.redaction import (
    LEAST_LENGTH,
    add_secret,
    address_of,
    is_secret_name,
    markdown_text,
    printable,
    redact,
    redact_all,
    table_console,
)

# '<' and '>' delimit a mark; beside one a secret with them could seem to begin in it.
CHARACTERS = st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters="<>", exclude_categories=("Cc",))
SECRET = st.text(CHARACTERS, min_size=LEAST_LENGTH, max_size=30).filter(
    lambda s: s == s.strip() and s not in "<redacted authorization>"
)
NAME = st.sampled_from(["HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "JUDGE_SECRET"])
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


def environment(secrets):
    """Return a context in which the environment holds these secrets and no other."""
    kept = {name: value for name, value in os.environ.items() if not is_secret_name(name)}
    return mock.patch.dict(os.environ, kept | secrets, clear=True)


@given(secrets=st.dictionaries(NAME, SECRET, min_size=1), parts=st.lists(TEXT, min_size=2, max_size=5), data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_secret_survives_and_twice_is_as_once(secrets, parts, data):
    chosen = [data.draw(st.sampled_from(sorted(secrets.values()))) for _ in parts]
    text = "".join(part + secret for part, secret in zip(parts, chosen, strict=True))
    with environment(secrets):
        clean = redact(text)
        outside = clean
        for name in sorted(secrets):
            outside = outside.replace(f"<redacted {name}>", "\0")
        assert not any(secret in outside for secret in secrets.values())
        assert redact(clean) == clean


@given(text=TEXT, secret=SECRET)
@settings(max_examples=200, deadline=None)
def test_a_text_without_a_secret_is_unchanged(text, secret):
    assume(secret not in text and "://" not in text and "=" not in text)
    with environment({"HF_TOKEN": secret}):
        assert redact(text) == text


SHAPES = {
    "hf_AbCdEfGhIjKlMnOpQrStUvWx": "<redacted key>",
    "key sk-proj-abcdefghij1234567890 wrong": "key <redacted key> wrong",
    "AKIAIOSFODNN7EXAMPLE": "<redacted key>",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789": "<redacted key>",
    "Authorization: Bearer abc.def-ghi_jkl": "Authorization: Bearer <redacted authorization>",
    "authorization: Basic dXNlcjpwYXNz": "authorization: Basic <redacted authorization>",
    "https://anna:pass@word@host/v1": "https://<redacted password>@host/v1",
    "postgres://anna:geheim@db:5432/x": "postgres://<redacted password>@db:5432/x",
    "no folder https:/anna:geheim@db/x": "no folder https:/<redacted password>@db/x",
    "s3://b/k?X-Amz-Signature=0123&x=1": "s3://b/k?X-Amz-Signature=<redacted query value>&x=1",
    "http://h/?a=1&token=abc;api_key=d": "http://h/?a=1&token=<redacted query value>;api_key=<redacted query value>",
}


@pytest.mark.parametrize("text", SHAPES)
def test_a_known_shape_is_redacted_and_what_stands_around_it_stays(text):
    with environment({}):
        assert redact(text) == SHAPES[text]
        assert redact(SHAPES[text]) == SHAPES[text]


@pytest.mark.parametrize(
    "text",
    [
        "risk-adjusted-return-on-capital-employed of sk-learn-compatible-estimators",
        "hf_transfer, hf_hub_download, HF_TOKEN is not set",
        "http://127.0.0.1:8000/classify#model=m&tokenizer=runs/reward&api_key_env=SCORES_KEY",
        "http://localhost:8000/v1 and me@example.com, git@github.com:owner/name.git",
        "Bearer of news; a bearer instrument; basic internationalization",
        "tokens=12, token_accuracy=0.5, eos_token=</s>",
        "<redacted HF_TOKEN>",
        "",
    ],
)
def test_what_only_resembles_a_secret_stays(text):
    with environment({"HF_TOKEN": "canary-canary"}):
        assert redact(text) == text


def test_a_change_of_the_environment_counts_at_once_and_a_newline_at_its_end_does_not():
    with environment({"MY_API_KEY": "first-secret\n"}):
        assert redact("first-secret second-secret") == "<redacted MY_API_KEY> second-secret"
    with environment({"MY_API_KEY": "second-secret"}):
        assert redact("first-secret second-secret") == "first-secret <redacted MY_API_KEY>"


def test_a_registered_value_is_redacted_whatever_its_name():
    add_secret("registered-value-3417", "the judge's key")
    add_secret("short", "x")
    add_secret(None, "x")
    assert redact("registered-value-3417 short") == "<redacted the_judge_s_key> short"


ODD_KEY = """it's "a\\key"/with=é+%"""
SPELLED = {
    "JSON": json.dumps(ODD_KEY),
    "JSON in UTF-8": json.dumps(ODD_KEY, ensure_ascii=False),
    "Python": repr(ODD_KEY),
    "Python in JSON in JSON": json.dumps(json.dumps(f"{ {'key': ODD_KEY} }")),
    "an address": f"https://host/v1?q={quote(ODD_KEY, safe='')}",
    "a form": quote_plus(ODD_KEY),
    "HTML": html.escape(ODD_KEY),
}


@pytest.mark.parametrize("text", SPELLED.values(), ids=SPELLED)
def test_a_secret_with_quotes_is_redacted_in_every_spelling(text):
    with environment({"JUDGE_KEY": ODD_KEY}):
        clean = redact(f"before {text} after")
    assert clean.startswith("before ") and clean.endswith(" after") and "<redacted JUDGE_KEY>" in clean
    assert "key" not in clean.replace("'key'", "").replace("<redacted JUDGE_KEY>", "")


def test_nested_values_are_redacted_and_others_stay():
    with environment({"HF_TOKEN": "canary-canary"}):
        settings_of_run = {"a": ["x canary-canary"], "token": "whatever it is", "b": {"token": True, "n": 1}}
        clean = {"a": ["x <redacted HF_TOKEN>"], "token": "<redacted token>", "b": {"token": True, "n": 1}}
        assert redact_all(settings_of_run) == clean == redact_all(clean)
        plain = {"a": [1, "x"], "b": ({"c": None},), "token": None}
        assert redact_all(plain) == plain


TITLE_OF_THE_WINDOW = "\x1b]0;mine\x07"
HOSTILE = [
    "![picture](https://host/p.png)",
    "[link](https://host)",
    "[link][1]",
    "[1]: https://host",
    r"\[link](https://host)",
    r"\\[link](https://host)",
    "<img src=https://host/p.png>",
    "<javascript:alert(1)>",
    "<script>",
    "a | b\\| c \\",
    "a\n\n# b\r\n- [c](d)",
    "``` `[a](b)",
]


def kinds(text):
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return [token.type for token in tokens] + [child.type for token in tokens for child in token.children or ()]


def test_control_characters_are_written_out_and_lines_and_letters_stay():
    assert printable(f"{TITLE_OF_THE_WINDOW}a\rb\x9b\u202e") == r"\x1b]0;mine\x07a\rb\x9b\u202e"
    assert printable("Straße\n\t日本 🙂 [red]") == "Straße\n\t日本 🙂 [red]"


def test_a_table_shows_texts_as_they_are(capsys):
    table = Table("name [bold]", title="[red]title")
    table.add_row(r"\[red]x[/] :warning: [/none]")
    table.add_row(TITLE_OF_THE_WINDOW)
    table_console().print(table)
    shown = capsys.readouterr().out
    assert r"\[red]x[/] :warning: [/none]" in shown and r"\x1b]0;mine\x07" in shown and "\x1b" not in shown
    assert "[red]title" in shown and "name [bold]" in shown


@pytest.mark.parametrize("text", HOSTILE)
def test_no_link_picture_html_or_column_begins_in_a_text(text):
    escaped = markdown_text(text)
    allowed = {"paragraph_open", "paragraph_close", "inline", "text", "text_special", "code_inline"}
    assert set(kinds(f"It says {escaped}")) <= allowed
    row = kinds(f"| a | b |\n|---|---|\n| {escaped} | last |")
    assert row.count("td_open") == 2 and not {"link_open", "image", "html_inline"} & set(row)


def test_the_address_of_a_file_is_relative_and_no_scheme(tmp_path):
    assert address_of(tmp_path / "javascript:a(1)" / "a b", tmp_path) == "javascript%3Aa%281%29/a%20b"
    assert address_of(tmp_path / "a.html", tmp_path / "b") == "../a.html"
