"""What happens when memory runs out: the run ends, and its message names the settings to lower."""

import pytest
import torch

from onetrunk.ppo.stream_state import halve
from onetrunk.stages.run_context import run_stage
from tests.ppo.support import make_trainer, prompts

# One optimizer step over packs of up to 4 rows.
SHAPE = {"rollout_batch_size": 8, "per_device_train_batch_size": 4, "num_ppo_epochs": 2, "num_rollouts": 2}


def failing_above(model, most, when):
    """Let the decoder fail as a full GPU does, where it is given more than `most` rows."""

    def check(module, args, kwargs):
        rows = (args[0] if args else kwargs["input_ids"]).shape[0]
        if rows > most and when(module, kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore")

    model.get_base_model().model.register_forward_pre_hook(check, with_kwargs=True)


def in_update(module, kwargs):
    return torch.is_grad_enabled() and not kwargs.get("use_cache")


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
