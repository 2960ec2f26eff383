"""How the stages read rows: what the chat template takes, texts and conversations, and the line that says it."""

import json

import pytest
from datasets import Dataset

from onetrunk import PPOConfig, RewardModelConfig, cli
from onetrunk.data.prompts import check_completions, prepare_prompts
from onetrunk.models.reward_model import encode_rows
from onetrunk.reward_models.distill import RewardDistillationConfig
from onetrunk.reward_models.training import PairEncoder
from onetrunk.rewards.model import ModelReward
from onetrunk.stages.arguments import (
    ModelArguments,
    PPOArguments,
    PPODataArguments,
    SFTArguments,
    TrainingDataArguments,
)
from onetrunk.stages.distill import DistillArguments
from onetrunk.stages.reward import RewardArguments
from onetrunk.stages.rows import load_prompt_rows, load_training_rows, preference_rows
from onetrunk.stages.sft import as_messages, make_trainer
from tests.chat import CHAT_VOCAB, chat_tokenizer
from tests.models.reward_adapters import a_scorer
from tests.stages.small_runs import error_of, write_rows
from tests.tiny import tiny_model

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
USER = {"role": "user", "content": "Rain in Oslo?"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER, OTHER = ({"role": "assistant", "content": text} for text in ("Yes, rain.", "No."))
FORMS = [TOOLS, json.dumps(TOOLS)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", vocab_size=CHAT_VOCAB, max_position_embeddings=1024).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


def ids_of(messages, **settings):
    return chat_tokenizer().apply_chat_template(messages, return_dict=True, **settings)["input_ids"]


def sft_rows(base, folder, rows, *, check=check_completions):
    """Return the rows that `sft` trains on."""
    data = TrainingDataArguments(dataset_name=str(folder / write_rows(folder / "rows.jsonl", rows)))
    settings = {"report_to": "none", "use_cpu": True, "max_steps": 1}
    args = SFTArguments(output_dir=str(folder / "out"), **settings)
    train, _ = load_training_rows(data, 0, check)
    return make_trainer(args, ModelArguments(model_name_or_path=str(base)), train, None).train_dataset


@pytest.mark.parametrize("tools", FORMS, ids=["list", "JSON"])
def test_sft_trains_on_conversations_with_their_tools_and_calls(base, tmp_path, tools):
    rows = sft_rows(base, tmp_path, [{"messages": [USER, CALLING], "tools": tools, "source": "x"}] * 2)
    assert rows[0]["input_ids"] == ids_of([USER, CALLING], tools=TOOLS)


def test_sft_passes_the_variables_of_a_row_to_the_template(base, tmp_path):
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    row = {"prompt": [USER], "completion": [ANSWER], **thinking}
    rows = sft_rows(base, tmp_path, [row] * 2)
    whole = ids_of([USER, ANSWER], **thinking["chat_template_kwargs"])
    assert rows[0]["input_ids"] == whole
    bad = {**row, "chat_template_kwargs": None}
    with pytest.raises(ValueError, match="row 1: chat_template_kwargs is not a dict"):
        check_completions(Dataset.from_list([row, bad]))


@pytest.mark.parametrize("tools", FORMS, ids=["list", "JSON"])
def test_prompts_and_reward_models_read_the_tools_of_a_row(tools):
    tokenizer = chat_tokenizer()
    prompts = prepare_prompts(Dataset.from_list([{"prompt": [USER], "tools": tools}]), tokenizer)
    assert prompts["prompt_ids"][0] == ids_of([USER], tools=TOOLS, add_generation_prompt=True)
    batch = {"prompt": [[USER]], "chosen": [[ANSWER]], "rejected": [[OTHER]], "tools": [tools]}
    pair = PairEncoder(tokenizer, True)(batch, [0])
    line_end = tokenizer("\n")["input_ids"]
    assert pair["chosen_ids"][0] + line_end == ids_of([USER, ANSWER], tools=TOOLS)
    reward = ModelReward(a_scorer(vocab_size=CHAT_VOCAB, pad_token_id=0), tokenizer, max_length=None)
    columns = {"prompts": [[USER]], "completions": [[ANSWER]]}
    assert reward(**columns, tools=[tools]) != reward(**columns)
    bare, _ = encode_rows(tokenizer, [[USER]], [[ANSWER]], None, True, "rm")
    assert bare[0] + line_end == ids_of([USER, ANSWER])


@pytest.mark.parametrize("verb", ["judge", "prefs"])
def test_a_stage_that_does_not_read_tools_rejects_them(verb, base, empty_folder, capsys):
    row = {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER], "tools": TOOLS}
    write_rows(empty_folder / "rows.jsonl", [row])
    (empty_folder / "rule.py").write_text("def rule(**columns):\n    return [0.5]\n")
    options = ["--judge", "rule", "--rubric", '{"general": "rule.py:rule"}', "--output_dir", "out"]
    options += ["--model_name_or_path", str(base)] if verb == "prefs" else []
    assert cli.main([verb, "--dataset_name", "rows.jsonl", *options]) == 1
    assert "the rows have the column tools" in error_of(capsys)


def test_broken_tools_are_named_with_their_row():
    row = {"messages": [USER, ANSWER], "tools": "[{"}
    with pytest.raises(ValueError, match="row 0: tools is text and not JSON"):
        check_completions(Dataset.from_list([row]))


def test_texts_for_a_chat_model_are_announced_and_can_become_messages(base, tmp_path, capsys):
    row = {"prompt": "Rain?", "completion": "Yes."}
    plain = sft_rows(base, tmp_path, [row] * 2)
    assert "without the chat template" in capsys.readouterr().out
    assert chat_tokenizer().decode(plain[0]["input_ids"]).startswith("Rain?Yes.")
    chat = sft_rows(base, tmp_path, [row] * 2, check=as_messages)
    assert "without the chat template" not in capsys.readouterr().out
    messages = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes."}]
    assert chat[0]["input_ids"] == ids_of(messages)
    with pytest.raises(ValueError, match="text_as_messages reads texts in prompt and completion"):
        as_messages(Dataset.from_list([{"text": "a"}]))


def test_how_pairs_are_read_is_printed(capsys):
    row = {side: f"\n\nHuman: Hi\n\nAssistant: {text}" for side, text in (("chosen", "I am."), ("rejected", "I do."))}
    rows = preference_rows(Dataset.from_list([row]))
    assert rows[0]["prompt"].endswith("Assistant:")
    assert "up to the last answer or word" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("of_class", "of_command"),
    [(PPOConfig, PPOArguments), (RewardModelConfig, RewardArguments), (RewardDistillationConfig, DistillArguments)],
)
def test_a_class_and_its_command_have_the_same_defaults(of_class, of_command, tmp_path):
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    ours, theirs = of_class(**settings).to_dict(), of_command(**settings).to_dict()
    assert {name: theirs[name] for name in ours} == ours
    assert ours["bf16"] is False and SFTArguments(**settings).bf16 is False


def test_no_prompt_of_ppo_is_trained_on_and_held_out(tmp_path):
    name = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"p{i % 10}", "answer": i} for i in range(40)])
    settings = {"dataset_name": str(tmp_path / name), "eval_size": 2}
    train, held_out = load_prompt_rows(PPODataArguments(**settings, reward_funcs=["a.py:b"]), seed=0)
    assert (len(train), len(held_out)) == (32, 8)
    assert not set(train["prompt"]) & set(held_out["prompt"])
    # Rows that an environment makes prompts of may be equal.
    train, held_out = load_prompt_rows(PPODataArguments(**settings, environment="a.py:b"), seed=0)
    assert (len(train), len(held_out)) == (38, 2)
