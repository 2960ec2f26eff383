"""A base made from nothing loads like any other, is the same for the same seed, and refuses what cannot work."""

import pytest
import torch

from onetrunk.models.base_model import load_base, load_tokenizer, stop_token_ids
from onetrunk.models.build import BaseShape, make_base, train_tokenizer

TEXTS = ["the lamp in the kitchen", "the chair in the garden"] * 20
TEMPLATE = "{% for m in messages %}{{ '<|user|>' + m['content'] + eos_token }}{% endfor %}"
SHAPE = BaseShape(vocab_size=300, hidden_size=16, num_layers=3, num_heads=2, max_positions=40)


def make(folder, **settings):
    settings = {"shape": SHAPE, "chat_template": TEMPLATE, "special_tokens": ["<|user|>"], **settings}
    return make_base(TEXTS, folder, **settings)


def test_what_was_made_loads_and_fits_together(tmp_path):
    folder = make(tmp_path / "base")
    model, tokenizer = load_base(str(folder)), load_tokenizer(str(folder))
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (16, 3, 40)
    assert config.vocab_size == len(tokenizer) <= 300 and config.tie_word_embeddings
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert stop_token_ids(tokenizer, model.generation_config) == (1,)
    assert {path.suffix for path in folder.glob("model*")} == {".safetensors"}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the lamp"}])["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|user|>") and ids[-1] == 1
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), len(tokenizer))


@pytest.mark.parametrize("text", ["the lamp", " two  spaces\n", "Größe 漢字 🙂", "never-seen: [42]"])
def test_every_text_decodes_to_itself(text):
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_seed_decides_the_weights_and_nothing_else_is_touched(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    folders = [make(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert torch.equal(torch.rand(1), expected)
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1


def test_a_vocabulary_without_room_for_a_merge_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size 258 is too small: 256 bytes and 3 special tokens"):
        make(tmp_path, shape=BaseShape(vocab_size=258))
