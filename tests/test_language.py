"""Words that we do not write: in documents (without the changelog), and in all text of src, scripts and recipes."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable

from tests.stages.recipes import DOCUMENTS, ROOT

SOURCES = sorted(path for folder in ("src", "scripts", "recipes") for path in (ROOT / folder).rglob("*.py"))
# What we do not write, as a regular expression -> what we write.
WORDS = {
    r"(go|goes|went|going) on|way on": "continue, resume",
    r"(come|comes|came) back": "return, resume, restore",
    r"(?<!there )is no(?! longer)": "is not a",
    r"(is|are|was|were) (made|taken) (again|out)": "repeat, retry, delete",
    r"proofs?|proves?|proved": "check",
    r"so many": "the number itself: the first n, this many",
    r"beside": "next to",
    r"likewise|alike": "also, in the same way",
    r"anew": "again",
    r"learnt|by heart": "learned, overfits",
    r"pretended": "simulated",
    r"passed over": "skipped",
    r"foretells?|suffices?|amid|lest|whence|thereby": "a word of today",
}
# The default compaction_prompt, whose words decide what a policy writes.
KEPT = "You will go on from this summary alone."


def found_in(text: str, words: Iterable[str] = tuple(WORDS)) -> list[str]:
    """Return the words of a text that we do not write."""
    forbidden = re.compile("|".join(rf"\b(?:{word})\b" for word in words), re.IGNORECASE)
    return [match[0] for match in forbidden.finditer(" ".join(text.split()))]


def prose_of(document: str) -> str:
    """Return a document without its code and quotations."""
    return re.sub(r"```.*?```|`[^`\n]*`|^>.*?$", "", document, flags=re.DOTALL | re.MULTILINE)


def texts_of(source: str) -> tuple[list[str], list[str]]:
    """Return the docstrings and comments of a module, and its other strings."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [text for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node, False))]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [*docstrings, *comments], [text.replace(KEPT, "") for text in strings if text not in docstrings]


def test_no_document_has_a_word_that_we_do_not_write():
    paths = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    found = {str(path.relative_to(ROOT)): found_in(prose_of(path.read_text(encoding="utf-8"))) for path in paths}
    assert {path: words for path, words in found.items() if words} == {}


def test_no_docstring_comment_or_string_has_a_word_that_we_do_not_write():
    found = {}
    for path in SOURCES:
        notes, strings = texts_of(path.read_text(encoding="utf-8"))
        found[str(path.relative_to(ROOT))] = found_in(" ".join(notes)) + found_in(" | ".join(strings))
    assert {path: words for path, words in found.items() if words} == {}
