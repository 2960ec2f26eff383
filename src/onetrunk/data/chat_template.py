"""Applies chat templates, and turns whatever they raise into one error that names the tokenizer."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


def apply_chat_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], **settings: Any) -> Any:
    """Return `tokenizer.apply_chat_template(messages, **settings)`.

    Raises:
        ValueError: the template failed; the message names the tokenizer.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **settings)
    except Exception as error:
        raise _template_error(tokenizer, error) from error


@contextlib.contextmanager
def template_errors(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Turn template errors into that ValueError inside a block in which a library applies the template."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TemplateError) or any(frame.filename == "<template>" for frame in frames):
            raise _template_error(tokenizer, error) from error
        raise


def _template_error(tokenizer: PreTrainedTokenizerBase, error: Exception) -> ValueError:
    name = tokenizer.name_or_path or type(tokenizer).__name__
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ValueError(
        f"the chat template of {name} failed on a conversation ({reason:.400}); repair chat_template.jinja (in older"
        " folders chat_template in tokenizer_config.json), or change the rows to what it expects"
    )
