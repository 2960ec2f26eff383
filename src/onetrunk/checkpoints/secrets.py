"""Settings of a run leave it without their secrets: in `training_args.bin`, TensorBoard, and wherever they are shown.

transformers pickles its arguments as they are, `hub_token` included, and shows in full what does not end in `_token`.
Knows arguments; trains nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from onetrunk.utils.redaction import SECRET_KEYWORDS, add_secret, add_stored_token, redact, redact_all


class SecretFreeArguments:
    """The part of a settings class that shows no secret; it stands before TrainingArguments, with `repr=False`.

    A secret among the settings (`hub_token`, a token in `model_init_kwargs`) is redacted from then on wherever text
    leaves the run.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        add_secrets_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as values of JSON, without secrets; TensorBoard and other trackers are given this."""
        return redact_all(super().to_dict())

    def __str__(self) -> str:
        return redact(super().__str__())

    __repr__ = __str__


def add_secrets_of(args: Any) -> None:
    """Let `redact` know the secrets that stand in the settings of a run, and the token of `hf auth login`."""
    add_stored_token()
    for name, value in vars(args).items():
        entries = value.items() if isinstance(value, Mapping) else [(name, value)]
        for key, entry in entries:
            if key in SECRET_KEYWORDS and isinstance(entry, str):
                add_secret(entry, key)


@contextlib.contextmanager
def without_secrets(args: Any) -> Iterator[None]:
    """Take the secrets out of the settings of a run while they are written; put them back behind the block.

    `hub_token` and its like become None, keywords that hold a token go, and in other texts a mark stands where a
    secret was. What holds no secret is not touched.

    Args:
        args: TrainingArguments, of any kind.
    """
    add_secrets_of(args)
    settings = vars(args)
    before = dict(settings)
    for name, value in before.items():
        settings[name] = None if name in SECRET_KEYWORDS and value else redact_all(_without_keywords(value))
    try:
        yield
    finally:
        settings.update(before)


def _without_keywords(value: Any) -> Any:
    if not isinstance(value, dict) or not any(_is_secret(key, entry) for key, entry in value.items()):
        return value
    return {key: entry for key, entry in value.items() if not _is_secret(key, entry)}


def _is_secret(key: Any, entry: Any) -> bool:
    return key in SECRET_KEYWORDS and isinstance(entry, str)
