"""What can fail late is refused before a model loads: no model lies where these commands name one."""

import shutil

import pytest

from onetrunk import cli
from tests.stages.small_runs import OWN, make_material, run, words_of, write_rows
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

NOWHERE = ["--model_name_or_path", "./nowhere"]
STAGES = tuple(OWN)
USER, SAID = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "runs"}
GONE = object()


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    shutil.copytree(folder / "base", folder / "unloadable")
    (folder / "unloadable" / "model.safetensors").write_bytes(b"these are no weights")
    (folder / "nowhere").mkdir()  # A path that is missing would be named first.
    return folder


@pytest.fixture(autouse=True)
def in_folder(material, monkeypatch, tmp_path):
    monkeypatch.chdir(material)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def error(capsys):
    err = capsys.readouterr().err
    assert "Traceback" not in err, err
    return "error: " + err.split("error: ", 1)[1]


# --- rows ------------------------------------------------------------------------------------------------------------

BAD_TEXTS = {
    "missing key": (GONE, "is missing (null)"),
    "null": (None, "is missing (null)"),
    "empty": ("", "is empty or white space only"),
    "white space": (" \n\t", "is empty or white space only"),
    "a number": (3.5, "is of type float, expected text"),
    "a truth value": (True, "is of type bool, expected text"),
    "a list of texts": (["the cat", "a dog"], "is "),
    "a conversation among texts": ([USER], "is "),
    "a NUL character": ("the \0 cat", "holds a NUL character at position 4"),
}
BAD_TURNS = {
    "text among conversations": ("the cat", "is "),
    "null": (None, "is missing (null)"),
    "no messages": ([], "is a conversation without messages"),
    "a message without a role": ([{"content": "a"}], "has a message 0 that is not a {'role', 'content'} dict"),
    "a message without content": ([{"role": "user"}], "has a message 0 (user) whose content is missing"),
    "an unknown role": ([{"role": "usr", "content": "a"}], "has a message 0 with the unknown role 'usr'"),
    "content null": ([{**USER, "content": None}], "has a message 0 (user) whose content is missing"),
    "content of a number": ([{**USER, "content": 3}], "has a message 0 (user) whose content is of type int"),
    "content of blocks": ([{**USER, "content": [{"type": "text", "text": "a"}]}], "whose content is of type list"),
    "blank content": ([{**USER, "content": " "}], "has a message 0 (user) whose content is empty"),
    "the wrong end": ([USER, {"role": "system", "content": "a"}], "ends with a system message"),
}
BAD_PAIRS = {
    "identical": ({"rejected": "runs"}, "chosen and rejected are identical"),
    "a probability above 1": ({"probability": 1.5}, "probability is 1.5, expected a number from 0 to 1"),
    "a negative probability": ({"probability": -0.5}, "probability is -0.5"),
    "no probability": ({"probability": None}, "probability is missing"),
    "a probability that is a text": ({"probability": "high"}, "probability is of type str"),
    "no margin": ({"margin": None}, "margin is missing"),
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


def refused_rows(verb, rows, tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", rows)
    options = ["--dataset_name", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "out"]
    assert run(verb, *NOWHERE, *options) == 1
    return error(capsys)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("kind", [*BAD_TEXTS, *(f"turns: {kind}" for kind in BAD_TURNS)])
@pytest.mark.parametrize("verb", STAGES)
def test_a_bad_row_is_named_before_anything_is_loaded(tmp_path, capsys, verb, kind):
    is_turns = kind.startswith("turns: ")
    value, reason = BAD_TURNS[kind.removeprefix("turns: ")] if is_turns else BAD_TEXTS[kind]
    good = good_row(verb, is_turns)
    column = "prompt"
    bad = {name: entry for name, entry in {**good, column: value}.items() if entry is not GONE}
    said = refused_rows(verb, [good, bad, good], tmp_path, capsys)
    assert "row 1: " in said
    assert f"row 1: {column} {reason}" in said or reason in said


@pytest.mark.parametrize("verb", ["sft", "reward", "distill"])
@pytest.mark.parametrize("kind", BAD_TEXTS)
def test_so_is_a_bad_completion(tmp_path, capsys, verb, kind):
    value, reason = BAD_TEXTS[kind]
    good, column = good_row(verb), "completion" if verb == "sft" else "chosen"
    bad = {name: entry for name, entry in {**good, column: value}.items() if entry is not GONE}
    assert f"row 1: {column} {reason}" in refused_rows(verb, [good, bad, good], tmp_path, capsys)


@pytest.mark.parametrize("verb", ["reward", "distill"])
@pytest.mark.parametrize("kind", BAD_PAIRS)
def test_so_is_a_bad_pair(tmp_path, capsys, verb, kind):
    change, reason = BAD_PAIRS[kind]
    said = refused_rows(verb, [good_row(verb), {**good_row(verb), **change}], tmp_path, capsys)
    assert f"row 1: {reason}" in said


@pytest.mark.parametrize("verb", ["reward", "distill"])
def test_a_pair_without_a_prompt_is_checked_before_one_is_looked_for(tmp_path, capsys, verb):
    rows = [{"chosen": "the cat runs", "rejected": "the cat sleeps"}, {"chosen": None, "rejected": "the cat sleeps"}]
    assert "row 1: chosen is missing" in refused_rows(verb, rows, tmp_path, capsys)


@pytest.mark.parametrize("verb", ["sft", "reward", "distill", "ppo"])
def test_the_number_of_a_row_is_that_of_the_file_where_a_part_is_held_out(tmp_path, capsys, verb):
    rows = [{**good_row(verb), "prompt": f"the cat {i}"} for i in range(10)]
    rows[7]["prompt"] = ""
    write_rows(tmp_path / "rows.jsonl", rows)
    options = ["--dataset_name", tmp_path / "rows.jsonl", "--eval_size", "5", "--output_dir", tmp_path / "out"]
    assert run(verb, *NOWHERE, *options) == 1
    assert "row 7: prompt is empty" in error(capsys)


@pytest.mark.parametrize("verb", ["sft", "reward", "distill", "ppo"])
def test_bad_rows_that_are_held_out_are_said_to_be_of_that_part(tmp_path, capsys, verb):
    write_rows(tmp_path / "good.jsonl", [good_row(verb)])
    write_rows(tmp_path / "bad.jsonl", [{**good_row(verb), "prompt": ""}])
    options = ["--dataset_name", tmp_path / "good.jsonl", "--eval_dataset_name", tmp_path / "bad.jsonl"]
    assert run(verb, *NOWHERE, *options, "--output_dir", tmp_path / "out") == 1
    assert "error: held-out rows: row 0: prompt is empty" in error(capsys)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"prompt": "a"}\n{"prompt": "a \xff"}\n', "rows.jsonl line 2: the byte 0xff is not UTF-8"),
        (b'{"prompt": "a"}\n{"prompt": "a \\ud800"}\n', "rows.jsonl line 2: half of a surrogate pair"),
        (b'{"prompt": "a"}\n{"prompt": "a}\n', "rows.jsonl line 2: "),
        (b'{"prompt": "a"}\n{"prompt": ' + b"[" * 100_000, "rows.jsonl line 2: nested too deeply"),
    ],
)
@pytest.mark.parametrize("verb", STAGES)
def test_what_is_no_text_at_all_is_named_by_its_line(tmp_path, capsys, verb, data, reason):
    (tmp_path / "rows.jsonl").write_bytes(data)
    options = ["--dataset_name", tmp_path / "rows.jsonl", "--output_dir", tmp_path / "out"]
    assert run(verb, *NOWHERE, *options) == 1
    assert reason in error(capsys)


# --- lengths and tokenizers: the model is there, its weights cannot be loaded ----------------------------------------


def refused_tokens(verb, capsys, tmp_path, *options):
    assert run(verb, "--model_name_or_path", "unloadable", "--output_dir", tmp_path / "out", *options) == 1
    return error(capsys)


@pytest.mark.parametrize("verb", ["ppo", "eval", "prefs"])
def test_overlong_prompts_are_counted_before_the_weights_are_read(tmp_path, capsys, verb):
    assert "row 0: prompt has" in refused_tokens(verb, capsys, tmp_path, "--max_prompt_length", "1")
    said = refused_tokens(verb, capsys, tmp_path, "--max_completion_length", "500")
    assert "longest prompt has 2 tokens" in said and "max_completion_length" in said


@pytest.mark.parametrize("verb", STAGES)
def test_conversations_for_a_tokenizer_without_a_template_are_refused(tmp_path, capsys, verb):
    write_rows(tmp_path / "rows.jsonl", [good_row(verb, conversational=True)])
    said = refused_tokens(verb, capsys, tmp_path, "--dataset_name", tmp_path / "rows.jsonl")
    assert "conversations and the tokenizer" in said and "has no chat template" in said


@pytest.mark.parametrize("verb", ["sft", "reward", "distill", "ppo"])
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
    assert "the tokenizer of the reward model" in said and "the folder holds no tokenizer" in said


@pytest.mark.slow
def test_a_tokenizer_without_a_padding_token_pads_with_its_end(material, tmp_path):
    shutil.copytree(material / "base", tmp_path / "base")
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "base")
    for verb in ("sft", "reward", "distill", "ppo"):
        assert run(verb, "--model_name_or_path", tmp_path / "base", "--output_dir", tmp_path / verb) == 0


# --- judges ----------------------------------------------------------------------------------------------------------

SERVER = "http://127.0.0.1:9/v1#model=x"
JUDGED = {
    "prefs": ["--judge", SERVER],
    "eval": ["--judge", SERVER, "--constitution", "principles.yaml", "--opponent", "base"],
    "ppo": ["--judge", SERVER, "--constitution", "principles.yaml", "--reward_funcs", "judge"],
    "ppo, watched": ["--monitor_judge", SERVER, "--monitor_constitution", "principles.yaml"],
}


@pytest.mark.parametrize("kind", JUDGED)
@pytest.mark.sampled(1)
def test_a_judge_that_does_not_answer_is_said_before_the_weights_are_read(tmp_path, capsys, kind):
    verb = kind.split(",")[0]
    words = words_of(verb, "--model_name_or_path", "unloadable", "--output_dir", tmp_path / "out", *JUDGED[kind])
    # The material's judge is a rubric.
    words = words[: words.index("--rubric")] + words[words.index("--rubric") + 2 :] if "--rubric" in words else words
    assert cli.main(words) == 1
    said = error(capsys)
    assert "127.0.0.1:9" in said and "does not answer" in said and "start it, or correct its address" in said
