"""Chat templates, which come with a tokenizer and can raise anything: their errors become one message.

That a template ends at all is checked where its tokenizer is loaded (`models/trials.py`).
"""

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
        ValueError: the template failed; names the tokenizer.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **settings)
    except Exception as error:
        raise template_error(tokenizer, error) from error


@contextlib.contextmanager
def template_errors(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Translate the errors of chat templates inside a block where a library applies them."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TemplateError) or any(frame.filename == "<template>" for frame in frames):
            raise template_error(tokenizer, error) from error
        raise


def template_error(tokenizer: PreTrainedTokenizerBase, error: Exception) -> ValueError:
    """Return the error for a chat template that failed on some messages."""
    name = tokenizer.name_or_path or type(tokenizer).__name__
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ValueError(
        f"the chat template of {name} failed on a conversation ({reason:.400}); repair chat_template.jinja (in older"
        " folders chat_template in tokenizer_config.json), or change the rows to what it expects"
    )
