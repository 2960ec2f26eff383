"""Removes secrets from text. All text that leaves a run (messages, logs, cards, reports) goes through `redact`.

Secrets are the values of environment variables whose names say so, values registered with `add_secret`, and text with
the form of a known API key, of credentials in a URL, or of an authorization header.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

SECRET_NAMES = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD")
# Shorter values (`1`, `none`) are ordinary words, which would be redacted everywhere.
LEAST_LENGTH = 8
# Keywords of huggingface_hub, transformers and API clients that hold a secret.
SECRET_KEYWORDS = frozenset("token auth_token use_auth_token hub_token push_to_hub_token hf_token api_key".split())

_QUERY_NAMES = (
    "token|access_token|auth_token|refresh_token|api[_-]?key|password|passwd|secret|client_secret|sig|signature|"
    "x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|x-goog-credential"
)
# A group holds what is kept before a secret. No character class contains '<', with which a mark begins. No match ends
# in a backslash, which in JSON belongs to the sign behind it.
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9_])(?P<key>"
    r"hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|(?:gsk_|xai-|glpat-|xox[abprs]-)[A-Za-z0-9_-]{20,}|AIza[A-Za-z0-9_-]{35}"
    # A digit is required, because "sk-learn-compatible-estimators" is not a key.
    r"|(?:sk|pk|rk)-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
    # An address that was treated as a path has one slash instead of two.
    r"|(?P<scheme>:/{1,2})(?P<user>[^\s/?#@:<>\"'`]*):[^\s/?#<>]+@"
    r"|(?P<query>[?&;#](?i:" + _QUERY_NAMES + r")=)[^\s&;#\"'`<>\\]+"
    r"|(?P<header>Bearer\s+|(?i:authorization)\W{1,6}(?i:basic|bearer|token)\s+)[A-Za-z0-9._~+/=-]{8,}"
)
# A stack trace of an exception group indents every line, also those of a key.
_INDENTED = r"\n[ |]*"
# The last group of each shape, and the name of its mark.
_SHAPE_NAMES = {"key": "key", "user": "password", "query": "query value", "header": "authorization"}

_added: dict[str, str] = {}


def add_secret(value: str | None, name: str) -> None:
    """Register a secret with `redact`.

    Args:
        value: the secret; None and values of less than LEAST_LENGTH characters are ignored.
        name: for the mark that replaces it.
    """
    if value and len(value.strip()) >= LEAST_LENGTH:
        _added[value.strip()] = re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def add_stored_token() -> None:
    """Register the token that `hf auth login` stored."""
    # Imported here, so that the command line reports its own errors without loading it.
    from huggingface_hub import get_token

    add_secret(get_token(), "HF_TOKEN")


def is_secret_name(name: str) -> bool:
    """Return whether an environment variable of this name holds a secret."""
    return name.upper().endswith(SECRET_NAMES)


def redact(text: str) -> str:
    """Return `text` with each secret replaced by a mark such as `<redacted HF_TOKEN>`.

    Secrets are also found in the forms that JSON, URLs and base64 give them. Redacting twice changes nothing more.
    """
    secrets = {value.strip(): name for name, value in os.environ.items() if is_secret_name(name)}
    known = tuple(sorted((_added | secrets).items()))
    marks, values, names = _patterns(known)
    before = None
    while before != text:
        before = text
        for pattern, mark in ((values, lambda match: _mark(names[_flush(match[0])])), (_SHAPES, _mark_of_shape)):
            text = _between(marks, text, pattern, mark)
    return text


def redact_all(value: Any) -> Any:
    """Return nested dicts, lists and tuples with all texts redacted, and the whole text of each secret keyword.

    A value without secrets is returned as the same object.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        pairs = [(redact_all(key), _clean_entry(key, entry)) for key, entry in value.items()]
        is_same = all(k is key and e is entry for (k, e), (key, entry) in zip(pairs, value.items(), strict=True))
        return value if is_same else dict(pairs)
    if type(value) in (list, tuple):
        items = [redact_all(entry) for entry in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value


def _clean_entry(key: Any, value: Any) -> Any:
    is_secret = isinstance(key, str) and key.lower() in SECRET_KEYWORDS and isinstance(value, str) and value
    return _mark(key.lower()) if is_secret and not value.startswith("<") else redact_all(value)


def _mark(name: str) -> str:
    return f"<redacted {name}>"


def _mark_of_shape(match: re.Match[str]) -> str:
    kept = match["scheme"] or match["query"] or match["header"] or ""
    return kept + _mark(_SHAPE_NAMES[match.lastgroup]) + ("@" if match["scheme"] else "")


def _between(marks: re.Pattern[str], text: str, pattern: re.Pattern[str], mark: Callable[..., str]) -> str:
    """Substitute only in the text between existing marks, so that no mark is changed or taken for a secret."""
    if not pattern.search(text):
        return text
    parts = marks.split(text)  # The marks have odd indices.
    return "".join(part if i % 2 else pattern.sub(mark, part) for i, part in enumerate(parts))


@functools.lru_cache(maxsize=8)
def _patterns(known: tuple[tuple[str, str], ...]) -> tuple[re.Pattern[str], re.Pattern[str], dict[str, str]]:
    """Return a pattern for marks, a pattern for secrets, and the name of each form of a secret."""
    names: dict[str, str] = {}
    for value, name in known:
        if len(value) >= LEAST_LENGTH:
            names |= dict.fromkeys({form for written in _forms(value) for form in (written, _flush(written))}, name)
    # The longest first, because a secret may begin with another one.
    forms = sorted((f for f in names if len(f) >= LEAST_LENGTH), key=lambda form: (-len(form), form))
    # `re.escape` turns a newline into a backslash and a newline.
    values = "|".join(re.escape(form).replace("\\\n", _INDENTED) for form in forms) or r"(?!)"
    in_marks = "|".join(map(re.escape, sorted({*names.values(), *_SHAPE_NAMES.values(), *SECRET_KEYWORDS})))
    return re.compile(f"(<redacted (?:{in_marks})>)"), re.compile(values), names


def _flush(text: str) -> str:
    """Return a text without the indentation of all lines but the first."""
    return re.sub(_INDENTED, "\n", text)


def _forms(value: str) -> set[str]:
    """Return the forms of a secret in plain text, JSON, a Python literal, a URL and base64."""
    as_json = {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    data = value.encode("utf-8", "surrogateescape")
    encoded = {coder(data).decode().rstrip("=") for coder in (base64.b64encode, base64.urlsafe_b64encode)}
    return {value, quote(data, safe=""), quote(data), *as_json, *encoded}
