"""A reward model reads prompt and completion in its own language."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model

from onetrunk.ppo.setup import ModelInputs, resolve_rewards
from onetrunk.rewards import ModelReward
from tests.models.reward_adapters import a_scorer
from tests.tiny import tiny_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ ' <' + m['role'] + '> ' + m['content'] }}{% endfor %}{{ ' <eos>' }}"
)
USER = {"role": "user", "content": "the cat runs"}


def scorer(**overrides):
    return a_scorer(**{"pad_token_id": 0, "max_position_embeddings": 32, **overrides})


def read(model, tokenizer, words):
    """Score one text straight from its words, without onetrunk."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokenizer.convert_tokens_to_ids(words.split())])).logits[0, 0].item()


def assistant(text):
    return [{"role": "assistant", "content": text}]


def test_plain_text_is_prompt_and_completion_in_one_read_by_the_models_tokenizer_and_not_the_policys(tmp_path):
    model, own = scorer(vocab_size=80), tiny_tokenizer(80)
    model.save_pretrained(tmp_path / "scorer")
    own.save_pretrained(tmp_path / "scorer")
    reward = ModelReward(tmp_path / "scorer")
    assert reward.__name__ == "scorer"
    # Ids of the policy are other ids, and are not looked at.
    scores = reward(prompts=["the cat", "a"], completions=[" w1", " fast dog sings"], completion_ids=[[3, 3, 3], [2]])
    assert own.convert_tokens_to_ids("w1") >= 64
    expected = [read(model, own, "the cat w1"), read(model, own, "a fast dog sings")]
    assert scores == pytest.approx(expected, abs=1e-5)  # float32, another padded width
    assert reward(prompts=[], completions=[]) == []


def test_conversations_go_through_the_models_own_template():
    model, tokenizer = scorer(), tiny_tokenizer(chat_template=TEMPLATE)
    reward = ModelReward(model, tokenizer)
    [score] = reward(prompts=[[USER]], completions=[assistant("yes")])
    assert score == pytest.approx(read(model, tokenizer, "<bos> <user> the cat runs <assistant> yes <eos>"), abs=1e-5)
    # A prompt that opens the assistant's message is continued, not followed by a second message.
    [score] = reward(prompts=[[USER, *assistant("no")]], completions=[assistant(" please")])
    expected = read(model, tokenizer, "<bos> <user> the cat runs <assistant> no please <eos>")
    assert score == pytest.approx(expected, abs=1e-5)


def test_long_texts_keep_the_completion_and_are_counted_with_one_warning(caplog):
    model, tokenizer = scorer(), tiny_tokenizer(chat_template=TEMPLATE)
    reward = ModelReward(model, tokenizer, max_length=4)
    prompts, completions = [[USER], [USER]], [assistant("red fish"), assistant("yes")]
    with caplog.at_level(logging.WARNING):
        scores = reward(prompts=prompts, completions=completions)
        reward(prompts=prompts, completions=completions)
    assert scores[0] == pytest.approx(read(model, tokenizer, "<bos> red fish <eos>"), abs=1e-5)
    assert [record.message for record in caplog.records] == [
        "reward model LlamaForSequenceClassification: 2 of 2 texts had more than max_length 4 tokens and lost their "
        "beginning; later ones are only counted, in num_shortened"
    ]
    assert reward.num_shortened == 4


def test_the_limit_is_the_models_own_unless_given():
    assert ModelReward(scorer(), tiny_tokenizer()).max_length == 32
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 16
    assert ModelReward(scorer(), tokenizer).max_length == 16
    assert ModelReward(scorer(), tokenizer, max_length=8).max_length == 8
    with pytest.raises(ValueError, match="max_length 33 is more than the 16 tokens"):
        ModelReward(scorer(), tokenizer, max_length=33)


def test_a_model_with_an_adapter_scores_with_it():
    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.5, "init_lora_weights": False}
    model = get_peft_model(scorer(), LoraConfig(task_type="SEQ_CLS", **settings))
    tokenizer = tiny_tokenizer()
    inputs = ModelInputs("base", [model], reward_tokenizers=[tokenizer])
    [reward] = resolve_rewards(inputs, "cpu", "base", tokenizer)
    # As every reward adapter it reads its score at the end token.
    expected = read(model.eval(), tokenizer, "the cat runs <eos>")
    assert reward(prompts=["the cat"], completions=[" runs"]) == pytest.approx([expected], abs=1e-5)
    assert expected != pytest.approx(read(scorer(), tokenizer, "the cat runs <eos>"), abs=1e-2)


def test_pieces_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="needs its tokenizer; give tokenizer="):
        ModelReward(scorer())
    with pytest.raises(ValueError, match="batch_size 0 and max_length None must be at least 1"):
        ModelReward(scorer(), tiny_tokenizer(), batch_size=0)
    with pytest.raises(ValueError, match="has no chat template; set tokenizer.chat_template"):
        ModelReward(scorer(), tiny_tokenizer())(prompts=[[USER]], completions=[assistant("yes")])
