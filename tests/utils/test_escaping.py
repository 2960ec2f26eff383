"""What others wrote acts neither in a terminal nor in Markdown, and no file name becomes a scheme."""

import pytest
from markdown_it import MarkdownIt
from rich.table import Table

from onetrunk.utils.escaping import address_of, markdown_text, printable, table_console

TITLE_OF_THE_WINDOW = "\x1b]0;mine\x07"
HOSTILE = [
    "![picture](https://host/p.png)",
    "[link](https://host)",
    "[link][1]",
    "[1]: https://host",
    r"\[link](https://host)",
    r"\\[link](https://host)",
    "<img src=https://host/p.png>",
    "<javascript:alert(1)>",
    "<script>",
    "a | b\\| c \\",
    "a\n\n# b\r\n- [c](d)",
    "``` `[a](b)",
]


def kinds(text):
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    return [token.type for token in tokens] + [child.type for token in tokens for child in token.children or ()]


def test_control_characters_are_written_out_and_lines_and_letters_stay():
    assert printable(f"{TITLE_OF_THE_WINDOW}a\rb\x9b\u202e") == r"\x1b]0;mine\x07a\rb\x9b\u202e"
    assert printable("Straße\n\t日本 🙂 [red]") == "Straße\n\t日本 🙂 [red]"


def test_a_table_shows_texts_as_they_are(capsys):
    table = Table("name [bold]", title="[red]title")
    table.add_row(r"\[red]x[/] :warning: [/none]")
    table.add_row(TITLE_OF_THE_WINDOW)
    table_console().print(table)
    shown = capsys.readouterr().out
    assert r"\[red]x[/] :warning: [/none]" in shown and r"\x1b]0;mine\x07" in shown and "\x1b" not in shown
    assert "[red]title" in shown and "name [bold]" in shown


@pytest.mark.parametrize("text", HOSTILE)
def test_no_link_picture_html_or_column_begins_in_a_text(text):
    escaped = markdown_text(text)
    allowed = {"paragraph_open", "paragraph_close", "inline", "text", "text_special", "code_inline"}
    assert set(kinds(f"It says {escaped}")) <= allowed
    row = kinds(f"| a | b |\n|---|---|\n| {escaped} | last |")
    assert row.count("td_open") == 2 and not {"link_open", "image", "html_inline"} & set(row)


def test_a_text_without_such_signs_is_unchanged():
    assert markdown_text("score/mean_x: 1.5 (0.2 to 3) *") == "score/mean_x: 1.5 (0.2 to 3) *"


def test_the_address_of_a_file_is_relative_and_no_scheme(tmp_path):
    assert address_of(tmp_path / "javascript:a(1)" / "a b", tmp_path) == "javascript%3Aa%281%29/a%20b"
    assert address_of(tmp_path / "a.html", tmp_path / "b") == "../a.html"
