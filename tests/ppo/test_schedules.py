"""Sampling ahead of the update: what equals sync, which version samples what, resuming, stopping, learning.

The sampler has a copy of the trunk, as a server would. SLOTS optimizer steps belong to a rollout.
"""

import threading
import time

import pytest
from peft import LoraConfig

from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rollouts.async_sampler import StartedRow
from onetrunk.utils.randomness import EVALUATION_STREAM
from tests import learning
from tests.fakes import CannedBackend, CopyBackend
from tests.learning import TASK_A, TASK_B
from tests.ppo import support
from tests.ppo.support import assert_same, base_model, logged, lora, prompts, trained_weights, without_wall_clock

SLOTS, ROWS, ROLLOUTS = 4, 8, 5
SHAPE = {"num_rollouts": ROLLOUTS, "num_ppo_epochs": 2, "num_minibatches": 2, "rollout_batch_size": ROWS}
LONG_S = 120


def sampler(**settings):
    return CopyBackend(TrunkModel(base_model(), lora()), **settings)


def ahead(folder, backend, schedule="one_step", **settings):
    settings = {**SHAPE, "schedule": schedule, **settings}
    return support.make_trainer(folder, dataset=prompts(16), rollout_backend=backend, check_memory=False, **settings)


def versions_by_rollout(backend):
    """Return {rollout: versions that sampled its rows}, and check that each row was sampled once."""
    calls = [(version, key) for _, version, keys in backend.calls for key in keys]
    rows = [(key, version) for version, key in calls if key[1] != EVALUATION_STREAM]
    assert len(rows) == len(set(key for key, _ in rows)), "a row was sampled twice"
    found = {}
    for (_, iteration, _), version in rows:
        found.setdefault(iteration, set()).add(version)
    assert all(sum(key[1] == i for key, _ in rows) == ROWS for i in found)
    return found


# --- which version samples what --------------------------------------------------------------------------------


def test_async_without_staleness_equals_sync_bit_for_bit(tmp_path):
    settings = {"normalize_scores": True, "kl_target": 0.1, "eval_dataset": prompts(3), "eval_strategy": "steps"}
    settings |= {"eval_steps": 3, "max_staleness": 0}
    sync, other = (ahead(tmp_path / name, sampler(), name, **settings) for name in ("sync", "async"))
    for trainer in (sync, other):
        trainer.train()
    assert_same(trained_weights(other.model), trained_weights(sync.model))
    history = without_wall_clock(other.state.log_history)
    extra = [{k: entry.pop(k) for k in list(entry) if k.startswith("sampling/staleness")} for entry in history]
    assert history == without_wall_clock(sync.state.log_history)
    fresh = {"sampling/staleness": 0.0, "sampling/staleness_max": 0.0}
    assert [entry for entry in extra if entry] == [fresh] * ROLLOUTS


@pytest.mark.slow
def test_one_step_samples_the_next_rollout_from_the_weights_before_the_update_and_none_beyond_the_last(tmp_path):
    backend = sampler(keeps=3)
    trainer = ahead(tmp_path, backend)
    trainer.train()
    assert versions_by_rollout(backend) == {0: {0}, 1: {0}, 2: {4}, 3: {8}, 4: {12}}
    assert len(backend.calls) == ROLLOUTS
    assert logged(trainer, "sampling/staleness") == logged(trainer, "sampling/staleness_max") == [0, 1, 1, 1, 1]
    # Old samples: weights differ from 1, and in the first rollout they do not.
    shares = logged(trainer, "sampling/effective_sample_size")
    assert shares[0] == pytest.approx(1, abs=1e-6) and 0 < min(shares) < 1 - 1e-6
    again = ahead(tmp_path / "again", sampler())
    again.train()
    assert_same(trained_weights(again.model), trained_weights(trainer.model))


class Jittery(CopyBackend):
    """Takes its time, another one for every call."""

    def generate_as(self, role, version, prompt_ids, params, keys):
        time.sleep(0.02 * (hash(tuple(keys)) % 5))
        return super().generate_as(role, version, prompt_ids, params, keys)


@pytest.mark.slow
@pytest.mark.parametrize("max_rollout_rows", [None, 3])
def test_async_uses_each_row_once_within_the_staleness_and_can_be_replayed(tmp_path, max_rollout_rows):
    settings = {"max_staleness": 2, "max_rollout_rows": max_rollout_rows}
    backend = Jittery(TrunkModel(base_model(), lora()), keeps=4)
    trainer = ahead(tmp_path / "first", backend, "async", **settings)
    trainer.train()
    versions = versions_by_rollout(backend)
    assert sorted(versions) == list(range(ROLLOUTS))
    assert all(0 <= i - v // SLOTS <= 2 for i, found in versions.items() for v in found)
    assert max(logged(trainer, "sampling/staleness_max")) <= 2
    if max_rollout_rows is None:  # Then all rows start as soon as they may.
        assert versions == {0: {0}, 1: {0}, 2: {0}, 3: {4}, 4: {8}}

    class Replaying(PPOTrainer):
        def get_train_dataloader(self):
            stream = super().get_train_dataloader()
            known = {key: StartedRow(version) for _, version, keys in backend.calls for key in keys}
            stream.source.sampler.remember(known)
            return stream

    second = sampler()
    repeated = ahead(tmp_path / "second", second, "async", trainer_class=Replaying, **settings)
    repeated.train()
    assert versions_by_rollout(second) == versions
    assert_same(trained_weights(repeated.model), trained_weights(trainer.model))


# --- resuming and stopping --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "own"),
    [("one_step", {}), ("async", {"max_staleness": 2}), ("async", {"max_staleness": 2, "policy_objective": "dis"})],
    ids=["one step", "two rollouts ahead", "compared with the sampler"],
)
@pytest.mark.parametrize("step", [5, 8], ids=["in a rollout", "between two rollouts"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, schedule, own, step):
    settings, last = {"normalize_scores": True, **own}, sampler()
    backends = iter([sampler(), Jittery(TrunkModel(base_model(), lora())), last])
    runs = support.whole_and_resumed(lambda name: ahead(tmp_path / name, next(backends), schedule, **settings), step)
    histories = [without_wall_clock(trainer.state.log_history) for trainer in runs]
    assert histories[0] == histories[1]
    # Nothing that was used is sampled again.
    assert min(key[1] for _, _, keys in last.calls for key in keys) > (step - 1) // SLOTS


class Blocked(CopyBackend):
    """Does not answer for one rollout until `gate` is set; `asked` is set when it was asked."""

    def __init__(self, rollout, **settings):
        super().__init__(TrunkModel(base_model(), lora()), **settings)
        self.rollout, self.asked, self.gate = rollout, threading.Event(), threading.Event()

    def generate_as(self, role, version, prompt_ids, params, keys):
        if keys[0][1] == self.rollout:
            self.asked.set()
            assert self.gate.wait(LONG_S)
        return super().generate_as(role, version, prompt_ids, params, keys)


@pytest.mark.slow
def test_rows_that_run_at_a_checkpoint_are_sampled_again_from_the_version_that_they_had(tmp_path):
    first, second = Blocked(2), sampler()
    backends = iter([sampler(), first, second])

    def make(name):
        if first.asked.is_set():  # Stopped while rollout 2 is being sampled from version 4.
            first.gate.set()
        return ahead(tmp_path / name, next(backends))

    support.whole_and_resumed(make, 6)
    assert first.gate.is_set()
    assert versions_by_rollout(second) == {2: {4}, 3: {8}, 4: {12}}
    assert second.synced[0] == 4  # The adapter comes from the checkpoint, whose weights are those of step 6.


def test_an_error_of_the_sampler_ends_the_run(tmp_path):
    class Broken(CopyBackend):
        def generate_as(self, role, version, prompt_ids, params, keys):
            if keys[0][1] == 1:
                raise ConnectionError("the server is gone")
            return super().generate_as(role, version, prompt_ids, params, keys)

    trainer = ahead(tmp_path, Broken(TrunkModel(base_model(), lora())))
    with pytest.raises(ConnectionError, match="the server is gone"):
        trainer.train()
    assert trainer.state.global_step == SLOTS  # The rollout before it was used.


# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["one_step", "async"])
@pytest.mark.parametrize("backend", [None, CannedBackend()], ids=["this process", "no versions"])
def test_a_sampler_without_weights_of_its_own_is_rejected(tmp_path, schedule, backend):
    name = "LocalBackend" if backend is None else "CannedBackend"
    with pytest.raises(ValueError, match=f"schedule '{schedule}' .* {name} has no weights of its own; set use_vllm"):
        support.make_trainer(tmp_path, rollout_backend=backend, schedule=schedule)


@pytest.mark.parametrize(
    ("settings", "versions"),
    [
        ({}, 2),
        ({"schedule": "one_step"}, 3),
        ({"schedule": "async", "max_staleness": 3}, 5),
        # Of each of two rollouts: its own version, and evaluations at 2 or 3 of its 4 steps.
        ({"schedule": "one_step", "eval_strategy": "steps", "eval_steps": 2}, 9),
    ],
)
def test_a_sampler_keeps_the_versions_of_the_rollouts_and_evaluations_under_way(settings, versions):
    config = PPOConfig(output_dir="out", use_cpu=True, num_minibatches=1, num_ppo_epochs=SLOTS, **settings)
    assert config.versions_in_use == versions


# --- learning ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("task", "schedule", "staleness"), [(TASK_A, "one_step", None), (TASK_B, "async", 2)])
def test_stale_samples_reach_the_optimum_within_10_percent(tmp_path, task, schedule, staleness):
    backend = CopyBackend(TrunkModel(learning.reference_model(task, 0), LoraConfig(**learning.LORA)))
    settings = {"schedule": schedule, "max_staleness": staleness, "rollout_backend": backend}
    trainer = learning.make_trainer(task, 0, tmp_path, **settings)
    outcome = learning.learn(trainer)
    share = outcome.objective / learning.task_optimum(task, 0).objective
    shares = logged(trainer, "sampling/effective_sample_size")
    print(f"{schedule} {staleness}: {share:.1%} of J*, effective sample size {min(shares):.3f} at the least")
    assert share >= 0.9
