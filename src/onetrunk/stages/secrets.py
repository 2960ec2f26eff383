"""Secrets in a stage: rejected as settings, and redacted in log records, warnings and stack traces.

These are also printable: a server's message cannot act in a terminal.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from onetrunk.utils.escaping import printable
from onetrunk.utils.redaction import SECRET_KEYWORDS, add_stored_token, is_secret_name, redact


def secret_in_words(words: Sequence[str]) -> str | None:
    """Return why a command line is rejected: it holds a secret. None if it does not."""
    for word in words:
        name, _, value = word.partition("=")
        if is_secret_name(name) and name.isidentifier() and value:
            return (
                f"{name}=... is rejected: a command line is visible to all users of the machine; export {name} before"
            )
        name = name.removeprefix("--").replace("-", "_")
        if word.startswith("--") and (name in SECRET_KEYWORDS or name.endswith(("_api_key", "_password", "_secret"))):
            return f"--{name} is rejected: a command line is visible to all users of the machine; {_alternative(name)}"
    return None


def secret_in_setting(key: str, value: Any) -> str | None:
    """Return why a YAML entry or a JSON option is rejected, to be printed after its key; None if it is not."""
    if key == "env" and isinstance(value, Mapping):
        name = next((name for name, text in value.items() if is_secret_name(str(name)) and text), None)
        return name and f"sets {name}: recipes are shared; export {name} in the shell instead"
    if key in SECRET_KEYWORDS and isinstance(value, str) and value:
        return f"holds a secret, and recipes are shared; remove it and {_alternative(key)}"
    name = next(_secret_keywords(value), None) if key.endswith("_kwargs") else None
    return name and f"holds a secret in {name}; remove it and {_alternative(name)}"


def _alternative(name: str) -> str:
    if name.endswith("api_key"):
        return "put the key into an environment variable and name it in judge_api_key_env"
    return "set the environment variable HF_TOKEN, or run `hf auth login` once"


def _secret_keywords(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key in SECRET_KEYWORDS and isinstance(entry, str) and entry:
                yield key
            yield from _secret_keywords(entry)


@contextlib.contextmanager
def secrets_redacted() -> Iterator[None]:
    """Redact log records, warnings, and errors raised in a thread or a destructor, inside the block.

    Log records are redacted when they are made, not by a filter: libraries add handlers of their own at any time, and
    each would need the filter.
    """
    add_stored_token()
    make_record, format_warning = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        return _redacted_record(make_record(*args, **kwargs))

    def warning(*args: Any, **kwargs: Any) -> str:
        return _shown(format_warning(*args, **kwargs))

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            name = args.thread.name if args.thread is not None else "unknown"
            print(f"Exception in thread {name}:", file=sys.stderr)
            print_redacted(args.exc_type, args.exc_value, args.exc_traceback)

    def uncaught(args: sys.UnraisableHookArgs) -> None:
        # Raised by a `__del__`, for example: Python continues, and would print the message unredacted.
        print(f"{_shown(str(args.err_msg or 'Exception ignored in'))}: {type(args.object).__name__}", file=sys.stderr)
        print_redacted(args.exc_type, args.exc_value, args.exc_traceback)

    thread_hook, threading.excepthook = threading.excepthook, in_thread
    uncaught_hook, sys.unraisablehook = sys.unraisablehook, uncaught
    logging.setLogRecordFactory(record)
    warnings.formatwarning = warning
    try:
        yield
    finally:
        logging.setLogRecordFactory(make_record)
        warnings.formatwarning = format_warning
        threading.excepthook = thread_hook
        sys.unraisablehook = uncaught_hook


def _redacted_record(record: logging.LogRecord) -> logging.LogRecord:
    try:
        message = record.getMessage()
    except Exception:
        # The message does not fit its arguments; logging reports that itself and prints both.
        message, record.msg, record.args = "", _shown(f"{record.msg} {record.args}"), ()
    clean = _shown(message)
    if clean != message:
        record.msg, record.args = clean, ()
    if record.exc_info and record.exc_info[0] is not None:
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        clean = _shown(trace)
        if clean != trace:
            record.exc_info, record.exc_text = None, clean
    if record.stack_info:
        record.stack_info = _shown(record.stack_info)
    return record


def print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a stack trace to stderr as Python does, without secrets."""
    print(_shown("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def say(*lines: str) -> None:
    """Print lines to stderr, without secrets and control characters."""
    add_stored_token()
    print(_shown("\n".join(lines)), file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    return printable(redact(text))
