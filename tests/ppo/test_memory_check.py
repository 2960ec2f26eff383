"""The largest pack runs before the first rollout, and a run that runs out of memory names the settings to lower."""

import textwrap

import pytest
import torch

from onetrunk.ppo.memory_check import largest_pack
from onetrunk.stages.run_context import run_stage
from tests.ppo import support
from tests.ppo.support import assert_same, make_config, make_trainer, trained, trained_weights
from tests.processes import python


@pytest.mark.parametrize(
    "settings",
    [{"activation_checkpointing": True}, {"bf16": True, "adapter_layers": "top-1", "activation_offloading": True}],
)
def test_it_leaves_no_trace(tmp_path, settings):
    settings = {"num_rollouts": 2, "num_ppo_epochs": 2, "save_strategy": "no", **settings}
    runs = [trained(tmp_path / str(checks), check_memory=checks, **settings) for checks in (True, False)]
    assert_same(*(trained_weights(run.model) for run in runs))
    histories = [support.without_wall_clock(run.state.log_history) for run in runs]
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    ("settings", "rows"), [({}, 2), ({"microbatch_tokens": 17}, 1), ({"microbatch_tokens": 99}, 2)]
)
def test_the_largest_pack_keeps_to_the_budgets(tmp_path, settings, rows):
    pack = largest_pack(make_config(tmp_path, **settings), longest_prompt=5)
    assert pack.input_ids.shape == (rows, 5 + 6) and pack.completion_mask.all() and pack.attention_mask.all()


@pytest.mark.slow
def test_memory_that_does_not_suffice_is_one_sentence_before_any_rollout(tmp_path):
    # In a process of its own, whose address space is bounded once everything has loaded.
    code = f"""
    import resource
    from tests.tiny import tiny_model
    from tests.ppo.support import make_trainer

    class NoRollout:
        def sync(self, model, version): pass
        def generate(self, prompt_ids, params, keys): raise SystemExit("a rollout was asked for")

    trainer = make_trainer({str(tmp_path)!r}, model=tiny_model("llama", max_position_embeddings=2048),
        max_completion_length=2000, rollout_batch_size=64, per_device_train_batch_size=64, rollout_backend=NoRollout())
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, used + 2**25))
    try:
        trainer.train()
    except RuntimeError as error:
        print(error)
    """
    done = python("-c", textwrap.dedent(code), code=None)
    assert "out of memory with the largest pack of this run, 64 rows x 200" in done.stdout, done.stderr[-2000:]
    assert "lower per_device_train_batch_size" in done.stdout


def test_a_run_that_runs_out_of_memory_in_an_update_ends_with_the_settings_to_lower(tmp_path, capsys):
    trainer = make_trainer(tmp_path, check_memory=False)

    def fail(module, args, kwargs):
        if torch.is_grad_enabled() and not kwargs.get("use_cache"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore")

    trainer.model.get_base_model().model.register_forward_pre_hook(fail, with_kwargs=True)
    assert run_stage("ppo", lambda words: (trainer.args,), lambda args: trainer.train(), []) == 1
    error = capsys.readouterr().err
    assert "out of memory; lower per_device_train_batch_size" in error and "Traceback" not in error
