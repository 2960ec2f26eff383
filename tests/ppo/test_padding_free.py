"""padding_free in a run: the same training, fewer forwards, exact resume, and a message where it cannot work."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from onetrunk.models.base_model import backbone
from tests.ppo.support import SGD, assert_same, logged, make_trainer, trained_weights, whole_and_resumed
from tests.tiny import WORDS

SHAPE = {"rollout_batch_size": 8, "num_ppo_epochs": 2, "num_rollouts": 2, "num_minibatches": 2}
BUDGET = {"per_device_train_batch_size": 8, "microbatch_tokens": 23}
TOP = {"adapter_layers": "top-1"}


def run(folder, **settings):
    """Return a trained trainer; its `update_forwards` are the shapes of the ids of every forward of the update."""
    trainer = make_trainer(folder, check_memory=False, **{**SHAPE, **SGD, **settings})
    trainer.update_forwards = []

    def note(_module, _args, kwargs):
        if torch.is_grad_enabled() and not kwargs.get("use_cache"):
            trainer.update_forwards.append(tuple(kwargs["input_ids"].shape))

    backbone(trainer.model).register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    return trainer


def test_a_run_without_padding_trains_the_same_in_fewer_forwards(tmp_path):
    # Prompts of 1 and 24 words: a long row and a short one fit 40 tokens, padded ones do not.
    texts = [" ".join(WORDS[i : i + (24 if i % 2 else 1)]) for i in range(16)]
    shape = {"dataset": Dataset.from_dict({"prompt": texts}), "rollout_batch_size": 16, "num_minibatches": 1}
    shape |= {"per_device_train_batch_size": 16, "microbatch_tokens": 40}
    shape |= {**TOP, "trunk_cache": "cpu", "activation_checkpointing": True}
    padded, packed = (run(tmp_path / str(free), padding_free=free, **shape) for free in (False, True))
    assert_same(trained_weights(packed.model), trained_weights(padded.model), atol=1e-6, rtol=1e-5)
    for name in ("score/mean", "policy/loss", "value/loss", "kl/ref", "completion/length"):
        assert logged(packed, name) == pytest.approx(logged(padded, name), abs=1e-5), name
    assert logged(packed, "policy/ratio_max")[::2] == [1.0, 1.0]  # The first pass over each rollout.
    # microbatch_tokens bounds real tokens: one sequence in each forward, and fewer of them.
    assert all(rows == 1 and width <= 40 for rows, width in packed.update_forwards)
    assert max(rows for rows, _ in padded.update_forwards) > 1
    assert len(packed.update_forwards) < len(padded.update_forwards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {**TOP, "capture_trunk_states": True}, {**TOP, "capture_trunk_states": False}]
)
def test_a_run_resumes_to_the_bit_in_the_middle_of_a_rollout(tmp_path, settings):
    settings = {**SHAPE, **BUDGET, "padding_free": True, **settings}
    whole_and_resumed(lambda name: make_trainer(tmp_path / name, **settings), 6)


def test_a_model_that_mixes_rows_is_rejected_before_training_starts(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
    config = AutoConfig.for_model("opt", word_embed_proj_dim=32, **sizes)
    make_trainer(tmp_path, model=AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match="padding_free is not possible with OPTForCausalLM .* a row sees the rows"):
        make_trainer(tmp_path, model=AutoModelForCausalLM.from_config(config), padding_free=True)
