"""`onetrunk prefs` through the command line: rows, shards, streams, revisions, and what it refuses."""

import functools
import json
from pathlib import Path

import pytest
from datasets import load_dataset

from onetrunk.data.files import load_rows
from onetrunk.data.prompts import check_completions
from onetrunk.data.rows import check_preferences
from onetrunk.feedback.shards import read_rows
from onetrunk.utils.files import digest
from tests.feedback import runs
from tests.stages.small_runs import error_of, statistics
from tests.stages.test_eval_judge import CHECKS

FIELDS = "prompt chosen rejected chosen_stopped rejected_stopped probability votes consistent".split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = runs.make_inputs(tmp_path_factory.mktemp("inputs"), num_prompts=14)
    (folder / "checks.py").write_text(CHECKS)
    turns = [[{"role": "user", "content": f"the {word}"}] for word in ("cat", "dog", "bird", "fish", "tree")]
    runs.write_prompts(folder / "turns.jsonl", turns)
    rubric = {"warm": f"{folder}/checks.py:warm", "concise": f"{folder}/checks.py:concise"}
    runs.write_recipe(folder, judge=["rubric"], rubric=rubric)
    return folder


@pytest.fixture
def prefs(inputs, empty_folder):
    """Return a function that runs the verb in an empty folder, with options; it returns the exit code."""
    return functools.partial(runs.prefs, inputs)


def content(rows):
    return sorted(digest(row) for row in rows)


def test_prompts_become_rows_that_a_reward_model_takes_with_statistics_and_a_card(prefs, tmp_path, capsys):
    assert prefs() == 0
    assert "14 prompts" not in capsys.readouterr().err
    rows = load_rows(tmp_path / "out/data")
    assert rows.column_names == FIELDS and len(rows) > 20
    check_preferences(rows)
    for row in rows:
        assert row["probability"] > 0.5 and row["chosen"] != row["rejected"]
        assert len(json.loads(row["votes"])) == 2
    counts = statistics(tmp_path / "out")["counts"]
    assert (counts["prompts"], counts["repeated_prompts"], counts["completions"]) == (14, 1, 42)
    assert counts["labelled"] == len(rows) and counts["unjudged"] == 0
    assert counts["pairs"] == counts["labelled"] + counts["ties"] + counts["abstained"]
    card = (tmp_path / "out/README.md").read_text()
    assert "counts/labelled" in card and "data_files: data/preferences*.jsonl" in card and str(tmp_path) not in card
    # The Hub's loader reads the rows alone, as the card tells it.
    assert load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")).column_names == FIELDS


def test_conversations_come_back_as_messages(prefs, inputs, tmp_path):
    options = ["--dataset_name", inputs / "turns.jsonl", "--pairing", "best_worst"]
    assert prefs(*options) == 0
    rows = load_rows(tmp_path / "out/data")
    check_preferences(rows)
    assert {row["prompt"][0]["content"] for row in rows} <= {f"the {w}" for w in "cat dog bird fish tree".split()}
    assert all(row["chosen"][0]["role"] == "assistant" and len(row["chosen"]) == 1 for row in rows)


def test_a_shard_without_prompts_is_an_empty_file_that_the_others_can_be_read_with(prefs, inputs, tmp_path):
    (tmp_path / "few.jsonl").write_text("".join((inputs / "turns.jsonl").read_text().splitlines(keepends=True)[:2]))
    options = ["--dataset_name", "few.jsonl"]
    for i in range(4):
        assert prefs(*options, "--shard", f"{i}/4") == 0
    parts = [list(read_rows(path)) for path in sorted((tmp_path / "out/data").iterdir())]
    assert sum(not part for part in parts) >= 2
    assert len(load_rows(tmp_path / "out/data")) == sum(map(len, parts)) > 0


def test_the_shards_together_are_the_unsharded_set(prefs, tmp_path):
    # One prompt a chunk: no batch that a shard could change
    shared = ["--prompts_per_chunk", 1]
    assert prefs(*shared, out="whole") == 0
    for i in (2, 0, 1):
        assert prefs(*shared, "--shard", f"{i}/3", out="parts") == 0
    assert prefs(*shared, "--merge_shards", 3, out="parts") == 0
    whole = list(read_rows(tmp_path / "whole/data/preferences.jsonl"))
    parts = [list(read_rows(path)) for path in sorted((tmp_path / "parts/data").iterdir())]
    assert len(parts) == 3 and sum(bool(part) for part in parts) > 1
    assert content(sum(parts, [])) == content(whole)
    one, other = statistics(tmp_path / "whole"), statistics(tmp_path / "parts")
    assert other["counts"] == one["counts"] and other["rows"] == one["rows"] and other["judge"] == one["judge"]
    assert (tmp_path / "parts/README.md").is_file() and not (tmp_path / "parts/statistics").exists()
    assert len(load_rows(tmp_path / "parts/data")) == len(whole)


def test_a_stream_and_another_order_give_the_same_rows(prefs, inputs, tmp_path):
    assert prefs("--prompts_per_chunk", 1, out="a") == 0
    assert prefs("--prompts_per_chunk", 1, "--streaming", "true", out="b") == 0
    rows = (tmp_path / "a/data/preferences.jsonl").read_bytes()
    assert (tmp_path / "b/data/preferences.jsonl").read_bytes() == rows
    lines = (inputs / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines)))
    assert prefs("--prompts_per_chunk", 1, "--dataset_name", tmp_path / "reversed.jsonl", out="c") == 0
    assert content(read_rows(tmp_path / "c/data/preferences.jsonl")) == content(map(json.loads, rows.splitlines()))


def test_a_window_of_a_stream_whose_prompts_are_all_too_long_is_dropped(prefs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("onetrunk.stages.prefs.sampling.WINDOW", 2)
    options = ["--streaming", "true", "--max_prompt_length", 4, "--overlong_prompts", "drop"]
    runs.write_prompts(tmp_path / "last.jsonl", ["the cat", "the dog", "the bird " * 4])
    assert prefs("--dataset_name", "last.jsonl", *options) == 0
    rows = list(read_rows(tmp_path / "out/data/preferences.jsonl"))
    assert {row["prompt"] for row in rows} <= {"the cat", "the dog"} and rows
    runs.write_prompts(tmp_path / "all.jsonl", ["the cat " * 4, "the dog " * 4, "the bird " * 4])
    assert prefs("--dataset_name", "all.jsonl", *options, out="none") == 1
    assert "all 3 prompts are longer than max_prompt_length 4" in error_of(capsys)


def test_revise_writes_rows_for_sft_with_their_trail(prefs, inputs, tmp_path):
    recipe = json.loads((inputs / "prefs.yaml").read_text())
    (tmp_path / "revise.yaml").write_text(json.dumps({**recipe, "mode": "revise", "judge": None}))
    options = ["--config", "revise.yaml", "--num_generations", 1, "--max_critique_length", 6]
    assert prefs(*options, "--dataset_name", inputs / "turns.jsonl", "--num_revisions", 2) == 0
    rows = load_rows(tmp_path / "out/data")
    assert check_completions(rows).column_names == ["prompt", "completion"] and len(rows) > 2
    assert rows.column_names == ["prompt", "completion", "original", "trail"]
    assert all(len(json.loads(row["trail"])) == 2 for row in rows)
    assert "and rewritten, for supervised" in (tmp_path / "out/README.md").read_text()


def test_a_folder_of_other_settings_is_refused_with_the_differences_and_overwritten_on_demand(prefs, tmp_path, capsys):
    assert prefs() == 0
    before = (tmp_path / "out/data/preferences.jsonl").read_bytes()
    assert prefs("--temperature", 0.7, "--num_generations", 2, "--top_p", 0.9) == 1
    said = capsys.readouterr().err
    assert "num_generations: 3 there, 2 here" in said and "temperature: 1.0 there, 0.7 here" in said
    assert "top_p: 1.0 there, 0.9 here" in said
    assert "overwrite_output_dir" in said and (tmp_path / "out/data/preferences.jsonl").read_bytes() == before
    # How the work is cut up decides nothing.
    assert prefs("--prompts_per_chunk", 2) == 0
    assert (tmp_path / "out/data/preferences.jsonl").read_bytes() == before


def test_another_model_or_constitution_under_the_same_name_is_noticed(prefs, inputs, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(runs.CONSTITUTION)
    assert prefs("--constitution", "c.yaml") == 0
    (tmp_path / "c.yaml").write_text(runs.CONSTITUTION.replace("warmer", "kinder"))
    assert prefs("--constitution", "c.yaml") == 1
    assert "other settings (constitution: " in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text(runs.CONSTITUTION)
    runs.tiny_model("llama", seed=1).save_pretrained(tmp_path / "other")
    runs.tiny_tokenizer().save_pretrained(tmp_path / "other")
    assert prefs("--constitution", "c.yaml", "--model_name_or_path", "other") == 1
    assert "other settings (model: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--num_generations", "1"], 2, "a pair needs two completions"),
        (["--shard", "0/2", "--merge_shards", "2"], 2, "run every shard first"),
        (["--merge_shards", "1"], 2, "merge_shards is 1; give the number of shards, 2 or more"),
        (["--dataset_name", "rows", "--streaming", "true"], 1, "the dataset has no column 'prompt', only text"),
        (["--dataset_name", "absent.jsonl", "--streaming", "true"], 1, "absent.jsonl does not exist"),
        (["--dataset_name", "blank.jsonl", "--streaming", "true"], 1, "row 1: prompt is empty or white space only"),
        (["--max_completion_length", "500"], 1, "leaves room for 0"),
        (["--merge_shards", "2"], 1, "shards 0/2, 1/2"),
    ],
)
def test_a_wrong_input_is_one_sentence(prefs, tmp_path, capsys, options, code, message):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "blank.jsonl").write_text('{"prompt": "a"}\n{"prompt": " "}\n{"prompt": null}\n')
    assert prefs(*options) == code
    assert message in error_of(capsys)


def test_several_processes_are_told_about_shards(prefs, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert prefs() == 1
    assert "--shard 0/2" in capsys.readouterr().err


def test_a_judge_that_abstains_from_everything_ends_the_run_with_a_reason(prefs, capsys):
    Path("mute.py").write_text("def mute(completions, **columns):\n    return [None for _ in completions]\n")
    assert prefs("--rubric", json.dumps(dict.fromkeys(("warm", "concise"), "mute.py:mute"))) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "no row came out (" in error
    assert "the judge abstains from 100% of its questions, for instance because: no check" in error
