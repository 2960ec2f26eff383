"""A second home for checkpoints: what is pushed comes back whole, whatever fails or dies on the way.

Against a folder, fsspec's memory and a real S3 server (moto's) on the loopback.
"""

import json
import sys
import threading
import uuid
from pathlib import Path

import fsspec
import pytest

from onetrunk.checkpoints.folders import begin_staging, checkpoint_folders, checkpoint_problems, install, read_manifest
from onetrunk.checkpoints.mirror import Mirror
from tests.checkpoints.hooked_store import HookedFileSystem, make_checkpoint, nothing, register


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request, tmp_path):
    """A mirror of each kind, empty."""
    if request.param == "folder":
        return str(tmp_path / "mirror")
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}/mirror"
    return f"{request.getfixturevalue('s3')}/{uuid.uuid4()}/mirror"


@pytest.fixture
def hooked(tmp_path):
    """Register the file system with a hook; return the folder and the URL."""
    register()
    (tmp_path / "mirror").mkdir()
    yield tmp_path / "mirror", f"hooked://{tmp_path}/mirror"
    HookedFileSystem.hook = staticmethod(nothing)


def refuse(*operations, at="", words="Forbidden"):
    """Let operations on files whose path ends in `at` fail."""

    def hook(operation, path):
        if operation in operations and path.endswith(at):
            raise PermissionError(words)

    HookedFileSystem.hook = staticmethod(hook)


def mirror_at(url, keep=None):
    told = []
    return Mirror(str(url), keep, told.append), told


def push(mirror, *folders):
    for folder in folders:
        mirror.push(folder, folder.name)
        mirror.wait(60)


def names_in(url):
    store, root = fsspec.core.url_to_fs(url)
    store.invalidate_cache()
    return sorted({path.removeprefix(root).lstrip("/").split("/")[0] for path in store.find(root)})


def test_what_was_pushed_comes_back_whole_when_the_disk_is_gone(url, tmp_path):
    mirror, told = mirror_at(url)
    mirror.check()
    assert names_in(url) == [] and mirror.pull_last(tmp_path / "new") is None
    folders = [make_checkpoint(tmp_path / "out", step) for step in (9, 10)]
    push(mirror, *folders)
    assert (mirror.wait(0), told, mirror.busy()) == ([], [], set())
    assert names_in(url) == ["checkpoint-10", "checkpoint-9"]

    found = mirror_at(url)[0].pull_last(tmp_path / "new")
    assert found == tmp_path / "new" / "checkpoint-10"
    assert checkpoint_problems(found) == []
    assert read_manifest(found) == read_manifest(folders[1])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["checkpoint-10"]


def test_the_newest_stay_and_the_best_one(url, tmp_path):
    mirror, told = mirror_at(url, keep=1)  # Two always stay.
    for step in (1, 2, 3, 4, 10):
        mirror.push(make_checkpoint(tmp_path / "out", step), f"checkpoint-{step}", kept=["checkpoint-1"])
        mirror.wait(60)
    assert names_in(url) == ["checkpoint-1", "checkpoint-10", "checkpoint-4"]
    assert told == []


def test_a_run_that_resumes_earlier_sets_the_later_ones_aside_and_keeps_its_own(url, tmp_path):
    push(mirror_at(url, keep=4)[0], *(make_checkpoint(tmp_path / "old", step) for step in (2, 4, 6, 8)))
    mirror, told = mirror_at(url, keep=2)
    mirror.set_aside_later(2)
    assert len(told) == 1 and "checkpoint-4, checkpoint-6, checkpoint-8 are set aside" in told[0]
    assert mirror_at(url)[0].pull_last(tmp_path / "pulled").name == "checkpoint-2"
    mirror.set_aside_later(2)
    assert len(told) == 1

    folders = [make_checkpoint(tmp_path / "out", step) for step in (3, 4)]
    push(mirror, *folders)
    assert len(told) == 1 and {"checkpoint-3", "checkpoint-4"} <= set(names_in(url))
    pulled = mirror_at(url)[0].pull_last(tmp_path / "new")
    assert pulled.name == "checkpoint-4" and read_manifest(pulled) == read_manifest(folders[1])
    # Rotation counts the new ones only.
    assert "checkpoint-2" not in names_in(url)


def test_a_later_one_that_cannot_be_set_aside_is_a_warning(hooked, tmp_path):
    push(mirror_at(hooked[1])[0], *(make_checkpoint(tmp_path / "out", step) for step in (2, 4)))
    mirror, told = mirror_at(hooked[1])
    refuse("read", "write", "delete")
    mirror.set_aside_later(2)
    assert len(told) == 1 and "after step 2 still count" in told[0] and "Forbidden" in told[0]


def test_the_manifest_is_written_last_and_only_then_an_older_one_is_deleted_its_manifest_first(hooked, tmp_path):
    mirror, _ = mirror_at(hooked[1], keep=2)
    push(mirror, *(make_checkpoint(tmp_path / "out", step) for step in (1, 2)))
    seen = []
    HookedFileSystem.hook = staticmethod(lambda operation, path: seen.append((operation, path.split("/mirror/")[1])))
    push(mirror, make_checkpoint(tmp_path / "out", 3))
    seen = [event for event in seen if event[0] != "read"]
    assert [operation for operation, _ in seen] == 4 * ["write"] + 2 * ["delete"]
    last = ["checkpoint-3/manifest.json", "checkpoint-1/manifest.json", "checkpoint-1"]
    assert [path for _, path in seen[3:]] == last


def test_a_result_goes_to_the_root_with_the_files_beside_it_and_without_folders_of_the_run(url, tmp_path):
    out = tmp_path / "out"
    folder = make_checkpoint(out, 1)
    staged = begin_staging(out) / "result"
    (staged / "value").mkdir(parents=True)
    (staged / "value" / "adapter.safetensors").write_bytes(b"value")
    (staged / "adapter.safetensors").write_bytes(b"policy")
    install(staged, out)
    (out / "README.md").write_text("card")
    for name in (".lock", "_heartbeat-1.json"):
        (out / name).write_text("")
    (out / "runs").mkdir()
    (out / "runs" / "events").write_text("e")
    mirror, told = mirror_at(url)
    mirror.push(folder, folder.name)
    mirror.push(out, "")
    assert (mirror.wait(60), told) == ([], [])
    assert names_in(url) == ["README.md", "adapter.safetensors", "checkpoint-1", "manifest.json", "value"]
    # Pushed again it brings what came since.
    (out / "metrics.json").write_text("{}")
    mirror.push(out, "")
    assert mirror.wait(60) == [] and {"metrics.json", "manifest.json"} <= set(names_in(url))


def test_a_result_that_is_pushed_again_copies_only_what_is_new(hooked, tmp_path):
    out, written = tmp_path / "out", []
    staged = begin_staging(out) / "result"
    staged.mkdir()
    (staged / "adapter.safetensors").write_bytes(b"policy")
    install(staged, out)
    mirror, _ = mirror_at(hooked[1])
    mirror.push(out, "")
    assert mirror.wait(60) == []
    HookedFileSystem.hook = staticmethod(lambda operation, path: written.append((operation, Path(path).name)))
    (out / "metrics.json").write_text("{}")
    mirror.push(out, "")
    assert mirror.wait(60) == []
    assert [name for operation, name in written if operation == "write"] == ["metrics.json", "manifest.json"]


DAMAGE = {
    "a flipped byte": ("value/adapter.safetensors", lambda data: data[:-1] + b"x", "sha256 differs"),
    "half a manifest": ("manifest.json", lambda data: data[: len(data) // 2], None),
    "the manifest of another step": ("manifest.json", lambda data: data.replace(b'"step": 2', b'"step": 1'), "step 1"),
    "a missing file": ("adapter.safetensors", None, "missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, kind):
    file, edit, sentence = DAMAGE[kind]
    mirror, told = mirror_at(tmp_path / "mirror")
    push(mirror, *(make_checkpoint(tmp_path / "out", step) for step in (1, 2)))
    path = tmp_path / "mirror/checkpoint-2" / file
    content = path.read_bytes()
    path.unlink()
    if edit is not None:
        path.write_bytes(edit(content))
    assert mirror.pull_last(tmp_path / "new") == tmp_path / "new" / "checkpoint-1"
    # Without a whole manifest an upload has not ended, which is no damage.
    assert told == [] if sentence is None else len(told) == 1 and "checkpoint-2" in told[0] and sentence in told[0]
    assert [path.name for path in checkpoint_folders(tmp_path / "new")] == ["checkpoint-1"]


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside"])
def test_a_manifest_that_names_a_file_outside_its_folder_is_damage_and_all_damaged_is_an_error(tmp_path, name):
    mirror, told = mirror_at(tmp_path / "mirror")
    push(mirror, make_checkpoint(tmp_path / "out", 1))
    path = tmp_path / "mirror" / "checkpoint-1" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = manifest["files"].pop("adapter.safetensors")
    path.write_text(json.dumps(manifest))
    with pytest.raises(RuntimeError, match=r"none of the 1 checkpoints .* is whole \(checkpoint-1: "):
        mirror.pull_last(tmp_path / "new" / "deep")
    assert not list(tmp_path.rglob("outside*")) and not Path("/tmp/outside").exists()


def test_a_mirror_that_does_not_answer_is_an_error_and_not_damage(hooked, tmp_path):
    push(mirror_at(hooked[1])[0], *(make_checkpoint(tmp_path / "out", step) for step in (1, 2)))
    mirror, told = mirror_at(hooked[1])
    refuse("read", at="checkpoint-2/adapter.safetensors")
    with pytest.raises(RuntimeError, match=r"fails \(PermissionError: Forbidden\)"):
        mirror.pull_last(tmp_path / "new")
    assert told == [] and list((tmp_path / "new").iterdir()) == []


NO_PLACES = ["https://host/x", "simplecache::s3://bucket/x", "memory://../x", "s3://bucket/../x"]


@pytest.mark.parametrize("url", [*NO_PLACES, "ftp://user:a-password-of-mine@host/x"])
def test_a_place_that_cannot_be_one_is_refused_without_its_secrets(url):
    with pytest.raises(RuntimeError, match="not supported") as caught:
        Mirror(url, 2, print)
    assert "password-of-mine" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(RuntimeError, match="gs://bucket/x cannot be opened .*gcsfs"):
        Mirror("gs://bucket/x", 2, print)


def test_a_bucket_that_does_not_exist_is_refused_and_not_made(s3):
    with pytest.raises(RuntimeError, match="s3://no-such-bucket/x cannot be used .*bucket"):
        Mirror("s3://no-such-bucket/x", 2, print).check()
    assert [f"s3://{name}" for name in fsspec.filesystem("s3").ls("")] == [s3]


def test_a_missing_permission_is_found_early(hooked):
    refuse("delete")
    with pytest.raises(RuntimeError, match="cannot be used .*Forbidden"):
        Mirror(hooked[1], 2, print).check()


def test_a_new_run_rejects_a_mirror_that_is_in_use_and_empties_it_only_when_asked(url, tmp_path):
    push(mirror_at(url)[0], *(make_checkpoint(tmp_path / "out", step) for step in (5, 6)))
    mirror = mirror_at(url)[0]
    with pytest.raises(RuntimeError, match="holds checkpoint-6 of another run.*overwrite_output_dir"):
        mirror.require_free(overwrite=False)
    mirror.require_free(overwrite=True)
    assert names_in(url) == []
    mirror.require_free(overwrite=False)


def test_whichever_write_fails_training_continues_the_last_whole_one_stays_and_the_next_is_taken(hooked, tmp_path):
    first, second, third, fourth = (make_checkpoint(tmp_path / "out", step) for step in (1, 2, 3, 4))
    # Four writes and two deletions, as above.
    for last in range(1, 7):
        url = f"hooked://{hooked[0]}/{last}"
        mirror, told = mirror_at(url, keep=2)
        push(mirror, first, second)
        seen = []

        def fail_from(operation, path, seen=seen, last=last):
            if operation != "read":
                seen.append(path)
                if len(seen) >= last:
                    raise OSError(28, "No space left on device")

        HookedFileSystem.hook = staticmethod(fail_from)
        push(mirror, third)
        HookedFileSystem.hook = staticmethod(nothing)
        assert "No space left on device" in told[0], last
        pulled = mirror_at(url)[0].pull_last(tmp_path / f"new-{last}")
        assert pulled.name in ("checkpoint-2", "checkpoint-3") and not checkpoint_problems(pulled), last
        del told[:]
        push(mirror, fourth)
        assert told == [] and mirror.wait(0) == [], last
        assert "checkpoint-4" in names_in(url) and len(names_in(url)) == 2, last


def test_a_warning_holds_no_secret(hooked, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "a-very-secret-value")
    mirror, told = mirror_at(hooked[1])
    refuse("write", words="a-very-secret-value is not allowed\nto do that")
    push(mirror, make_checkpoint(tmp_path / "out", 1))
    assert "a-very-secret-value" not in " ".join(told) and "<redacted SOME_TOKEN> is not allowed" in told[0]


class Gate:
    """A hook that holds writes back until `open`, and counts."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()
        self.written = []

    def __call__(self, operation, path):
        if operation == "write":
            self.written.append(path)
            self.reached.set()
            assert self.opened.wait(60)


def test_a_slow_upload_does_not_block_and_the_middle_ones_are_left_out(hooked, tmp_path):
    folders = [make_checkpoint(tmp_path / "out", step) for step in (1, 2, 3, 4)]
    mirror, told = mirror_at(hooked[1])
    gate = Gate()
    HookedFileSystem.hook = staticmethod(gate)
    mirror.push(folders[0], folders[0].name)
    assert gate.reached.wait(60)
    for folder in folders[1:]:
        mirror.push(folder, folder.name)
    assert mirror.busy() == {folders[0], folders[3]}
    assert mirror.wait(0.05) == ["checkpoint-4"]
    assert "lacks checkpoint-4; copy it" in told[0]
    gate.opened.set()
    assert mirror.wait(60) == [] and mirror.busy() == set()
    assert names_in(hooked[1]) == ["checkpoint-1", "checkpoint-4"]
    assert not any("checkpoint-2" in path or "checkpoint-3" in path for path in gate.written)
