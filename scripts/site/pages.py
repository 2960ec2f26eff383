"""The pages of the site that `make docs` builds; a hook of MkDocs, which .mkdocs.yml names.

Documents are read where they lie. Two parts are generated and never written into the repository: a page for each verb,
from the table of options that `--help` reads, and a page for each public name, from its docstrings. A link to a file
that is not a page leads to the repository.
"""

import html
import json
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from onetrunk.stages.options.table import shown_options
from onetrunk.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "ppo ppo/monitoring models rollouts rollouts/episodes rewards judges feedback checkpoints stages data plan report"
).split()
GUIDES = [
    ROOT / "src/onetrunk/README.md",
    *(page for room in ROOMS for page in sorted(ROOT.glob(f"src/onetrunk/{room}/*.md"))),
    ROOT / "accelerate_configs/README.md",
]
RECIPES = sorted(ROOT.glob("recipes/*/README.md"))
PICTURES = ("scripts/**/*.png", "scripts/**/*.svg", "recipes/*/*.png")
MEASUREMENTS = [ROOT / "scripts/README.md", *sorted(ROOT.glob("scripts/*/**/*.md"))]
# Packages whose public names are shown, and modules that are shown whole.
PACKAGES = ("onetrunk", "onetrunk.rewards", "onetrunk.rollouts")
MODULES = ("onetrunk.ops.advantages", "onetrunk.ops.losses", "onetrunk.judges.judge", "onetrunk.types")
# Links in Markdown and in its HTML, but not in code.
LINK = re.compile(r"```.*?```|`[^`\n]*`|(?<=\]\()[^)\s]+|(?<=src=\")[^\"]+|(?<=srcset=\")[^\"]+", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what lies in docs_dir by the documents of the repository and the generated pages, and order them."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    documents = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md")]
    documents += [*GUIDES, *RECIPES, *MEASUREMENTS]
    pictures = [path for pattern in PICTURES for path in ROOT.glob(pattern)]
    for path in [*documents, *pictures]:
        files.append(File.generated(config, _source(path), abs_src_path=str(path)))
    options = {f"reference/options/{verb}.md": _options_page(verb) for verb in VERBS}
    python = dict(_python_pages())
    for name, text in (options | python).items():
        files.append(File.generated(config, name, content=text))
    config.nav = [
        "README.md",
        {"Guides": [{_label(path): _source(path)} for path in GUIDES]},
        {"Recipes": ["recipes/README.md", *({path.parent.name: _source(path)} for path in RECIPES)]},
        {"Options": list(options)},
        {"Python": list(python)},
        {"Measurements": list(map(_source, MEASUREMENTS))},
        {"Project": ["CONTRIBUTING.md", "CHANGELOG.md"]},
    ]
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let a link lead to a page of the site if there is one, else to the file in the repository."""
    folder, repository = posixpath.dirname(page.file.src_uri), config.repo_url.rstrip("/")
    raw = repository.replace("github.com", "raw.githubusercontent.com")

    def mapped(match: re.Match[str]) -> str:
        link = match[0]
        inside = re.sub(rf"^({repository}/(blob|tree|raw)|{raw})/main/", "/", link)
        if link.startswith(("`", "#")) or "://" in inside:
            return link
        path, hash_, anchor = inside.partition("#")
        path = posixpath.normpath(posixpath.join("/", folder, path)).lstrip("/")
        for name in (path, f"{path}/README.md"):
            if files.get_file_from_path(name):
                return posixpath.relpath(name, folder or ".") + hash_ + anchor
        if not (ROOT / path).exists():  # MkDocs warns.
            return link
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{repository}/{kind}/main/{path}{hash_}{anchor}"

    return LINK.sub(mapped, markdown)


def _source(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _label(path: Path) -> str:
    folder = path.parent.name
    return folder if path.stem == "README" else f"{folder}: {path.stem}"


def _options_page(verb: str) -> str:
    text = VERBS[verb].text
    lines = [f"# {verb}", "", f"{text[0].upper()}{text[1:]}.", ""]
    if not VERBS[verb].has_settings:
        words = [sys.executable, "-m", "onetrunk", verb, "--help"]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return "\n".join([*lines, "```text", text, "```", ""])
    lines += [f"`onetrunk {verb} --config FILE.yaml --OPTION VALUE`; every option may also be a key of the file.", ""]
    first = VERBS[verb].explained.split()
    shown = shown_options(verb)
    for title, options in (
        ("The options that matter most", [option for option in shown if option.name in first]),
        ("Other options" if first else "Options", [option for option in shown if option.name not in first]),
    ):
        if options:
            lines += [f"## {title}", "", "| option | default | what it does |", "|---|---|---|"]
            lines += [_option_row(option) for option in options] + [""]
    return "\n".join(lines)


def _option_row(option: Any) -> str:
    default = "" if option.default is None else f"`{json.dumps(option.default)}`"
    text = option.help
    if option.choices and not all(choice in text for choice in option.choices):
        text += f" One of {', '.join(option.choices)}."
    text = re.sub(r"([*_\[\]|])", r"\\\1", html.escape(text, quote=False))
    return f'| <span id="{option.name}"></span>`{option.name}` | {default} | {text} |'


def _python_pages() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        names = import_module(package)._HOMES
        objects = "\n".join(f"::: {package}.{home}.{name}\n" for name, home in names.items())
        yield f"reference/python/{package}.md", f"# {package}\n\n{objects}"
    for name in MODULES:
        yield f"reference/python/{name}.md", f"# {name}\n\n::: {name}\n    options: {{show_root_heading: false}}\n"
