"""What can fail late is refused before a model loads: no model lies where these commands name one.

The output folder of every stage: odd ones are one sentence, and two processes never share one.
"""

import pytest
from filelock import FileLock

from onetrunk import cli
from tests.stages.small_runs import OWN, error_of, run, write_rows
from tests.tiny import tiny_model, tiny_tokenizer

NOWHERE = ["--model_name_or_path", "./nowhere"]
pytestmark = pytest.mark.usefixtures("in_folder")
USER, SAID = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "runs"}


# The kinds of bad rows are in tests/data; here every stage checks its columns.
BAD = {
    "sft": ({"completion": " \n"}, "completion is empty or white space only"),
    "reward": ({"rejected": "runs"}, "chosen and rejected are identical"),
    "distill": ({"probability": 1.5}, "probability is 1.5, expected a number from 0 to 1"),
    "ppo": ({"prompt": None}, "prompt is missing (null)"),
    "eval": ({"prompt": 3.5}, "prompt is of type float, expected text"),
    "prefs": ({"prompt": "the \0 cat"}, "prompt holds a NUL character at position 4"),
}


def good_row(verb):
    judged = {"chosen": "runs", "rejected": "no", "probability": 0.5, "margin": 1.0}
    return {"prompt": "the cat", **{"sft": {"completion": "runs"}, "reward": judged, "distill": judged}.get(verb, {})}


@pytest.mark.parametrize("verb", OWN)
def test_a_bad_row_is_named_before_anything_is_loaded(tmp_path, capsys, verb):
    (change, reason), good = BAD[verb], good_row(verb)
    write_rows(tmp_path / "rows.jsonl", [good, {**good, **change}, good])
    options = ["--dataset_name", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "out"]
    assert run(verb, *NOWHERE, *options) == 1
    assert f"row 1: {reason}" in error_of(capsys)


@pytest.mark.parametrize(
    ("labels", "given"), [(["bad", "good"], "'bad'"), ([None, 1], "missing (null)"), ([2, 0], "2")]
)
@pytest.mark.parametrize("kind", ["training", "held-out"])
def test_a_label_that_is_no_probability_is_named_before_anything_is_loaded(tmp_path, capsys, labels, given, kind):
    good = good_row("distill")
    write_rows(tmp_path / "bad.jsonl", [{**good, "label": value} for value in labels])
    write_rows(tmp_path / "good.jsonl", [{**good, "label": value} for value in (True, False)])
    names = ["bad", "good"] if kind == "training" else ["good", "bad"]
    options = ["--dataset_name", tmp_path / f"{names[0]}.jsonl", "--eval_dataset_name", tmp_path / f"{names[1]}.jsonl"]
    assert run("distill", *NOWHERE, "--teacher", "./nowhere", *options, "--output_dir", tmp_path / "out") == 1
    assert f"{kind} rows: row 0: label is {given}, expected true, false or the prob" in error_of(capsys)


def test_the_number_of_a_row_is_that_of_the_file_where_a_part_is_held_out(tmp_path, capsys):
    rows = [{**good_row("reward"), "prompt": f"the cat {i}"} for i in range(10)]
    rows[7]["prompt"] = ""
    write_rows(tmp_path / "rows.jsonl", rows)
    options = ["--dataset_name", tmp_path / "rows.jsonl", "--eval_size", "5", "--output_dir", tmp_path / "out"]
    assert run("reward", *NOWHERE, *options) == 1
    assert "row 7: prompt is empty" in error_of(capsys)


def refused_tokens(verb, capsys, tmp_path, *options):
    assert run(verb, "--model_name_or_path", "unloadable", "--output_dir", tmp_path / "out", *options) == 1
    return error_of(capsys)


@pytest.mark.parametrize("verb", ["ppo", "eval", "prefs"])
def test_overlong_prompts_are_counted_before_the_weights_are_read(tmp_path, capsys, verb):
    assert "and the longest, row 0, has" in refused_tokens(verb, capsys, tmp_path, "--max_prompt_length", "1")
    said = refused_tokens(verb, capsys, tmp_path, "--max_completion_length", "500")
    assert "longest prompt has 2 tokens" in said and "max_completion_length" in said


def test_conversations_for_a_tokenizer_without_a_template_are_refused(tmp_path, capsys):
    row = {"prompt": [USER], "chosen": [SAID], "rejected": [{**SAID, "content": "no"}]}
    write_rows(tmp_path / "rows.jsonl", [row])
    said = refused_tokens("reward", capsys, tmp_path, "--dataset_name", tmp_path / "rows.jsonl")
    assert "conversations and the tokenizer" in said and "has no chat template" in said


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tmp_path, capsys):
    tiny_model("llama", num_hidden_layers=1).config.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"no weights")
    tiny_tokenizer(vocab_size=200).save_pretrained(tmp_path / "other")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "the w120 cat", "completion": "runs"}])
    options = ["--dataset_name", tmp_path / "rows.jsonl", "--model_name_or_path", tmp_path / "other"]
    assert "and the model knows 64 tokens; take the" in refused_tokens("sft", capsys, tmp_path, *options)


def test_a_reward_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path, capsys):
    config = tiny_model("llama", num_hidden_layers=1).config
    config.architectures, config.num_labels = ["LlamaForSequenceClassification"], 1
    config.save_pretrained(tmp_path / "rm")
    (tmp_path / "rm" / "model.safetensors").write_bytes(b"no weights")
    said = refused_tokens("ppo", capsys, tmp_path, "--reward_funcs", tmp_path / "rm")
    assert "the tokenizer of the reward model" in said


def test_a_judge_that_does_not_answer_is_said_before_the_weights_are_read(tmp_path, capsys):
    judge = ["--monitor_judge", "http://127.0.0.1:9/v1#model=x", "--monitor_constitution", "principles.yaml"]
    said = refused_tokens("ppo", capsys, tmp_path, *judge)
    assert "127.0.0.1:9" in said and "the connection failed" in said and "or correct its address" in said


# What is odd -> the name below a folder with a file and a dangling link, or a path; what is said.
ODD = {
    "a file": ("file", "is a file; name a folder, or move the file away"),
    "below a file": ("file/out", "cannot be written (Not a directory)"),
    "a mount that takes no files": ("/proc/onetrunk", "cannot be written ("),
    "a link to nothing": ("dangling", "cannot be written ("),
    "very long": ("x" * 5000, "cannot be written (File name too long)"),
    "the root": ("/../", "name a folder of the run's own"),
}


@pytest.mark.parametrize(("kind", "verb"), zip(ODD, OWN, strict=True))
def test_an_odd_output_folder_is_refused_before_anything_else(tmp_path, capsys, kind, verb):
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "further")
    name, said = ODD[kind]
    assert run(verb, *NOWHERE, "--output_dir", tmp_path / name) == 1
    line = error_of(capsys)
    assert said in line and len(line) < 800


def test_a_folder_may_have_any_name_that_the_file_system_takes(tmp_path):
    name = "-Füße\n日本 a'quote\" %s{}"
    assert run("sft", f"--output_dir={tmp_path / name}") == 0
    assert any((tmp_path / name).iterdir())


def pipeline(folder, output_dir):
    """Return the command of a pipeline of one evaluation."""
    rows = "model_name_or_path: base\ndataset_name: prompts.jsonl\nreward_funcs: [len]\n"
    (folder / "eval.yaml").write_text(f"output_dir: {folder}/out\n{rows}")
    stages = f"stages: {{eval: {{config: {folder}/eval.yaml}}}}\n"
    (folder / "pipeline.yaml").write_text(f"output_dir: {output_dir}\n{stages}")
    return ["run", str(folder / "pipeline.yaml")]


def test_a_pipeline_does_not_write_to_the_root(tmp_path, capsys):
    assert cli.main(pipeline(tmp_path, "/")) == 1
    assert "name a folder of the run's own" in error_of(capsys)


def test_a_folder_that_another_process_writes_is_refused_by_every_verb(tmp_path, capsys):
    with FileLock(tmp_path / "_run.lock"), FileLock(tmp_path / "pipeline.json.lock"):
        for verb in OWN:
            assert run(verb, *NOWHERE, "--output_dir", tmp_path) == 1
            assert "_run is being written by another process" in error_of(capsys)
        assert cli.main(pipeline(tmp_path, tmp_path)) == 1
    assert "pipeline.json is being written by another process" in error_of(capsys)
