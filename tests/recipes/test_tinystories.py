"""tinystories-260k: the converter against a naive reading of llama2.c's formats, the rewards by hand, the chain."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipes.llama2c import NaiveLlama, encode, write_checkpoint, write_tokenizer
from tests.recipes.pretrained import run_stages
from tests.stages.recipes import load_recipe_module
from tests.stages.small_runs import write_rows

prepare = load_recipe_module("tinystories-260k", "prepare")
rewards = load_recipe_module("tinystories-260k", "rewards")
# As stories260K: more heads than key-value heads, a hidden size that is no multiple of the width; but narrower.
HEADER = (32, 84, 3, 8, 4, 320, 64)
TEXTS = [
    "The cat sat on the mat. The dog saw the cat and ran.",
    "A girl named Ann had a red ball. She gave it to Ben.",
]


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    """A checkpoint and a tokenizer in the formats of llama2.c, with random weights."""
    write_checkpoint(tmp_path / "model.bin", HEADER)
    write_tokenizer(tmp_path / "tok.bin", TEXTS, HEADER[5])
    return tmp_path / "model.bin", tmp_path / "tok.bin"


@pytest.mark.parametrize("vocab", [320, -320], ids=["tied", "untied"])
def test_the_converted_model_gives_the_logits_of_a_naive_reading(tmp_path, vocab):
    path = tmp_path / "model.bin"
    write_checkpoint(path, (*HEADER[:5], vocab, HEADER[6]), seed=1)
    model = prepare.convert_model(path)
    ids = np.random.default_rng(0).integers(0, 320, 40).tolist()
    expected = NaiveLlama(path).logits(ids)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    # float32 against float64; a head that rotates otherwise is off by more than 1.
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    assert expected.std() > 0.5
    assert model.config.tie_word_embeddings == (vocab > 0)


def test_the_converted_tokenizer_merges_as_llama2_c_does(files):
    _, path = files
    tokenizer = prepare.convert_tokenizer(path, 64)
    others = ["cat", " two  spaces", "Ben's caf\u00e9, \u65e5 and\na line", "THE END!", "aaaaaaa nnnn"]
    for text in [*TEXTS, *others]:
        ids = tokenizer(text).input_ids
        assert ids == encode(path, text), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_rewards_by_hand():
    texts = ["A cat saw two Dogs. The cat ran.", "Cats, a dog, a fish and a frog!", "She liked cattle.", ""]
    # cat and dog: 2 of 3; four animals count as three; cattle is none.
    assert rewards.animals(None, texts) == pytest.approx([2 / 3, 1, 0, 0])
    # a cat saw two dogs the ran: 7 different of 8; cats a dog fish and frog: 6 of 8.
    assert rewards.variety(None, texts) == pytest.approx([7 / 8, 6 / 8, 1, 0])


@pytest.mark.slow
def test_the_chain_runs_from_the_files_of_llama2_c_to_stories_before_and_after(files, workplace, monkeypatch):
    monkeypatch.setattr("sys.argv", ["prepare.py", "--checkpoint", str(files[0]), "--tokenizer", str(files[1])])
    assert prepare.main() == 0
    runs = workplace / "runs/tinystories-260k"
    tokenizer = AutoTokenizer.from_pretrained(runs / "base")
    assert len(tokenizer) == AutoModelForCausalLM.from_pretrained(runs / "base").config.vocab_size == HEADER[5]
    rows = [json.loads(line) for line in (runs / "held_out.jsonl").read_text().splitlines()]
    # This tokenizer was made from two sentences: other prompts are too long for 64 positions.
    for name in ("prompts", "held_out"):
        write_rows(runs / f"{name}.jsonl", [{"prompt": text} for text in TEXTS * 2])
    few = "--max_completion_length 8"
    # This random model names no animals.
    ppo = f"{few} --num_rollouts 1 --rollout_batch_size 8 --num_minibatches 1 --reward_weights 0 1"
    metrics = run_stages("tinystories-260k", {"ppo": ppo, "eval": few})
    assert {"score/animals", "score/variety"} <= set(metrics["reference"]) and metrics["policy"]["kl/ref"] != 0
    assert len(rows) == prepare.HELD_OUT
