"""Rows that are rejected, prompts that become token ids, completions that become text."""

import json
from functools import partial

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from onetrunk.data.files import load_rows
from onetrunk.data.prompts import check_completions, decode_completion, prepare_prompts, without_written_bos
from onetrunk.ppo.setup import map_style
from tests import chat
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

USER = {"role": "user", "content": "how runs the cat"}
TURN = [USER, {"role": "assistant", "content": "yes"}]
TEXTS, MESSAGES = {"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": TURN[1:]}


def json_rows(tmp_path, *rows):
    """Rows by way of a file, which alone can hold columns of mixed types."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(path)


def chat_tokenizer():
    return tiny_tokenizer(chat_template=CHAT_TEMPLATE)


def test_text_gets_the_special_tokens_of_its_tokenizer_and_other_columns_stay():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    rows = prepare_prompts(Dataset.from_list([{"prompt": "the cat", "solution": {"a": [1, 2]}}]), tokenizer)
    the, cat = tokenizer.convert_tokens_to_ids(["the", "cat"])
    assert rows.to_list() == [{"prompt": "the cat", "solution": {"a": [1, 2]}, "prompt_ids": [2, the, cat]}]


def test_a_conversation_ends_where_the_assistant_starts_to_write():
    tokenizer = chat_tokenizer()
    given = Dataset.from_list([{"prompt": [USER]}, {"prompt": TURN}])
    with pytest.raises(ValueError, match="^row 1: prompt already ends in an answer: .* cut that turn off"):
        prepare_prompts(given, tokenizer)
    rows = prepare_prompts(given, tokenizer, chat_template_kwargs={"continue_final_message": True})
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in rows["prompt_ids"]]
    opening = ["<user>", "how", "runs", "the", "cat", "<assistant>"]
    assert tokens == [opening, [*opening, "yes"]]
    assert rows["prompt"] == [[USER], TURN]


def test_keys_that_only_some_messages_have_do_not_reach_the_template():
    # Arrow fills them with null.
    named = {"role": "user", "content": "cat", "name": "moon"}
    rows = Dataset.from_list([{"prompt": [named]}, {"prompt": [USER]}])
    template = "{% for m in messages %}{{ m['content'] }}{{ ' name' if 'name' in m else '' }}{% endfor %}"
    lengths = [len(ids) for ids in prepare_prompts(rows, tiny_tokenizer(chat_template=template))["prompt_ids"]]
    assert lengths == [2, 4]  # "cat name", "how runs the cat"


@pytest.mark.parametrize(
    ("rows_of", "arguments"),
    [
        (Dataset.from_list, ({"city": 1}, {"day": 1})),
        (partial(map_style, name="train_dataset"), ({"city": 1}, {"city": "b"})),
    ],
)
def test_a_call_in_a_prompt_has_its_own_arguments(rows_of, arguments):
    calls = [{"type": "function", "function": {"name": "f", "arguments": own}} for own in arguments]
    answer = {"role": "tool", "name": "f", "content": "2"}
    given = [[USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer] for call in calls]
    tokenizer = chat.chat_tokenizer("qwen2_5")
    rows = prepare_prompts(rows_of([{"prompt": prompt} for prompt in given]), tokenizer)
    expected = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in given]
    assert tokenizer.batch_decode(list(rows["prompt_ids"])) == expected


def test_a_text_that_begins_with_bos_gets_no_second_one():
    rows = Dataset.from_dict({"prompt": ["<bos> the cat", "the cat"]})
    tokenizer = tiny_tokenizer()
    assert prepare_prompts(rows, tokenizer)["prompt_ids"][0][:1] == [2]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    first, second = prepare_prompts(rows, tokenizer)["prompt_ids"]
    assert list(first) == list(second) and list(first).count(2) == 1


def test_rows_for_fine_tuning_lose_a_bos_that_the_tokenizer_adds_again():
    tokenizer = tiny_tokenizer()
    rows = Dataset.from_dict({"prompt": ["<bos>the cat", "a dog"], "completion": ["runs", "sings"]})
    assert without_written_bos(rows, tokenizer)["prompt"] == ["<bos>the cat", "a dog"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    assert without_written_bos(rows, tokenizer)["prompt"] == ["the cat", "a dog"]
    assert without_written_bos(Dataset.from_dict({"text": ["<bos>a"]}), tokenizer)["text"] == ["a"]
    chat = Dataset.from_dict({"messages": [[USER]]})
    assert without_written_bos(chat, tokenizer) is chat


def test_overlong_prompts_are_refused_dropped_or_cut_at_the_front(caplog):
    rows = Dataset.from_list([{"prompt": "the cat runs", "i": 0}, {"prompt": "a dog", "i": 1}])
    tokenizer = tiny_tokenizer()
    with pytest.raises(
        ValueError, match="^1 of 2 prompts are longer than max_prompt_length 2, and the longest, row 0, has 3"
    ):
        prepare_prompts(rows, tokenizer, max_prompt_length=2)
    dropped = prepare_prompts(rows, tokenizer, max_prompt_length=2, overlong_prompts="drop")
    assert dropped["i"] == [1]
    assert "dropped 1 of 2 prompts" in caplog.text
    cut = prepare_prompts(rows, tokenizer, max_prompt_length=2, overlong_prompts="truncate")
    assert tokenizer.batch_decode(list(cut["prompt_ids"])) == ["cat runs", "a dog"]
    assert cut["prompt"] == ["the cat runs", "a dog"]
    with pytest.raises(ValueError, match="all 2 prompts are longer"):
        prepare_prompts(rows, tokenizer, max_prompt_length=1, overlong_prompts="drop")


BAD_PROMPTS = {
    "null": ("the cat", None, "is missing"),
    "white space": ("the cat", " \n\t", "is empty or white space"),
    "a conversation among texts": ("the cat", [USER], "is a conversation where the first row is text"),
    "text among conversations": ([USER], "the cat", "is text where the first row is a conversation"),
    "no messages": ([USER], [], "is a conversation without messages"),
    "no content": ([USER], [USER, {"role": "user"}], r"message 1 \(user\) whose content is missing"),
    "content of blocks": ([USER], [{**USER, "content": [{"type": "text"}]}], "whose content is of type list"),
    "the system alone": ([USER], [{"role": "system", "content": "be good"}], "ends with a system message"),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_a_bad_prompt_is_named_with_its_row_and_reason(tmp_path, kind):
    good, bad, reason = BAD_PROMPTS[kind]
    rows = json_rows(tmp_path, {"prompt": good}, {"prompt": bad})
    with pytest.raises(ValueError, match=rf"^row 1: prompt .*{reason}"):
        prepare_prompts(rows, chat_tokenizer())


CONVERSATIONS = {"prompt": [[USER], [{"role": "system", "content": "be good"}, USER]]}
REFUSING = "{{ raise_exception('no system role here') if messages[0]['role'] == 'system' else 'cat' }}"


@pytest.mark.parametrize(
    ("columns", "template", "settings", "message"),
    [
        (CONVERSATIONS, REFUSING, {}, "row 1: prompt is rejected by .* no system role here"),
        (CONVERSATIONS, "{{ '' }}", {}, "row 0: prompt becomes zero tokens"),
        (CONVERSATIONS, None, {}, "no chat template; set tokenizer.chat_template"),
        (CONVERSATIONS, CHAT_TEMPLATE, {"max_prompt_length": 0}, "max_prompt_length must be at least 1"),
        (CONVERSATIONS, CHAT_TEMPLATE, {"overlong_prompts": "cut"}, "overlong_prompts must be"),
        ({"question": ["a"]}, None, {}, "no column 'prompt', only question"),
        ({"prompt": []}, None, {}, "holds no rows"),
        ({"prompt": ["a"], "completions": [1]}, None, {}, "the columns completions have names"),
    ],
)
def test_what_cannot_become_prompts_is_refused(columns, template, settings, message):
    with pytest.raises(ValueError, match=message):
        prepare_prompts(Dataset.from_dict(columns), tiny_tokenizer(chat_template=template), **settings)


def test_rows_for_fine_tuning_of_each_kind_pass():
    for row in (TEXTS, MESSAGES, {"messages": TURN}, {"text": "a"}):
        assert check_completions(Dataset.from_list([{**row, "other": 1}])).to_list() == [row]


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        (TEXTS, {**TEXTS, "completion": ""}, "completion is empty"),
        (TEXTS, {**TEXTS, "completion": [USER]}, "completion is of type list"),
        (MESSAGES, {**MESSAGES, "completion": [USER]}, "completion ends with a user"),
        ({"messages": TURN}, {"messages": [USER]}, "messages has no message of the assistant"),
        ({"text": "a"}, {"text": "  "}, "text is empty"),
    ],
)
def test_a_bad_row_for_fine_tuning_is_named_with_its_reason(tmp_path, good, bad, reason):
    with pytest.raises(ValueError, match=rf"^row 1: {reason}"):
        check_completions(json_rows(tmp_path, good, bad))


def test_a_dataset_without_completions_is_refused():
    with pytest.raises(ValueError, match="has the columns prompt; expected prompt and completion"):
        check_completions(Dataset.from_list([{"prompt": "a"}]))


def test_a_completion_is_decoded_in_the_form_of_its_prompt():
    tokenizer = tiny_tokenizer()
    cat, runs, stop, eos = tokenizer.convert_tokens_to_ids(["cat", "runs", ".", "<eos>"])
    assert decode_completion(tokenizer, [cat, runs, eos], True, "the") == "cat runs"
    assert decode_completion(tokenizer, [cat, eos, runs], False, "the") == "cat runs"
    # A stop token that is an ordinary word ends the completion and is no part of its text.
    assert decode_completion(tokenizer, [cat, stop], True, "the") == "cat"
    assert decode_completion(tokenizer, [cat, stop], False, "the") == "cat ."
    assert decode_completion(tokenizer, [eos], True, "the") == ""
    assert decode_completion(tokenizer, [cat, eos], True, [USER]) == [{"role": "assistant", "content": "cat"}]
