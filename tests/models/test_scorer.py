"""Tests of `onetrunk.models.reward_model`: what is refused at loading, and scores that padding does not change."""

import json

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from onetrunk.models.reward_model import _batches, encode_texts, load_scorer, score_token_ids
from tests.tiny import tiny_tokenizer

TEXTS = ["the cat runs fast", "dog", "a big red bird sings in the old tree", "no <eos>", "the cat runs fast"]


def config(**overrides):
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(initializer_range=0.25, **{"vocab_size": 64, "num_labels": 1, **fields, **overrides})


def scorer(**overrides):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForSequenceClassification(config(**overrides)).eval()


def one_by_one(model, tokenizer, texts):
    """Score each text alone, unpadded, without onetrunk."""
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[:, 0] for text in texts])


@pytest.mark.parametrize("pad_token_id", [0, 1, None], ids=["own pad", "pad is eos", "no pad"])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_padding_and_batches_do_not_change_a_score(pad_token_id, batch_size):
    model, tokenizer = scorer(pad_token_id=pad_token_id), tiny_tokenizer()
    scores = score_token_ids(model, encode_texts(tokenizer, TEXTS, None)[0], batch_size)
    # float32: another padded width sums in another order.
    torch.testing.assert_close(scores, one_by_one(model, tokenizer, TEXTS), atol=1e-5, rtol=0)
    assert len(set(scores.tolist())) >= 4
    assert model.config.pad_token_id == pad_token_id


def test_without_a_pad_token_the_end_token_is_read_and_not_taken_for_padding():
    model, tokenizer = scorer(), tiny_tokenizer()
    rows = [tokenizer.convert_tokens_to_ids(words.split()) for words in ("no <eos>", "no", "a big red bird")]
    with_end, without, _ = score_token_ids(model, rows, batch_size=3).tolist()
    assert abs(with_end - without) > 1e-3


def test_a_batch_that_holds_the_whole_vocabulary_is_scored_too():
    model = scorer(vocab_size=4)
    rows = [[0, 1, 2, 3], [3, 0], [1]]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])
    torch.testing.assert_close(score_token_ids(model, rows, batch_size=3), expected, atol=1e-5, rtol=0)


def test_an_encoder_scores_the_same_padded():
    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = BertConfig(vocab_size=64, num_labels=1, pad_token_id=0, initializer_range=0.25, **fields)
        model = BertForSequenceClassification(settings).eval()
    tokenizer = tiny_tokenizer()
    rows = tokenizer(TEXTS)["input_ids"]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([row])).logits[:, 0] for row in rows])
    torch.testing.assert_close(score_token_ids(model, rows, batch_size=3), expected, atol=1e-5, rtol=0)


def test_a_long_text_keeps_its_first_special_token_and_its_end():
    tokenizer = tiny_tokenizer()
    names = ["<bos> the cat runs", "the cat runs fast", "a dog"]
    rows, num_shortened = encode_texts(tokenizer, names, 3)
    assert [tokenizer.decode(row) for row in rows] == ["<bos> cat runs", "cat runs fast", "a dog"]
    assert num_shortened == 2
    assert [len(row) for row in encode_texts(tokenizer, names, 1)[0]] == [1, 1, 1]
    assert encode_texts(tokenizer, names, None)[1] == 0
    with pytest.raises(ValueError, match=r"texts at \[1\] have no tokens"):
        encode_texts(tokenizer, ["a", ""], None)


def test_a_checkpoint_whose_head_would_be_random_is_refused_with_the_missing_keys(tmp_path):
    LlamaForCausalLM(config()).save_pretrained(tmp_path / "language_model")
    LlamaForCausalLM(config(num_labels=2)).save_pretrained(tmp_path / "default_labels")
    for name in ("language_model", "default_labels"):
        with pytest.raises(ValueError, match=f"{name}: its checkpoint lacks score.weight, .*newly initialised"):
            load_scorer(tmp_path / name)


def test_what_is_no_scalar_reward_model_is_refused(tmp_path):
    scorer(num_labels=3).save_pretrained(tmp_path / "classes")
    with pytest.raises(ValueError, match="classes has 3 labels; expected a sequence-classification model with 1"):
        load_scorer(tmp_path / "classes")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="adapter is an adapter; merge it"):
        load_scorer(tmp_path / "adapter")
    with pytest.raises(RuntimeError, match="nowhere' cannot be loaded: there is no such folder"):
        load_scorer(tmp_path / "nowhere")


def test_a_batch_is_full_or_ends_where_padding_would_begin_to_cost():
    lengths = [5, 20, 19, 15, 14, 4]
    order = sorted(range(6), key=lambda row: -lengths[row])
    # 15 is 3/4 of 20 and stays with it, 14 is not; 5 and 4 go together.
    assert list(_batches(order, lengths, 16)) == [[1, 2, 3], [4], [0, 5]]
    assert list(_batches(order, lengths, 2)) == [[1, 2], [3, 4], [0, 5]]
    assert list(_batches([], [], 2)) == []
