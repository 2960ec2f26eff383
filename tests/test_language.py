"""Words that we do not write, in documents (without the changelog) and in the docstrings and comments of src."""

import ast
import io
import re
import tokenize
from pathlib import Path

from tests.stages.recipes import DOCUMENTS, ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
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
FORBIDDEN = re.compile("|".join(rf"\b(?:{word})\b" for word in WORDS), re.IGNORECASE)


def prose_of(path: Path) -> str:
    """Return a document without its code and quotations, or the docstrings and comments of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        prose = re.sub(r"```.*?```|`[^`\n]*`|^>.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
        return " ".join(prose.split())
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, nodes)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(" ".join([*filter(None, docstrings), *comments]).split())


def test_no_document_docstring_or_comment_has_a_word_that_we_do_not_write():
    paths = [path for path in (*DOCUMENTS, *SOURCES) if path.name != "CHANGELOG.md"]
    found = {str(path.relative_to(ROOT)): [m[0] for m in FORBIDDEN.finditer(prose_of(path))] for path in paths}
    assert {path: words for path, words in found.items() if words} == {}
