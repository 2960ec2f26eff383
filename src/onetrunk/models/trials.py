"""Try in a child process what a file from elsewhere could make endless: regular expressions and chat templates.

Neither can be interrupted in this process: both keep the interpreter inside C code. The child's limits of processor
time and memory do not depend on how busy the machine is.
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
# What can make matching branch; a name with dots contains none of it.
_BRANCHING = re.compile(r"[*+?{(|\\]")

# Reads a job, imports what it needs, sets its own limits, and prints the fault that it found as JSON.
_CHILD = f"""
import json, re, resource, sys
job = json.load(sys.stdin)
if "messages" in job:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template
used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (int(used + {CPU_SECONDS}) + 1,) * 2)
if sys.platform == "linux":
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {MEMORY_GIB} * 2**30,) * 2)
fault = None
if "messages" in job:
    try:
        render_jinja_template([job["messages"]], add_generation_prompt=True, **job["settings"])
    except (TemplateSyntaxError, RecursionError, OverflowError, MemoryError, SyntaxError) as error:
        fault = f"{{type(error).__name__}}: {{error}}"
    except Exception:
        pass  # The template may want other messages; the caller who renders those sees its error.
for pattern in job.get("patterns", []):
    try:
        pattern = re.compile(pattern)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        fault = f"{{pattern!r:.200}} is no regular expression ({{error}})"
        break
    for name in job["names"]:
        pattern.match(name)
print(json.dumps(fault))
"""
_PROBE = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "?"},
]


def _fault(job: dict[str, Any]) -> str | None:
    """Return the fault that the child found, or None; raise TimeoutError if it went beyond its limits."""
    child = subprocess.run([sys.executable, "-c", _CHILD], input=json.dumps(job), capture_output=True, text=True)
    if child.returncode < 0:
        raise TimeoutError
    try:
        return json.loads(child.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        logger.debug("the child that tries patterns and templates failed: %s", child.stderr[-1000:])
        return None


def check_patterns(config: PeftConfig, module_names: Sequence[str]) -> None:
    """Raise a ValueError if a pattern of an adapter is no regular expression, or matches module names for too long."""
    patterns = list(_patterns(config))
    if not any(_BRANCHING.search(text) for text, _ in patterns):
        return
    what = "patterns of module names (target_modules, rank_pattern, ...)"
    try:
        fault = _fault({"patterns": [pattern for _, pattern in patterns], "names": list(module_names)})
    except TimeoutError as error:
        raise ValueError(f"its {what} take more than {CPU_SECONDS} s to match") from error
    if fault:
        raise ValueError(f"one of its {what} cannot be used: {fault}")


def _patterns(config: PeftConfig) -> Iterable[tuple[str, str]]:
    """Yield each text of a config that PEFT reads as a regular expression, and the expression that it makes of it."""
    # PEFT's fields; whether the text, the entries of a list or the keys of a dict are patterns; and the expression.
    table = [
        ("target_modules", str, r"(?:{})\Z"),
        ("exclude_modules", str, r"(?:{})\Z"),
        ("rank_pattern", dict, r"(.*\.)?({})$"),
        ("alpha_pattern", dict, r"(.*\.)?({})$"),
        ("layers_pattern", (str, list, set, tuple), r"(?:^|.*?\.){}\.(?P<idx>\d+)\."),
        ("modules_to_save", (list, set, tuple), r"(^|.*\.){}($|\..*)"),
    ]
    for field, kinds, expression in table:
        value = getattr(config, field, None)
        if isinstance(value, kinds) and value != "all-linear":
            for text in [value] if isinstance(value, str) else value:
                if isinstance(text, str):
                    yield text, expression.replace("{}", text)


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError if the chat template is no template, or does not end on a short conversation."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        return
    if not isinstance(template, str):
        raise ValueError(f"its chat template is of type {type(template).__name__}, expected a text")
    tokens = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    fault = _template_fault(template, json.dumps(tokens))
    if fault:
        raise ValueError(f"its chat template {fault}")


# A run loads the same tokenizer several times.
@functools.lru_cache(maxsize=64)
def _template_fault(template: str, tokens: str) -> str | None:
    try:
        fault = _fault({"messages": _PROBE, "settings": {"chat_template": template, **json.loads(tokens)}})
    except TimeoutError:
        return f"takes more than {CPU_SECONDS} s or {MEMORY_GIB} GiB for a short conversation"
    return f"cannot run ({fault})" if fault else None
