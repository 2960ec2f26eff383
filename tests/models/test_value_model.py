"""The trained value function outside of training: the values of the trainer, and of the folder it has saved."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from onetrunk import load_value_model
from tests.models.reward_adapters import saved_base
from tests.ppo.support import make_trainer, trained
from tests.tiny import tiny_tokenizer

PROMPTS = ["a dog", "the red sun", "a small bird sings"]
COMPLETIONS = ["sees a black river", "yes", ""]


def test_the_values_of_a_saved_run_are_those_of_its_trainer_one_per_token_and_row_by_row(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(saved_base(tmp_path / "base", num_hidden_layers=2))
    trainer = trained(tmp_path / "run", model=model, num_rollouts=2, value_learning_rate=0.1)
    trainer.save_model()
    values = trainer.values(PROMPTS, COMPLETIONS)
    # An EOS token follows each completion.
    assert [len(row) for row in values] == [len(text.split()) + 1 for text in COMPLETIONS]
    assert any(row.abs().max() > 1e-3 for row in values)
    loaded = load_value_model(tmp_path / "run")
    for row, again in zip(values, loaded.values(PROMPTS, COMPLETIONS, batch_size=1), strict=True):
        torch.testing.assert_close(row, again, atol=1e-5, rtol=1e-5)


def test_what_has_no_value_head_or_unequal_columns_says_so(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no adapter with value_head.safetensors"):
        load_value_model(tmp_path)
    with pytest.raises(ValueError, match="2 prompts and 1 completions"):
        make_trainer(tmp_path / "run").values(["a", "b"], ["c"])
