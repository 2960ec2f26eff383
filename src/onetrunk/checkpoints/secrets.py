"""Keeps secrets out of what is made of a run's settings: `training_args.bin`, TensorBoard, model cards, printed text.

transformers pickles its arguments unchanged, `hub_token` included, and prints every value whose name does not end in
`_token`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from onetrunk.utils.redaction import SECRET_KEYWORDS, add_secret, add_stored_token, redact, redact_all

if TYPE_CHECKING:
    from transformers import TrainingArguments


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
    """Remove the secrets from a run's settings inside the block, while they are written to a file.

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
