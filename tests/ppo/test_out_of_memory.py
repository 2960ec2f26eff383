"""What happens when memory runs out: sampling continues with fewer rows at once, an update ends the run."""

import pytest
import torch

from onetrunk.ppo.stream_state import halve
from onetrunk.stages.run_context import run_stage
from tests.ppo.support import base_model, make_trainer, prompts

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


def run(folder, most=None, when=None, **settings):
    trainer = make_trainer(folder, check_memory=False, **{**SHAPE, **SGD, **settings})
    if most is not None:
        failing_above(trainer.model, most, when)
    trainer.train()
    return trainer


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


def test_a_run_that_runs_out_of_memory_in_an_update_ends_with_the_settings_to_lower(tmp_path, capsys):
    trainer = make_trainer(tmp_path, check_memory=False, **SHAPE)
    failing_above(trainer.model, 1, in_update)

    assert run_stage("ppo", lambda words: (trainer.args,), lambda args: trainer.train(), []) == 1
    error = capsys.readouterr().err
    assert "out of memory; lower per_device_train_batch_size" in error and "Traceback" not in error


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_the_halves_of_an_experience_are_its_rows(tmp_path, rows):
    trainer = make_trainer(tmp_path, dataset=prompts(8), rollout_batch_size=rows, per_device_train_batch_size=8)
    experience = trainer.get_train_dataloader().make_rollout()[0]
    parts = halve(experience)
    assert [part.pack.num_rows for part in parts] == [-(-rows // 2), rows // 2]
    assert torch.equal(torch.cat([part.returns for part in parts]), experience.returns)
    assert torch.equal(torch.cat([part.pack.input_ids for part in parts]), experience.pack.input_ids)
