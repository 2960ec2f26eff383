"""Try in a process of its own what a file from elsewhere could make endless: regular expressions and chat templates.

Neither can be interrupted where it runs: both keep the interpreter inside C code. The child has limits of processor
time and memory that do not depend on how busy the machine is.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from peft import PeftConfig
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CPU_SECONDS, MEMORY_GIB = 2, 2
# Only where the child waits for something that never comes: far more than its processor time on a busy machine.
WAIT_SECONDS = 300
MOST_PATTERNS = 1000
# What can make matching branch: a name with dots has none of it.
_BRANCHING = re.compile(r"[*+?{(|\\]")

_LIMITS = """
import json, resource, sys
def limit(seconds, gib):
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1,) * 2)
    if sys.platform == "linux":
        pages = int(open("/proc/self/statm").read().split()[0])
        most = pages * resource.getpagesize() + gib * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
given = json.load(sys.stdin)
"""
_MATCH = f"""{_LIMITS}
import re
limit({CPU_SECONDS}, {MEMORY_GIB})
fault = None
for pattern in given["patterns"]:
    try:
        pattern = re.compile(pattern)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        fault = f"{{pattern!r:.200}} is no regular expression ({{error}})"
        break
    for name in given["names"]:
        pattern.match(name)
print(json.dumps(fault))
"""
_RENDER = f"""{_LIMITS}
from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template
limit({CPU_SECONDS}, {MEMORY_GIB})
fault = None
try:
    render_jinja_template([given["messages"]], add_generation_prompt=True, **given["settings"])
except (TemplateSyntaxError, RecursionError, OverflowError, MemoryError, SyntaxError) as error:
    fault = f"{{type(error).__name__}}: {{error}}"
except Exception:
    pass  # It may want other messages, or none from a user first; whoever gives them is told.
print(json.dumps(fault))
"""
_PROBE = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "?"},
]


def _tried(code: str, given: dict[str, Any]) -> str | None:
    """Return what the child found wrong; None for nothing.

    Raises:
        TimeoutError: it went beyond its limits.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(given), capture_output=True, text=True, timeout=WAIT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error
    if child.returncode < 0:
        raise TimeoutError
    try:
        return json.loads(child.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        logger.debug("a trial could not be made: %s", child.stderr[-1000:])
        return None


def check_patterns(config: PeftConfig, module_names: Sequence[str]) -> None:
    """Refuse an adapter config whose patterns are no regular expressions, or take too long on the names of a model.

    Args:
        config: of an adapter; its patterns are matched as PEFT does.
        module_names: of the model that the adapter is put on.

    Raises:
        ValueError: a clause that continues the file's name.
    """
    written = list(_patterns(config))
    if len(written) <= MOST_PATTERNS and not any(_BRANCHING.search(text) for text, _ in written):
        return
    try:
        fault = _tried(_MATCH, {"patterns": [pattern for _, pattern in written], "names": list(module_names)})
    except TimeoutError as error:
        raise ValueError(
            f"has patterns of module names (target_modules, rank_pattern, ...) that take more than {CPU_SECONDS} s to"
            " match"
        ) from error
    if fault:
        raise ValueError(f"has a pattern of module names that cannot be used: {fault}")


def _patterns(config: PeftConfig) -> Iterable[tuple[str, str]]:
    """Yield each text of a config that is read as a regular expression, and the expression that PEFT makes of it."""
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field, None)
        if isinstance(value, str) and value != "all-linear":
            yield value, rf"(?:{value})\Z"
    for field in ("rank_pattern", "alpha_pattern"):
        value = getattr(config, field, None)
        yield from ((key, rf"(.*\.)?({key})$") for key in (value if isinstance(value, dict) else {}))
    layers = getattr(config, "layers_pattern", None)
    for text in [layers] if isinstance(layers, str) else _texts(layers):
        yield text, rf"(?:^|.*?\.){text}\.(?P<idx>\d+)\."
    for text in _texts(getattr(config, "modules_to_save", None)):
        yield text, rf"(^|.*\.){text}($|\..*)"


def _texts(value: Any) -> Iterable[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, (list, set, tuple)) else []


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a chat template that is no template, or does not end on a short conversation.

    Raises:
        ValueError: a clause that continues "a chat template that".
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return
    if not isinstance(template, str):
        raise ValueError(f"is of type {type(template).__name__}, expected a text")
    tokens = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    fault = _template_fault(template, json.dumps(tokens))
    if fault:
        raise ValueError(fault)


@functools.lru_cache(maxsize=64)
def _template_fault(template: str, tokens: str) -> str | None:
    settings = {"chat_template": template, **json.loads(tokens)}
    try:
        fault = _tried(_RENDER, {"messages": _PROBE, "settings": settings})
    except TimeoutError:
        return f"takes more than {CPU_SECONDS} s or {MEMORY_GIB} GiB for a short conversation"
    return f"cannot run ({fault})" if fault else None
