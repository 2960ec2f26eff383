"""top_p and top_k in the commands that sample: eval, and the folder of prefs."""

import json

import pytest

from onetrunk import cli
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.prefs.output import claim_folder
from tests.stages.small_runs import make_material, words_of


def completions(folder):
    lines = (folder / "samples-policy.jsonl").read_text().splitlines()
    return [json.loads(line)["completion"] for line in lines]


@pytest.mark.slow
def test_an_evaluation_with_one_token_left_is_greedy_whatever_the_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_material(tmp_path)
    found = {}
    for name, options in {
        "one": ["--top_k", "1", "--seed", "1"],
        "two": ["--top_p", "0.0001", "--seed", "2"],
        "whole": ["--seed", "1"],
    }.items():
        assert cli.main(words_of("eval", *options, "--output_dir", name)) == 0
        found[name] = completions(tmp_path / name)
    assert found["one"] == found["two"] != found["whole"]


def test_a_folder_of_rows_belongs_to_one_truncation(tmp_path):
    def settings(**more):
        return PrefsArguments(dataset_name="rows.jsonl", output_dir=str(tmp_path), **more).deciding() | {"model": "m"}

    claim_folder(tmp_path, settings(), overwrite=False)
    claim_folder(tmp_path, settings(), overwrite=False)
    with pytest.raises(ValueError, match="other settings .top_p: 1.0 there, 0.9 here"):
        claim_folder(tmp_path, settings(top_p=0.9), overwrite=False)
