"""What can fail late is refused before a model loads: no model lies where these commands name one."""

import pytest

from tests.stages.small_runs import OWN, error_of, run, write_rows
from tests.tiny import tiny_model, tiny_tokenizer

NOWHERE = ["--model_name_or_path", "./nowhere"]
STAGES = tuple(OWN)
pytestmark = pytest.mark.usefixtures("in_folder")
USER, SAID = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "runs"}


# The kinds of bad rows are in tests/data; here every stage checks its columns.
BAD = {
    "sft": {"completion": " \n", "reason": "completion is empty or white space only"},
    "reward": {"rejected": "runs", "reason": "chosen and rejected are identical"},
    "distill": {"probability": 1.5, "reason": "probability is 1.5, expected a number from 0 to 1"},
    "ppo": {"prompt": None, "reason": "prompt is missing (null)"},
    "eval": {"prompt": 3.5, "reason": "prompt is of type float, expected text"},
    "prefs": {"prompt": "the \0 cat", "reason": "prompt holds a NUL character at position 4"},
}


def good_row(verb, conversational=False):
    prompt, completion, other = ([USER], [SAID], [{**SAID, "content": "no"}])
    if not conversational:
        prompt, completion, other = "the cat", "runs", "no"
    if verb == "sft":
        return {"prompt": prompt, "completion": completion}
    if verb in ("reward", "distill"):
        return {"prompt": prompt, "chosen": completion, "rejected": other, "probability": 0.5, "margin": 1.0}
    return {"prompt": prompt}


@pytest.mark.parametrize("verb", STAGES)
def test_a_bad_row_is_named_before_anything_is_loaded(tmp_path, capsys, verb):
    change = dict(BAD[verb])
    reason, good = change.pop("reason"), good_row(verb)
    write_rows(tmp_path / "rows.jsonl", [good, {**good, **change}, good])
    options = ["--dataset_name", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "out"]
    assert run(verb, *NOWHERE, *options) == 1
    assert f"row 1: {reason}" in error_of(capsys)


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


@pytest.mark.parametrize("verb", ["reward", "ppo"])
def test_conversations_for_a_tokenizer_without_a_template_are_refused(tmp_path, capsys, verb):
    write_rows(tmp_path / "rows.jsonl", [good_row(verb, conversational=True)])
    said = refused_tokens(verb, capsys, tmp_path, "--dataset_name", tmp_path / "rows.jsonl")
    assert "conversations and the tokenizer" in said and "has no chat template" in said


@pytest.mark.parametrize("verb", ["sft", "ppo"])
def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tmp_path, capsys, verb):
    tiny_model("llama", num_hidden_layers=1).config.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"no weights")
    tiny_tokenizer(vocab_size=200).save_pretrained(tmp_path / "other")
    rows = [{**good_row(verb), "prompt": "the w120 cat"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    options = ["--dataset_name", tmp_path / "rows.jsonl", "--model_name_or_path", tmp_path / "other"]
    assert "and the model knows 64 tokens; take the" in refused_tokens(verb, capsys, tmp_path, *options)


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
