"""ColocatedBackend: on a fake engine with a real model, and on the real one of vLLM in an environment with it."""

import contextlib
import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from onetrunk.models.build import build_trunk
from onetrunk.rollouts import ColocatedBackend, LocalBackend, RolloutBackend, SamplingParams, VersionedBackend
from onetrunk.rollouts.episodes.rows import play_in_waves
from tests.ppo.support import base_model, logged, lora, make_trainer, prompts
from tests.processes import ROOT, environment, finished
from tests.rollouts.scripted import Scripted
from tests.rollouts.small import PROMPTS
from tests.rollouts.stub_engine import install
from tests.rollouts.test_vllm import KEYS, PARAMS, assert_equal, assert_sampled_from, shaken
from tests.rollouts.vllm_environment import vllm_python


@pytest.fixture
def engine(monkeypatch):
    return install(monkeypatch)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    base_model().save_pretrained(folder)
    return folder


def policy(base, model_init_kwargs=None, **config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config}
        return shaken(build_trunk(str(base), LoraConfig(**settings), model_init_kwargs=model_init_kwargs))


def kinds(engine):
    return [kind for kind, _ in engine.made[-1].events]


def test_it_samples_each_version_from_an_adapter_that_is_loaded_under_a_new_name(engine, base, tmp_path):
    model, backend = policy(base), ColocatedBackend(tmp_path)
    assert isinstance(backend, RolloutBackend) and not isinstance(backend, VersionedBackend)
    for version in range(3):
        backend.sync(shaken(model, version), version)
        rollout = backend.generate(PROMPTS, PARAMS, KEYS)
        assert rollout.policy_version == version and list(rollout.prompt_ids) == PROMPTS
        assert_sampled_from(model, rollout)
        # The same version again is not published again, and its keys decide the rows.
        backend.sync(model, version)
        assert_equal(backend.generate(PROMPTS, PARAMS, KEYS), rollout)
        greedy = SamplingParams(6, 0.0, (9, 10))
        ours = LocalBackend(model).generate(PROMPTS, greedy, KEYS)
        assert backend.generate(PROMPTS, greedy, KEYS).completion_ids == ours.completion_ids
        # Only the files of the version in use are there.
        assert [path.name.rsplit("-", 1)[1] for path in tmp_path.glob("*/*")] == [f"v{version}"]
    with model.as_role("reference"):
        backend.sync(model, 3)
        assert_sampled_from(model, backend.generate(PROMPTS, PARAMS, KEYS))
    backend.sync(model, 3)
    assert_sampled_from(model, backend.generate(PROMPTS, PARAMS, KEYS))
    names = [name for kind, name in engine.made[0].events if kind == "load"]
    assert len(set(names)) == len(names) == 4 and len(engine.made) == 1
    backend.close()
    assert kinds(engine)[-1] == "shutdown" and not list(tmp_path.glob("*/*"))


def test_a_continued_adapter_and_its_reference_are_both_served(engine, base, tmp_path):
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    shaken(adapter, 1).save_pretrained(tmp_path / "adapter")
    model, backend = build_trunk(str(tmp_path / "adapter")), ColocatedBackend(tmp_path / "files")
    for _ in range(2):
        for role in ("policy", "reference"):
            with model.as_role(role):
                backend.sync(shaken(model, 5), 1)
                assert_sampled_from(model, backend.generate(PROMPTS, PARAMS, KEYS))
    assert kinds(engine).count("load") == kinds(engine).count("remove") + 1 == 4
    backend.close()


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is one, and a base in 16 bits, without which vLLM has no adapters there."""
    monkeypatch.setattr("onetrunk.rollouts.colocate.has_gpu", lambda: True)
    monkeypatch.setattr("onetrunk.rollouts.colocate.published_dtype", lambda model: torch.bfloat16)


def test_on_a_gpu_a_base_in_float32_is_rejected(engine, base, tmp_path, monkeypatch):
    monkeypatch.setattr("onetrunk.rollouts.colocate.has_gpu", lambda: True)
    with pytest.raises(ValueError, match="in 16 bits only, and the base is float32; set dtype to bfloat16"):
        ColocatedBackend(tmp_path).check_policy(policy(base), 64)


def test_a_sleeping_engine_is_woken_for_sampling_alone(engine, base, tmp_path, gpu):
    model = policy(base)
    backend = ColocatedBackend(tmp_path, sleeps=True, gpu_memory_utilization=0.25)
    for version in range(2):
        backend.sync(shaken(model, version), version)
        assert engine.made[0].sleeping
        assert_sampled_from(model, backend.generate(PROMPTS, PARAMS, KEYS))
    # The trainer reads the weights while the engine sleeps, so they are in none of the pools that sleep frees.
    pools = engine.made[0].pools
    assert isinstance(pools["weights"], contextlib.nullcontext) and pools["kv_cache"] == "pool of kv_cache"
    # The check before training; then each rollout loads its adapter between waking and sleeping.
    rollouts = ["wake", "load", "sleep", "wake", "remove", "load", "sleep"]
    assert kinds(engine) == ["sleep", *rollouts]
    assert {level for kind, level in engine.made[0].events if kind == "sleep"} == {1}
    settings = engine.made[0].settings
    assert settings["enable_sleep_mode"] and settings["gpu_memory_utilization"] == 0.25
    backend.close()


def test_an_engine_is_awake_for_all_turns_of_a_call_and_rows_of_a_wave_have_limits_of_their_own(
    engine, base, tmp_path, gpu
):
    told = []
    backend = ColocatedBackend(tmp_path, sleeps=True, progress=lambda *numbers: told.append(numbers))
    backend.sync(policy(base), 0)
    arguments = PROMPTS, replace(PARAMS, max_completion_length=24), KEYS
    rollout = backend.generate_turns(*arguments, Scripted())
    assert kinds(engine) == ["sleep", "wake", "load", "sleep"] and max(map(max, rollout.turn_ids)) >= 2
    assert told == sorted(told) and told[-1] == (len(KEYS), len(KEYS), sum(map(len, rollout.completion_ids)))
    # The same as calls with one limit each.
    other = play_in_waves(backend.generate, *arguments, Scripted())
    assert_equal(rollout, other)
    assert rollout.turn_ids == other.turn_ids and kinds(engine).count("wake") > 4
    backend.close()


def test_poll_ends_a_rollout_and_leaves_the_engine_ready_for_the_next(engine, base, tmp_path):
    calls, told, model = [], [], policy(base)

    def poll():
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    backend = ColocatedBackend(tmp_path, poll=poll, progress=lambda *done: told.append(done))
    backend.sync(model, 0)
    with pytest.raises(InterruptedError):
        backend.generate(PROMPTS, PARAMS, KEYS)
    assert engine.made[0].events[-1] == ("abort", 3) and [done for done, _, _ in told] == [1, 2]
    assert_sampled_from(model, backend.generate(PROMPTS, PARAMS, KEYS))
    backend.close()


def test_the_engine_gets_the_policy_s_revision_precision_rank_and_lengths_and_leaves_the_generators_alone(
    engine, base, tmp_path
):
    model = policy(base, {"revision": "v2"}, r=5)
    backend = ColocatedBackend(tmp_path, max_rows=3)
    before = torch.get_rng_state()
    backend.check_policy(model, 40)
    assert torch.get_rng_state().equal(before)
    settings = engine.made[0].settings
    expected = {"model": str(base), "revision": "v2", "dtype": "float32", "max_model_len": 40, "max_lora_rank": 8}
    expected |= {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "enable_lora": True}
    expected |= {"max_num_seqs": 3}
    assert settings.items() >= expected.items()
    with pytest.raises(RuntimeError, match="has 40 positions, and .* may have 41 tokens; set max_prompt_length"):
        backend.check_policy(model, 41)
    backend.close()


def test_an_answer_that_breaks_a_check_is_never_a_sample(engine, base, tmp_path, monkeypatch):
    backend = ColocatedBackend(tmp_path)
    backend.sync(policy(base), 0)
    monkeypatch.setattr(engine, "fault", "other_adapter")
    with pytest.raises(RuntimeError, match="the vLLM engine in this process: an answer from model 'another', but"):
        backend.generate(PROMPTS, PARAMS, KEYS)
    backend.close()


def test_what_cannot_be_served_is_one_message_before_training(engine, base, tmp_path, monkeypatch):
    base_model(seed=1).save_pretrained(tmp_path / "other")
    other = policy(tmp_path / "other")
    other.get_base_model().config.name_or_path = str(base)
    with pytest.raises(RuntimeError, match="the vLLM engine in this process serves another base model"):
        ColocatedBackend(tmp_path / "a").check_policy(other)
    with pytest.raises(ValueError, match="is DoRA"):
        ColocatedBackend(tmp_path / "b").check_policy(policy(base, use_dora=True))
    with pytest.raises(ValueError, match="the policy was made in memory"):
        ColocatedBackend(tmp_path / "c").check_policy(shaken(build_trunk(base_model(), lora())))
    with pytest.raises(RuntimeError, match="nothing is published yet"):
        ColocatedBackend(tmp_path / "d").generate(PROMPTS, PARAMS, KEYS)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="vllm_enable_sleep_mode needs a GPU"):
            ColocatedBackend(tmp_path / "e", sleeps=True).check()
    monkeypatch.setattr(engine, "fault", "no_memory")
    with pytest.raises(RuntimeError, match=r"does not start in this process: Free memory .* desired\. Check vllm_gpu"):
        ColocatedBackend(tmp_path / "f").check_policy(policy(base))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="works with one process; with several, set it to 'server'"):
        ColocatedBackend(tmp_path / "g").check()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_the_policy_and_the_engine_read_one_base(engine, base, tmp_path, caplog):
    caplog.set_level("INFO")
    model, backend = policy(base), ColocatedBackend(tmp_path)
    backend.check_policy(model)
    theirs = dict(engine.made[0].stub.base.named_parameters())
    ours = {name.replace(".base_layer", ""): p for name, p in model.get_base_model().named_parameters()}
    assert theirs and all(weight.data_ptr() == ours[name].data_ptr() for name, weight in theirs.items())
    assert "share 0.00 GiB of the base" in caplog.text and "a second time" not in caplog.text
    backend.close()


def test_without_vllm_the_extra_is_named_before_a_model_loads(tmp_path):
    with pytest.raises(ValueError, match=r"vLLM is not installed here.*onetrunk\[vllm\].*'server'"):
        make_trainer(tmp_path, use_vllm=True, vllm_mode="colocate")


def test_settings_alone_train_on_samples_of_the_engine(engine, base, tmp_path):
    settings = {"use_vllm": True, "vllm_mode": "colocate", "num_rollouts": 3, "temperature": 0.8}
    evaluation = {"eval_dataset": prompts(3), "eval_strategy": "steps", "eval_steps": 2}
    model = AutoModelForCausalLM.from_pretrained(base)
    trainer = make_trainer(tmp_path / "run", model=model, **settings, **evaluation)
    assert isinstance(trainer.sampler.backend, ColocatedBackend)
    trainer.train()
    gaps = logged(trainer, "sampling/logprob_gap_max") + logged(trainer, "eval_sampling/logprob_gap_max")
    assert len(gaps) >= 4 and max(gaps) < 1e-4
    # Importance weights are on, as with a server.
    assert len(logged(trainer, "sampling/effective_sample_size")) == 3
    versions = [name.rsplit("-", 1)[1] for kind, name in engine.made[0].events if kind == "load" and "policy" in name]
    assert versions == sorted(set(versions)) and len(versions) >= 3
    trainer.sampler.backend.close()


def run_real(python, folder, *options):
    """Run the script on the real engine of an environment with onetrunk's packages and vLLM."""
    words = [python, "-m", "tests.rollouts.colocated_vllm", folder, *options]
    return finished(words, env=environment(), cwd=ROOT).stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_real_engine_samples_each_version_and_trains_and_plays_episodes_on_a_cpu(tmp_path):
    assert "sampled and trained" in run_real(vllm_python(), tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_real_engine_sleeps_between_rollouts_on_a_gpu(tmp_path):
    assert "sampled and trained" in run_real(sys.executable, tmp_path, "--sleeps")
