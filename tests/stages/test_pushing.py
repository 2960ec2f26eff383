"""`push_to_hub` in every training stage, against a Hub on 127.0.0.1: asked before a model loads, and at the end."""

import logging

import pytest
from huggingface_hub import DatasetCard, constants

from onetrunk import cli
from onetrunk.checkpoints import hub as pushing
from onetrunk.stages.arguments import PushArguments
from tests.checkpoints.hub_stub import stand_in
from tests.stages.small_runs import TRAINING, error_of, run

PUSH = ["--push_to_hub", "true", "--hub_model_id", "someone/out"]
NOWHERE = ["--model_name_or_path", "./nowhere"]
RESULT = "adapter_model.safetensors"


@pytest.fixture
def hub(in_folder, monkeypatch):
    pushing._create.cache_clear()
    with stand_in(monkeypatch) as stub:
        yield stub


def new(tmp_path):
    return ["--output_dir", str(tmp_path / "out")]


@pytest.mark.parametrize("verb", ["reward", "ppo"])
def test_what_was_trained_is_pushed_when_asked(hub, tmp_path, verb):
    more = {"ppo": {"value_head.safetensors", "metrics.json"}}.get(verb, set())
    held_out = ["--eval_dataset_name", "prompts.jsonl"] if verb == "ppo" else []
    assert run(verb, *PUSH, *held_out, *new(tmp_path)) == 0
    assert {RESULT, "README.md", "tokenizer.json", *more} <= set(hub.files)
    assert hub.files[RESULT] == (tmp_path / "out" / RESULT).read_bytes()


REFUSALS = {
    "a token that is not valid": ("/api/repos/create", 401, "HTTP 401, the token is not valid; set HF_TOKEN"),
    "a token without the right to write": ("auth-check", 403, "HTTP 403, the token may not do that; give one with"),
    "a token that may not make a repository": ("/api/repos/create", 403, "HTTP 403, the token may not do that"),
    "a revision that does not exist": ("/revision/other", 404, "HTTP 404, there is no such repository"),
}


@pytest.mark.parametrize(("kind", "verb"), zip(REFUSALS, TRAINING, strict=True))
def test_what_the_hub_has_against_a_push_is_said_before_a_model_loads(hub, tmp_path, capsys, kind, verb):
    path, status, sentence = REFUSALS[kind]
    hub.refusals[path] = status
    # A 403 may also mean that the repository is there, and only making one is forbidden.
    if "revision" not in path:
        hub.refusals["/api/models/"] = 404 if "create" in path else status
    revision = ["--hub_revision", "other"] if "revision" in path else []
    assert run(verb, *PUSH, *revision, *NOWHERE, *new(tmp_path)) == 1
    line = error_of(capsys)
    assert line.startswith("error: push_to_hub is true and someone/out cannot be pushed to: ") and sentence in line


def test_without_a_token_or_a_connection_the_reason_is_said(hub, tmp_path, capsys, monkeypatch):
    assert run("ppo", *PUSH, "--hub_model_id", "a/b/c", *NOWHERE, *new(tmp_path)) == 1
    assert "is not a repository name" in error_of(capsys)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert run("ppo", *PUSH, *NOWHERE, *new(tmp_path)) == 1
        assert "HF_HUB_OFFLINE is set; leave it out to push" in error_of(capsys)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert run("ppo", *PUSH, *NOWHERE, *new(tmp_path)) == 1
        assert "http://127.0.0.1:9 cannot be reached (" in error_of(capsys)
    num_calls = len(hub.calls)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert run("distill", *PUSH, *NOWHERE, *new(tmp_path)) == 1
    assert "there is no token of the Hub; set HF_TOKEN, or log in with" in error_of(capsys)
    assert len(hub.calls) == num_calls


def test_pushes_that_fail_stop_no_training_and_at_the_end_lose_nothing(hub, tmp_path, capsys, caplog):
    hub.refusals["/commit/"] = 403
    saves = ["--save_strategy", "steps", "--save_steps", "1", "--hub_strategy", "every_save", "--num_rollouts", "3"]
    saves += ["--hub_always_push", "true", "--eval_dataset_name", "prompts.jsonl"]
    with caplog.at_level(logging.WARNING):
        assert run("ppo", *PUSH, *saves, *new(tmp_path)) == 1
    assert "a checkpoint was not pushed: HTTP 403" in caplog.text and "Training continues" in caplog.text
    line, out = error_of(capsys), tmp_path / "out"
    assert f"the result is in {out} and could not be pushed to someone/out: HTTP 403, " in line
    # What comes after the saving of the result has been written too.
    assert {RESULT, "metrics.json"} <= {path.name for path in out.iterdir()}


PREFS = "prefs --dataset_name reward.jsonl --judge rubric --constitution principles.yaml --completions given".split()
PREFS += ["--rubric", '{"short": "reward.py:short"}', *PUSH]


def test_preferences_are_pushed_as_a_dataset_with_its_card(hub, tmp_path, capsys):
    assert cli.main([*PREFS, *new(tmp_path)]) == 0
    assert set(hub.files) == {"README.md", "statistics.json", "data/preferences.jsonl"}
    assert all(content == (tmp_path / "out" / name).read_bytes() for name, content in hub.files.items())
    card = DatasetCard(hub.files["README.md"].decode())
    assert "onetrunk" in card.data.tags and card.data.configs[0]["data_files"] == "data/preferences*.jsonl"
    assert "https://huggingface.co/datasets/someone/out" in capsys.readouterr().out
    assert not [call for call in hub.calls if "/api/models/" in call]


def test_a_name_without_an_owner_is_one_of_the_tokens_owner(hub, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "rows.txt").write_text("rows")
    args = PushArguments(push_to_hub=True)
    args.output_dir = str(folder)
    where = pushing.push_folder(folder, args, "the rows are", repo_type="dataset")
    assert where.endswith("/datasets/someone/out") and set(hub.files) == {"rows.txt"}


def test_a_dataset_that_cannot_be_pushed_is_known_before_a_judge_loads_and_loses_nothing(hub, tmp_path, capsys):
    hub.refusals["/api/"] = 401
    words = [*PREFS, *new(tmp_path)]
    assert cli.main([*words, "--judge", "./nowhere"]) == 1
    assert "someone/out cannot be pushed to: HTTP 401, the token is not valid" in error_of(capsys)
    pushing._create.cache_clear()
    hub.refusals.clear()
    hub.refusals["/commit/"] = 403
    assert cli.main(words) == 1
    line = error_of(capsys)
    assert f"in {tmp_path / 'out'} and could not be pushed to someone/out: HTTP 403" in line
    assert (tmp_path / "out/README.md").is_file()


def test_a_shard_is_not_pushed_alone(hub, tmp_path, capsys):
    words = [*PREFS, *new(tmp_path)]
    assert cli.main([*words, "--shard", "0/2"]) == 2
    assert "shard is set; leave push_to_hub to merge_shards" in capsys.readouterr().err
    for shard in ("0/2", "1/2"):
        assert cli.main([*words, "--shard", shard, "--push_to_hub", "false"]) == 0
    assert not hub.files
    assert cli.main([*words, "--merge_shards", "2"]) == 0
    assert {"README.md", "statistics.json", "data/preferences-00001-of-00002.jsonl"} <= set(hub.files)
