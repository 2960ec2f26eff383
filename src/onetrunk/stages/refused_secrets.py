"""Secrets are refused as settings: a command line is seen by every user of a machine, and a recipe is passed on.

Knows options and YAML values before they are parsed; never repeats a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onetrunk.redaction import SECRET_KEYWORDS, is_secret_name

INSTEAD = "set the environment variable HF_TOKEN, or run `hf auth login` once"


def refused_words(words: Sequence[str]) -> str | None:
    """Return why a command line is refused, None if no option on it is a secret."""
    for word in words:
        name, _, value = word.partition("=")
        if is_secret_name(name) and name.isidentifier() and value:
            return (
                f"{name}=... is refused: a command line is visible to all users of the machine; export {name} before"
            )
        name = name.removeprefix("--").replace("-", "_")
        if word.startswith("--") and (name in SECRET_KEYWORDS or name.endswith(("_api_key", "_password", "_secret"))):
            return f"--{name} is refused: a command line is visible to all users of the machine; {_instead(name)}"
    return None


def refused_setting(key: str, value: Any) -> str | None:
    """Return why a YAML entry, or an option read as JSON, is refused, as the end of a sentence; None if it is not.

    Args:
        key: of the entry.
        value: as YAML has read it.
    """
    if key == "env" and isinstance(value, Mapping):
        named = next((name for name, text in value.items() if is_secret_name(str(name)) and text), None)
        return named and f"sets {named}: a recipe is passed on; export {named} in the shell instead"
    if key in SECRET_KEYWORDS and isinstance(value, str) and value:
        return f"holds a secret: a recipe is passed on; remove it and {_instead(key)}"
    named = next(_secret_keywords(value), None) if key.endswith("_kwargs") else None
    return named and f"holds a secret in {named}; remove it and {_instead(named)}"


def _instead(name: str) -> str:
    if name.endswith("api_key"):
        return "put the key into an environment variable and name it in judge_api_key_env"
    return INSTEAD


def _secret_keywords(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key in SECRET_KEYWORDS and isinstance(entry, str) and entry:
                yield key
            yield from _secret_keywords(entry)
