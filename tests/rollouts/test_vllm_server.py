"""A real vLLM server on the CPU, started by `onetrunk serve`; its tests share it, as a start takes half a minute."""

import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts import LocalBackend, SamplingParams
from onetrunk.rollouts.vllm import VLLMBackend, loaded_adapters, vllm_policy
from tests import learning
from tests.learning import EOS, FORBIDDEN_BIAS, PAD, TASK_B
from tests.models.branches import lora
from tests.ppo.support import logged
from tests.ppo.test_importance_correction import CLIPPED, ESS
from tests.processes import environment, free_port, kill_all, wait_for_server
from tests.rollouts.scripted import Scripted
from tests.rollouts.small import KEYS, PROMPTS, SERVED_SIZES, assert_same, logprobs_of
from tests.rollouts.test_vllm import assert_sampled_from, shaken
from tests.rollouts.vllm_environment import vllm_python
from tests.rollouts.vllm_episodes import cached_tokens, require_asked, story_trainer
from tests.tiny import tiny_model, tiny_tokenizer

# A start takes minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STOPS = tuple(range(8, 14))
PATIENT = vllm_policy(300.0)


class Serving:
    """`onetrunk serve` of a model, which can be killed with all that it has started."""

    def __init__(self, model: Path, log: Path, positions: int):
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = f"serve {model} --port {port} --device cpu --python {vllm_python()} --max_model_len {positions}"
        self.words = [sys.executable, "-m", "onetrunk.cli", *command.split()]
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.words, env=environment(), stdout=log, stderr=log)

    def wait(self) -> None:
        wait_for_server(self.url, self.process, self.log)

    def kill(self) -> None:
        kill_all(self.process)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", **SERVED_SIZES).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def serving(base, tmp_path_factory):
    server = Serving(base, tmp_path_factory.mktemp("log") / "serve.log", 512)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def policy(rank=4, **config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = lora(r=rank, task_type="CAUSAL_LM", **config)
        return shaken(TrunkModel(tiny_model("llama", **SERVED_SIZES), config))


def backend_of(serving, folder, **options):
    return VLLMBackend(serving.url, folder, **{"policy": PATIENT} | options)


def test_it_samples_each_version_with_the_logprobs_of_our_forward(serving, tmp_path):
    model, backend = policy(use_rslora=True), backend_of(serving, tmp_path)
    for version in range(4):
        backend.sync(shaken(model, version), version)
        for temperature in (1.0, 0.7):
            params = SamplingParams(12, temperature, STOPS)
            rollout = backend.generate(PROMPTS, params, [(1, version, row) for row in range(len(PROMPTS))])
            assert rollout.policy_version == version
            assert_sampled_from(model, rollout, temperature)
        greedy = SamplingParams(12, 0.0, STOPS)
        rollout = backend.generate(PROMPTS, greedy, KEYS)
        assert rollout.completion_ids == LocalBackend(model).generate(PROMPTS, greedy, KEYS).completion_ids
    # The newest two are loaded; the files of the one that was unloaded last are still there.
    (adapters,) = backend._on_each(loaded_adapters).values()
    assert [name.rsplit("-", 1)[1] for name in adapters] == ["v2", "v3"]
    assert sorted(path.name.rsplit("-", 1)[1] for path in tmp_path.glob("*/*-policy-v*")) == ["v1", "v2", "v3"]
    previous = backend.generate_as("policy", 2, PROMPTS, SamplingParams(8, 1.0), KEYS)
    assert_sampled_from(shaken(model, 2), previous, 1.0)
    reference = backend.generate_as("reference", 3, PROMPTS, SamplingParams(8, 1.0), KEYS)
    with model.as_role("reference"):
        assert_sampled_from(model, reference, 1.0)
    backend.close()
    fresh = backend_of(serving, tmp_path)
    fresh.check()
    assert fresh._on_each(loaded_adapters) == {fresh.servers[0]: {}}
    fresh.close()


# --- episodes ------------------------------------------------------------------------------------------------------


def recorded(backend):
    """Return the list to which a backend adds what it asks of adapters with the answers, and the adapters' names."""
    asked, names, complete = [], set(), backend._complete

    def noting(servers, requests, progress=None):
        completed = complete(servers, requests, progress)
        asked.extend((r.prompt_ids, c.token_ids) for r, c in zip(requests, completed, strict=True) if r.model)
        names.update(request.model for request in requests if request.model)
        return completed

    backend._complete = noting
    return asked, names


def cache_hits(serving):
    """Return the tokens that the server has found in its cache of prefixes."""
    with urllib.request.urlopen(f"{serving.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_turns_are_sampled_as_one_by_one_and_logprobs_are_those_of_one_forward_over_the_episode(serving, tmp_path):
    model, told = policy(), []
    backend = backend_of(serving, tmp_path, progress=lambda *numbers: told.append(numbers))
    backend.sync(model, 4)
    greedy = SamplingParams(40, 0.0, STOPS)
    ours = LocalBackend(model).generate_turns(PROMPTS, greedy, KEYS, Scripted())
    theirs = backend.generate_turns(PROMPTS, greedy, KEYS, Scripted(), "policy", 4)
    assert (theirs.completion_ids, theirs.turn_ids) == (ours.completion_ids, ours.turn_ids)
    assert theirs.stopped == ours.stopped and theirs.policy_version == 4 and max(map(max, ours.turn_ids)) >= 2
    # Rows of the whole call, not of one request.
    assert told == sorted(told) and told[-1] == (len(KEYS), len(KEYS), sum(map(len, theirs.completion_ids)))
    assert {total for _, total, _ in told} == {len(KEYS)}
    params = SamplingParams(40, 0.7, STOPS)
    rollout = backend.generate_turns(PROMPTS, params, KEYS, Scripted(), "policy", 4)
    columns = rollout.turn_ids, rollout.sampler_logprobs, logprobs_of(model, rollout, 0.7)
    for turns, theirs, ours in zip(*columns, strict=True):
        is_sampled = torch.tensor(turns) >= 0
        torch.testing.assert_close(theirs, torch.where(is_sampled, ours, 0.0), atol=5e-5, rtol=0)
    # An episode of one turn is a completion.
    plain = backend.generate(PROMPTS, params, KEYS)
    once = backend.generate_turns(PROMPTS, params, KEYS, Scripted(lambda row, turn: None), "policy", 4)
    assert_same(once, plain)
    assert once.turn_ids == [[0] * len(ids) for ids in plain.completion_ids]
    backend.close()


@pytest.mark.parametrize("settings", [{"temperature": 0.8}, {"top_p": 0.7}, {"schedule": "one_step"}], ids=str)
def test_ppo_on_episodes_asks_for_the_exact_ids_so_far_and_the_server_has_them_cached(
    serving, base, tmp_path, settings
):
    played, before = [], cache_hits(serving)
    served = {"use_vllm": True, "vllm_server_base_url": [serving.url]}
    trainer = story_trainer(tmp_path, base, played, num_rollouts=3, **served, **settings)
    asked, names = recorded(trainer.sampler.backend)
    trainer.train()
    require_asked(asked, played)
    assert cache_hits(serving) - before == sum(map(cached_tokens, played))
    assert logged(trainer, "policy/ratio_max")[0] == 1.0
    gaps, shares = logged(trainer, "sampling/logprob_gap_max"), logged(trainer, ESS)
    versions = sorted(name.rsplit("-", 1)[1] for name in names)
    if "temperature" in settings:
        # The policy itself has sampled, also after its updates.
        assert versions == ["v0", "v1", "v2"] and max(gaps) < 1e-4 and min(shares) > 1 - 1e-6
    elif "top_p" in settings:
        # A token weighs what the nucleus has of the whole: never more than 1, so none is clipped.
        assert logged(trainer, CLIPPED) == [0, 0, 0] and all(0.5 < share < 1 for share in shares) and min(gaps) > 0.1
    else:
        assert versions == ["v0", "v1"] and gaps[0] < 1e-4 < gaps[2]
    trainer.sampler.backend.close()


def test_ppo_samples_every_compacted_context_from_the_policy(serving, base, tmp_path):
    # A context holds the prompt of about 128 tokens and one or two turns with answers of about 61.
    limits = {"max_turn_length": 12, "max_context_length": 240, "kept_turns": 0, "compaction_prompt": " the lantern"}
    served = {"use_vllm": True, "vllm_server_base_url": [serving.url]}
    trainer = story_trainer(tmp_path, base, [], num_rollouts=3, **served, **limits)
    trainer.train()
    assert min(logged(trainer, "episode/compactions")) > 0.3 and min(logged(trainer, "episode/summary_tokens")) >= 1
    assert logged(trainer, "policy/ratio_max")[0] == 1.0
    assert max(logged(trainer, "sampling/logprob_gap_max")) < 1e-4
    trainer.sampler.backend.close()


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_in_mid_batch_ends_the_rollout_and_a_new_start_goes_on(serving, tmp_path):
    model, params = policy(), SamplingParams(24, 1.0)
    prompts, keys = PROMPTS * 6, [(0, 0, row) for row in range(6 * len(PROMPTS))]
    backend = backend_of(serving, tmp_path, max_concurrency=2)
    backend.sync(model, 1)
    whole = backend.generate(prompts, params, keys)
    backend.progress = lambda rows, *_: serving.kill() if rows == 3 else None
    with pytest.raises(RuntimeError, match="gives row .* no completion: .*; start the server, or correct its address"):
        backend.generate(prompts, params, keys)
    backend.close()
    serving.start()
    resumed = backend_of(serving, tmp_path)
    resumed.sync(model, 1)
    # The same keys on the new server: the seeds travel with the requests.
    assert resumed.generate(prompts, params, keys).completion_ids == whole.completion_ids
    resumed.close()


def test_when_vllm_dies_serve_ends_with_the_reason(serving, tmp_path):
    children = psutil.Process(serving.process.pid).children(recursive=True)
    children[0].kill()
    assert serving.process.wait(timeout=600) == 1
    assert "vLLM ended with code -9; its last lines above say why" in serving.log.read_text()
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children)
    serving.start()


def test_what_it_cannot_serve_is_said_before_training(serving, tmp_path):
    with pytest.raises(RuntimeError, match="LoRA rank 32 is greater than max_lora_rank 16.*--max-lora-rank 32"):
        backend_of(serving, tmp_path / "rank").sync(policy(rank=32), 0)
    other = TrunkModel(tiny_model("llama", seed=1, **SERVED_SIZES), lora())
    with pytest.raises(RuntimeError, match="serves another base model: its logprobs of 64 tokens differ"):
        backend_of(serving, tmp_path / "base").check_policy(other)
    with pytest.raises(RuntimeError, match="start it with --max-model-len 600"):
        backend_of(serving, tmp_path / "length").check_policy(policy(), longest_row=600)
    # None of this has harmed the server.
    model, backend = policy(), backend_of(serving, tmp_path / "last")
    backend.sync(model, 0)
    assert_sampled_from(model, backend.generate(PROMPTS, SamplingParams(8, 1.0), KEYS), 1.0)
    backend.close()


def served_task_model(seed):
    """Return a model of task B that vLLM can serve: the bias of its head is a constant feature instead.

    Feature 0 is the same large number at every position, and only the head's rows of PAD and EOS read it.
    """
    config = learning.task_config(TASK_B, hidden_size=64, num_layers=2, num_heads=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).eval()
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_(std=0.5)
            model.model.embed_tokens.weight[:, 0] = 3.0
            nn.init.normal_(model.lm_head.weight, std=learning.HEAD_STD)
            model.lm_head.weight[:, 0] = 0.0
            # About 4 after the norm.
            model.lm_head.weight[[PAD, EOS]] = 0.0
            model.lm_head.weight[[PAD, EOS], 0] = FORBIDDEN_BIAS / 4
    return model
