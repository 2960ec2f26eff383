"""PPO whose rollouts come from a vLLM server: a fake one, with a real tiny model behind it."""

import os
import signal
import threading

import pytest
from transformers import TrainerCallback

from onetrunk.rollouts.vllm import VLLMBackend
from tests.ppo import support
from tests.ppo.support import Recorder, StopAt, base_model, logged, make_trainer, prompts, sft_model, trained_weights
from tests.rollouts.stub_vllm import StubVLLM
from tests.servers.stub import wait_until


@pytest.fixture
def stub():
    with StubVLLM(base_model()) as server:
        yield server


@pytest.mark.parametrize(
    ("model", "settings"),
    [("llama", {"adapter_layers": "top-1"}), pytest.param(None, {}, marks=pytest.mark.slow)],
    ids=["top layer", "continued adapter"],
)
def test_ppo_trains_on_samples_of_the_server_without_any_other_change(stub, tmp_path, model, settings):
    recorder, backend = Recorder(), VLLMBackend(stub.url, tmp_path / "adapters")
    run = {"model": model or sft_model(), "num_rollouts": 3, "temperature": 0.8, **settings}
    trainer = support.trained(tmp_path / "run", rollout_backend=backend, callbacks=[recorder], **run)
    gaps = logged(trainer, "sampling/logprob_gap_max")
    # The sampler is the policy at each rollout: at the last one too, after two updates.
    assert len(gaps) == 3 and max(gaps) < 1e-4
    assert len(recorder.gradients) == 3
    assert any("lora_B.default" in name for name in support.differ(trained_weights(trainer.model), recorder.first))
    versions = [name.rsplit("-", 1)[1] for kind, name in stub.events if kind == "load" and "-policy-" in name]
    assert versions == ["v0", "v1", "v2"] and not stub.missing


def test_a_server_that_is_down_is_told_before_the_model_loads(tmp_path):
    backend = VLLMBackend("http://127.0.0.1:9", tmp_path, wait_s=0.2)
    with pytest.raises(RuntimeError, match="vLLM server http://127.0.0.1:9: not ready .*onetrunk serve"):
        make_trainer(tmp_path / "run", rollout_backend=backend)


@pytest.mark.parametrize(
    ("schedule", "staleness"), [("one_step", 1), pytest.param("async", 2, marks=pytest.mark.slow)]
)
def test_settings_alone_sample_on_the_server_also_ahead_of_the_update(stub, tmp_path, schedule, staleness):
    settings = {"use_vllm": True, "vllm_server_base_url": stub.url, "schedule": schedule, "max_staleness": staleness}
    run = {"num_rollouts": 4, "rollout_batch_size": 8, "num_ppo_epochs": 2, "dataset": prompts(16)}
    evaluation = {"eval_dataset": prompts(3), "eval_strategy": "steps", "eval_steps": 3}
    trainer = support.trained(tmp_path, **settings, **run, **evaluation)
    trainer.sampler.backend.close()
    assert trainer.state.global_step == 8 and not stub.missing
    # The first rollout comes from the weights that score it; later ones are as old as the schedule says.
    assert logged(trainer, "sampling/logprob_gap_max")[0] < 1e-4
    expected = [min(staleness, i) for i in range(4)]
    assert logged(trainer, "sampling/staleness") == expected
    shares = logged(trainer, "sampling/effective_sample_size")
    assert len(shares) == 4 and shares[0] == pytest.approx(1, abs=1e-6)
    assert max(logged(trainer, "sampling/logprob_gap_max")) > 1e-4
    # An evaluation samples from the policy of its own step, whatever is under way.
    assert max(logged(trainer, "eval_sampling/logprob_gap_max")) < 1e-4


@pytest.mark.slow
def test_a_resumed_run_ahead_publishes_the_versions_of_its_rollouts_again(stub, tmp_path):
    def run(folder, *callbacks, resume=None):
        settings = {"use_vllm": True, "vllm_server_base_url": stub.url, "schedule": "one_step", "num_rollouts": 4}
        trainer = make_trainer(folder, callbacks=callbacks, num_ppo_epochs=2, **settings)
        trainer.train(resume_from_checkpoint=resume)
        trainer.sampler.backend.close()
        return trained_weights(trainer.model)

    whole = run(tmp_path / "whole")
    run(tmp_path / "stopped", StopAt(3))
    resumed = run(tmp_path / "stopped", resume=True)
    assert all(resumed[name].equal(weight) for name, weight in whole.items())


class HangsAfterStep(TrainerCallback):
    """Lets the server hang after the first step, and sends a SIGTERM once it has been asked for the next rollout."""

    def __init__(self, stub):
        self.stub = stub

    def on_step_end(self, args, state, control, **kwargs):
        self.stub.bodies.clear()
        self.stub.fault = "hang"
        threading.Thread(target=self.interrupt, daemon=True).start()

    def interrupt(self):
        wait_until(lambda: self.stub.bodies)
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_a_rollout_that_waits_for_the_server(stub, tmp_path):
    backend = VLLMBackend(stub.url, tmp_path / "adapters")
    trainer = make_trainer(tmp_path / "run", rollout_backend=backend, num_rollouts=3, callbacks=[HangsAfterStep(stub)])
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == 0 and (tmp_path / "run" / "checkpoint-1").is_dir()
