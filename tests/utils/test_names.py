"""Names and paths of others stay inside their folder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onetrunk.utils.files import require_inside, require_name, require_relative


@pytest.mark.parametrize("name", ["ppo", "run-1.2_b", ".hidden", "a" * 96, "0"])
def test_a_plain_name_is_returned(name):
    assert require_name(name, "run_name") == name


BAD = ["", ".", "..", "a/b", "a\\b", "a\n", "é", "a" * 97, None]


@pytest.mark.parametrize("name", BAD)
def test_any_other_name_is_refused_with_the_setting_it_stands_in(name):
    with pytest.raises(ValueError, match="^run_name is "):
        require_name(name, "run_name")


@pytest.mark.parametrize("name", ["a", "a/b.json", "./a", "a/./b", ".hidden/x", "..a"])
def test_a_path_inside_is_returned_resolved(tmp_path, name):
    assert require_inside(name, tmp_path) == (tmp_path / name).resolve()


@pytest.mark.parametrize("name", ["", "..", "a/../../b", "/etc/passwd", "a\\..\\b", "C:/a", "a\0b"])
def test_a_path_that_leads_out_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="expected a path inside"):
        require_inside(name, tmp_path)


def test_a_link_may_lead_elsewhere_in_the_folder_and_not_out_of_it(tmp_path):
    inside, outside = tmp_path / "run", tmp_path / "outside"
    for folder in (inside / "real", outside):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    (inside / "near").symlink_to("real")
    (inside / "far").symlink_to(outside)
    (inside / "file").symlink_to(outside / "file")
    assert require_inside("near/file", inside) == inside / "real" / "file"
    for name in ("far", "far/file", "far/new", "file"):
        with pytest.raises(ValueError, match="out of"):
            require_inside(name, inside)
    # The folder itself may be reached by a link.
    (tmp_path / "alias").symlink_to(inside)
    assert require_inside("real/file", tmp_path / "alias") == inside / "real" / "file"


def test_a_pattern_is_returned_as_it_is_written_whatever_links_there_are(tmp_path):
    (tmp_path / "far").symlink_to("/")
    assert require_relative("far/*.jsonl", tmp_path) == "far/*.jsonl"
    for name in ("../*", "https://host/a", "/*"):
        with pytest.raises(ValueError, match="expected a path inside"):
            require_relative(name, tmp_path)


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "", "x y", "~"]), max_size=6))
def test_what_passes_never_leaves_the_folder(parts):
    try:
        found = require_inside("/".join(parts), "/nowhere/folder")
    except ValueError:
        return
    assert found.is_relative_to("/nowhere/folder")
