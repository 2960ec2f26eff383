"""What may not leave a run in text: secrets, and signs that act in a terminal, in Markdown or in an address.

All text that leaves a run (messages, logs, cards, reports) goes through `redact`. Secrets are the values of
environment variables whose names say so, values registered with `add_secret`, and text with the form of a known API
key, of credentials in a URL, or of an authorization header. The settings of transformers hold secrets too:
`SecretFreeArguments` shows none, and `without_secrets` removes them while settings are written.
"""

from __future__ import annotations

import contextlib
import functools
import html
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import TrainingArguments

SECRET_NAMES = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD")
# Shorter values (`1`, `none`) are ordinary words, which would be redacted everywhere.
LEAST_LENGTH = 8
# Keywords of huggingface_hub, transformers and API clients that hold a secret.
SECRET_KEYWORDS = frozenset("token auth_token use_auth_token hub_token push_to_hub_token hf_token api_key".split())

# How others repeat a secret with quotes, backslashes or other signs. All leave a plain key as it is.
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: repr(text)[1:-1],
    lambda text: quote(text, safe="", errors="surrogatepass"),
    lambda text: quote_plus(text, errors="surrogatepass"),
    html.escape,
)
# An error in Python's spelling, inside a JSON text, inside another one; certificates have thousands of signs.
DEEPEST_SPELLING, LONGEST_KEY = 3, 500

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
# The last group of each shape, and the name of its mark.
_SHAPE_NAMES = {"key": "key", "user": "password", "query": "query value", "header": "authorization"}

_added: dict[str, str] = {}


def add_secret(value: str | None, name: str) -> None:
    """Register a secret with `redact`.

    Args:
        value: the secret; None and values of less than LEAST_LENGTH characters are ignored.
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


def encodable(value: Any) -> str:
    """Return a value as text that UTF-8 can encode, whatever others put into it: half a surrogate pair becomes `?`."""
    try:
        text = str(value)
    except BaseException:  # An exception, or any object of a tool or an environment.
        text = f"a {type(value).__name__} without a text"
    return text.encode("utf-8", "replace").decode("utf-8")


def redact(text: str) -> str:
    """Return `text`, `encodable`, with each secret replaced by a mark such as `<redacted HF_TOKEN>`."""
    secrets = {value.strip(): name for name, value in os.environ.items() if is_secret_name(name)}
    named = tuple((value, name) for value, name in (_added | secrets).items() if len(value) >= LEAST_LENGTH)
    pattern, names = _pattern(named)
    clean = pattern.sub(lambda match: match[1] or _mark(names[match[0]]), encodable(text))
    clean = _SHAPES.sub(_mark_of_shape, clean)
    return text if clean == text else clean


def redact_all(value: Any) -> Any:
    """Return nested dicts, lists and tuples with all texts redacted, and the whole text of each secret keyword."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact_all(key): _redact_entry(key, entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(redact_all, value))
    return value


def _redact_entry(key: Any, value: Any) -> Any:
    is_secret = isinstance(key, str) and _is_secret(key.lower(), value) and value
    return _mark(key.lower()) if is_secret and not value.startswith("<") else redact_all(value)


@functools.lru_cache(maxsize=8)
def _pattern(named: tuple[tuple[str, str], ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern for marks (group 1), which stay, and for secrets; and the name of each text that it finds.

    A secret is found in every spelling that a program gives it, also in a JSON text that holds one.
    """
    names: dict[str, str] = {}
    for value, name in named:
        forms = {value}
        for _ in range(DEEPEST_SPELLING if len(value) <= LONGEST_KEY else 1):
            forms |= {spelling(form) for spelling in SPELLINGS for form in forms}
        names |= dict.fromkeys(forms, name)
    # The longest first, because a secret may begin with another one.
    longest_first = sorted(names, key=lambda value: (-len(value), value))
    return re.compile("|".join([r"(<redacted [^<>]*>)", *map(re.escape, longest_first)])), names


def _mark(name: str) -> str:
    return f"<redacted {name}>"


def _mark_of_shape(match: re.Match[str]) -> str:
    kept = match["scheme"] or match["query"] or match["header"] or ""
    return kept + _mark(_SHAPE_NAMES[match.lastgroup]) + ("@" if match["scheme"] else "")


class SecretFreeArguments:
    """Settings that show no secrets. List it before TrainingArguments among the bases, with `dataclass(repr=False)`.

    A secret in the settings (`hub_token`, a token in `model_init_kwargs`) is from then on redacted in all text that
    leaves the run.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        add_secrets_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values without secrets, for TensorBoard and other trackers."""
        return redact_all(super().to_dict())

    def __str__(self) -> str:
        return redact(super().__str__())

    __repr__ = __str__


def add_secrets_of(args: TrainingArguments) -> None:
    """Register the secrets in a run's settings, and the token of `hf auth login`, with `redact`."""
    add_stored_token()
    for name, value in vars(args).items():
        for key, entry in value.items() if isinstance(value, Mapping) else [(name, value)]:
            if _is_secret(key, entry):
                add_secret(entry, key)


@contextlib.contextmanager
def without_secrets(args: TrainingArguments) -> Iterator[None]:
    """Remove the secrets from a run's settings inside the block, while transformers pickles them into a file.

    Settings such as `hub_token` become None, keywords with a token are left out of dicts, and secrets inside other
    text are redacted.
    """
    add_secrets_of(args)
    settings = vars(args)
    original = dict(settings)
    for name, value in original.items():
        if name in SECRET_KEYWORDS and value:
            settings[name] = None
        elif isinstance(value, dict):
            settings[name] = redact_all({key: entry for key, entry in value.items() if not _is_secret(key, entry)})
        else:
            settings[name] = redact_all(value)
    try:
        yield
    finally:
        settings.update(original)


def _is_secret(key: Any, entry: Any) -> bool:
    return key in SECRET_KEYWORDS and isinstance(entry, str)


# A terminal acts on these; the last two ranges change the direction of the text behind them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def print_any_text() -> None:
    """Let stdout and stderr print each line at once, and what their encoding lacks (ASCII) as `\\xe9`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def printable(text: str) -> str:
    """Return a text for a terminal: control characters, all but newline and tab, are written out, such as \\x1b."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def shown(text: str) -> str:
    """Return a text without secrets and control characters, for a terminal."""
    return printable(redact(text))


def table_console() -> Console:
    """Return a console that prints texts in tables as they are: no markup, no emoji codes, no control characters."""
    from rich.console import Console

    class TableConsole(Console):
        def render_str(self, text: str, **settings: Any) -> Any:
            return super().render_str(printable(text), **{**settings, "markup": False, "emoji": False})

    return TableConsole()


def markdown_text(text: str) -> str:
    """Return a text as one line of Markdown, in which no link, picture, HTML or column of a table begins."""
    return re.sub(r"([\\\[\]|])", r"\\\1", " ".join(text.splitlines())).replace("<", "&lt;")


def address_of(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> str:
    """Return the address of a file for a page in `folder`: relative, and quoted, so that no name becomes a scheme."""
    return quote(os.fsencode(os.path.relpath(path, folder)))
