"""The site of `make docs`: it builds without a warning, its links lead somewhere, and it needs no other host."""

import html
import re
from urllib.parse import unquote, urldefrag

import pytest

import onetrunk
from onetrunk.stages.options.table import shown_options
from onetrunk.verbs import VERBS
from tests.processes import python
from tests.stages.recipes import DOCUMENTS, ROOT

# A template, and what pytest writes.
NO_PAGES = {"src/onetrunk/report/templates/report.md", ".pytest_cache/README.md"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site; --strict makes an error of a link to nothing, but not with --quiet."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; `make setup` installs it")
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "build", "--strict", "-f", ".mkdocs.yml", "-d", folder]
    python(*words, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    return folder


@pytest.mark.slow
def test_every_document_verb_option_and_public_name_is_on_the_site(site):
    documents = {path.relative_to(ROOT).as_posix() for path in DOCUMENTS} - NO_PAGES
    pages = {name: site / name.removesuffix(".md").removesuffix("README") / "index.html" for name in documents}
    assert [name for name, page in pages.items() if not page.is_file()] == []
    for name, verb in VERBS.items():
        text = (site / f"reference/options/{name}/index.html").read_text()
        options = shown_options(name) if verb.has_settings else ()
        assert [option.name for option in options if f'id="{option.name}"' not in text] == []
    names = (site / "reference/python/onetrunk/index.html").read_text()
    assert [n for n in onetrunk._HOMES if f'id="onetrunk.{onetrunk._HOMES[n]}.{n}"' not in names] == []


@pytest.mark.slow
def test_every_address_of_the_site_exists_and_nothing_is_loaded_from_another_host(site):
    dead, foreign = set(), set()
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text(), flags=re.DOTALL)
        for tag, name, address in re.findall(r"<(\w+)[^>]*?\s(href|src|srcset)=\"?([^\"\s>]+)", text):
            path, _ = urldefrag(unquote(html.unescape(address)))
            if re.match(r"(https?:)?//", path):
                foreign |= {path} if name != "href" or tag == "link" else set()
            elif path and not path.startswith(("mailto:", "data:")) and page.name != "404.html":
                target = page.parent / path
                dead |= set() if (target / "index.html" if target.is_dir() else target).is_file() else {path}
    assert dead == set() and foreign == set()
