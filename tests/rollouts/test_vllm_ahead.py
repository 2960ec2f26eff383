"""Sampling ahead on a real vLLM server: known versions, each row once, learning."""

import threading

import pytest

from onetrunk.rollouts.vllm import VLLMBackend
from tests import learning
from tests.learning import TASK_B
from tests.ppo.support import logged
from tests.rollouts.test_vllm_server import PATIENT, Serving, served_task_model

pytestmark = pytest.mark.slow

ROLLOUTS, STALENESS = 25, 2


class Recording(VLLMBackend):
    """Keeps which version each row was asked from, and how many calls ran at once."""

    asked, running, most_running, lock = (), 0, 0, threading.Lock()

    def generate_as(self, role, version, prompt_ids, params, keys):
        with self.lock:
            self.asked += tuple((key, version) for key in keys)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        rollout = super().generate_as(role, version, prompt_ids, params, keys)
        with self.lock:
            self.running -= 1
        assert rollout.policy_version == version
        return rollout


def test_async_on_a_real_server_learns_from_samples_of_known_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "reference_model", lambda task, seed: served_task_model(seed))
    model = tmp_path / "model"
    served_task_model(0).save_pretrained(model)
    learning.task_tokenizer(TASK_B).save_pretrained(model)
    best = learning.task_optimum(TASK_B, 0)
    # Fewer positions than the check of the base would like to use.
    server = Serving(model, tmp_path / "serve.log", 16)
    server.start()
    try:
        backend = Recording(server.url, tmp_path / "adapters", policy=PATIENT, keep_versions=4)
        settings = {"num_rollouts": ROLLOUTS, "schedule": "async", "max_staleness": STALENESS}
        trainer = learning.make_trainer(TASK_B, 0, tmp_path / "ahead", rollout_backend=backend, **settings)
        outcome = learning.learn(trainer)
        backend.close()
    finally:
        server.kill()
    rows = trainer.args.rollout_batch_size * trainer.args.num_generations
    asked, slots = dict(backend.asked), trainer.args.steps_per_rollout
    assert len(backend.asked) == len(asked) == ROLLOUTS * rows
    assert all(0 <= key[1] - version // slots <= STALENESS for key, version in asked.items())
    assert backend.most_running > 1
    staleness, gaps = (logged(trainer, f"sampling/{name}") for name in ("staleness_max", "logprob_gap_max"))
    assert staleness[0] == 0 and max(staleness) == STALENESS
    assert gaps[0] < 1e-4  # Rows of the current policy; later ones are from other weights.
    shares = logged(trainer, "sampling/effective_sample_size")
    print(
        f"start {best.start:.3f}, J* {best.objective:.3f}, async {outcome.objective:.3f};"
        f" effective sample size at least {min(shares):.3f}, {backend.most_running} calls at once"
    )
    assert outcome.objective > best.start + 0.6 * (best.objective - best.start)
