"""Where memory runs out a pack is cut: weights, scores and completions are those of a run that had enough."""

import logging

import pytest
import torch

from onetrunk.models.trunk import PackOutput
from onetrunk.ppo.memory import join_rows, split_rows
from tests.ppo.support import assert_same, base_model, logged, make_trainer, prompts, trained_weights

# One optimizer step over packs of up to 4 rows. SGD: weights are linear in the gradient.
SHAPE = {"rollout_batch_size": 8, "per_device_train_batch_size": 4, "num_ppo_epochs": 2, "num_rollouts": 2}
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}


def failing_above(model, most, when):
    """Let the decoder fail as a full GPU does, where it is given more than `most` rows."""

    def check(module, args, kwargs):
        rows = (args[0] if args else kwargs["input_ids"]).shape[0]
        if rows > most and when(module, kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore")

    model.get_base_model().model.register_forward_pre_hook(check, with_kwargs=True)


def in_update(module, kwargs):
    return torch.is_grad_enabled() and not kwargs.get("use_cache")


def in_scoring(module, kwargs):
    return not torch.is_grad_enabled() and not kwargs.get("use_cache")


def in_sampling(module, kwargs):
    return bool(kwargs.get("use_cache"))


def run(folder, most=None, when=None, **settings):
    trainer = make_trainer(folder, check_memory=False, **{**SHAPE, **SGD, **settings})
    if most is not None:
        failing_above(trainer.model, most, when)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"adapter_layers": "top-1", "trunk_cache": "cpu"}, {"value_head": "adapter"}]
)
@pytest.mark.parametrize(("when", "most"), [(in_update, 1), (in_update, 3), (in_scoring, 2)])
def test_less_memory_gives_the_same_run(tmp_path, caplog, settings, when, most):
    whole = run(tmp_path / "whole", **settings)
    halved = run(tmp_path / "halved", most, when, **settings)
    assert_same(trained_weights(halved.model), trained_weights(whole.model), atol=1e-6, rtol=1e-5)
    for name in ("policy/loss", "value/loss", "kl/ref", "policy/clip_fraction", "score/mean"):
        assert logged(halved, name) == pytest.approx(logged(whole, name), abs=1e-5), name
    size = halved.pack_size if when is in_update else halved._stream.scorer.pack_size
    assert size.num_halvings == {1: 2, 2: 1, 3: 1}[most] and size.most_rows <= most
    assert set(logged(halved, "memory/halvings")) == {size.num_halvings} and not logged(whole, "memory/halvings")
    said = [r.getMessage() for r in caplog.records if "out of memory in the" in r.getMessage()]
    assert len(said) == size.num_halvings and "Tried to allocate 1.00 GiB.)" in said[0] and "\n" not in said[0]
    assert f"Set per_device_train_batch_size to {size.most_rows}" in said[-1]


@pytest.mark.slow
def test_completions_are_the_same_however_many_rows_decode_at_once(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    whole, halved = run(tmp_path / "whole"), run(tmp_path / "halved", 3, in_sampling)
    assert logged(halved, "score/mean") == logged(whole, "score/mean")
    assert logged(halved, "completion/length") == logged(whole, "completion/length")
    assert_same(trained_weights(halved.model), trained_weights(whole.model), atol=1e-6, rtol=1e-5)
    assert halved.sampler.backend.max_rows == 2
    assert "8 rows that decode at once" in caplog.text and "at most 4, with the same completions" in caplog.text


def test_rows_that_finished_before_memory_ran_out_stay(tmp_path):
    model = base_model()
    trainer = make_trainer(tmp_path, model=model, max_completion_length=12, check_memory=False, rollout_batch_size=8)
    trainer.sampler.backend.sync(trainer.model, 0)
    whole = trainer.sampler.generate(trainer.get_train_dataloader().prompts(0))
    calls = []

    def fails_late(module, args, kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )

    trainer.model.get_base_model().model.register_forward_pre_hook(fails_late, with_kwargs=True)
    again = trainer.sampler.generate(trainer.get_train_dataloader().prompts(0))
    assert len(calls) > 6 and again.completion_ids == whole.completion_ids


@pytest.mark.sampled(1)
@pytest.mark.parametrize("when", [in_update, in_scoring, in_sampling])
def test_one_row_that_does_not_fit_is_one_sentence(tmp_path, when):
    with pytest.raises(
        RuntimeError, match=r"(out of memory in|the memory does not hold) .* one row.*; lower max_completion_length"
    ):
        run(tmp_path, 0, when)


def test_another_error_is_not_taken_for_a_lack_of_memory(tmp_path):
    trainer = make_trainer(tmp_path, check_memory=False)

    def fails(module, args, kwargs):
        if torch.is_grad_enabled():
            raise RuntimeError("shapes do not match")

    trainer.model.get_base_model().model.register_forward_pre_hook(fails, with_kwargs=True)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.train()
    assert trainer.pack_size.num_halvings == 0


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_parts_of_an_experience_are_its_rows(tmp_path, most):
    trainer = make_trainer(tmp_path, dataset=prompts(8), rollout_batch_size=8, per_device_train_batch_size=8)
    stream = trainer.get_train_dataloader()
    experience = stream.make_rollout()[0]
    parts = split_rows(experience, most)
    assert [part.pack.num_rows for part in parts][:-1] == [most] * (len(parts) - 1)
    assert torch.equal(torch.cat([part.returns for part in parts]), experience.returns)
    assert torch.equal(torch.cat([part.pack.input_ids for part in parts]), experience.pack.input_ids)
    outputs = [PackOutput(logprobs=part.old_logprobs, next_values=part.returns[:, 0]) for part in parts]
    joined = join_rows(outputs)
    assert torch.equal(joined.logprobs, experience.old_logprobs) and joined.values is None
    assert torch.equal(joined.next_values, experience.returns[:, 0])
