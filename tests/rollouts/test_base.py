"""Sampling settings, the backend protocol, and the backend of a server that a config loads."""

import doctest
import re
from pathlib import Path

import pytest
import yaml

from onetrunk import rollouts
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.setup import check_schedule, load_backend, own_backend
from onetrunk.rollouts import LocalBackend, RolloutBackend, SamplingParams, base
from onetrunk.rollouts.base import VersionedBackend
from onetrunk.rollouts.vllm import VLLMBackend
from tests.fakes import CannedBackend


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_completion_length": 0}, "max_completion_length is 0; set it to 1 token or more"),
        ({"temperature": -0.1}, "temperature is -0.1; set it to a finite number above 0, or to 0"),
        ({"stop_token_ids": [2]}, r"stop_token_ids is \[2\]; give a tuple"),
        ({"stop_token_ids": (2, -1)}, "token ids are 0 or more"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"top_p": 0.0}, "top_p is 0.0; set it above 0 and at most 1"),
        ({"top_k": -1}, "top_k is -1; set a whole number of tokens, where 0 leaves all of them in"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_the_value_and_the_fix(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**{"max_completion_length": 4, **settings})


def test_the_local_backend_satisfies_the_protocol_and_half_a_backend_does_not():
    class GenerateOnly:
        def generate(self, prompt_ids, params, keys): ...

    assert isinstance(LocalBackend(), RolloutBackend)
    assert not isinstance(GenerateOnly(), RolloutBackend)


def test_the_worked_example_of_an_own_backend_runs():
    result = doctest.testmod(base)
    assert result.attempted >= 7
    assert result.failed == 0


def config(**settings):
    return PPOConfig(output_dir="out", use_cpu=True, report_to="none", **settings)


def test_a_server_has_one_address_or_several():
    assert config(use_vllm=True).server_urls == ["http://127.0.0.1:8000"]
    several = ["http://a:1/", "https://b"]
    assert config(use_vllm=True, vllm_server_base_url=several).server_urls == ["http://a:1", "https://b"]


def test_the_settings_in_the_readme_are_those_of_a_run():
    text = (Path(rollouts.__file__).parent / "README.md").read_text(encoding="utf-8")
    shared, colocated = (config(**yaml.safe_load(block)) for block in re.findall("```yaml\n(.*?)```", text, re.DOTALL))
    assert shared.server_urls == ["http://localhost:8000"] and not shared.is_colocated
    assert colocated.is_colocated and colocated.vllm_enable_sleep_mode


def test_a_server_and_a_backend_of_ones_own_exclude_each_other():
    with pytest.raises(ValueError, match="use_vllm is set and rollout_backend is a CannedBackend; give one of them"):
        own_backend(config(use_vllm=True), CannedBackend())


def test_a_config_loads_a_server_that_keeps_the_versions_of_its_schedule(monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "abc123def456ghi789")
    for settings, versions in (({}, 2), ({"schedule": "async", "max_staleness": 3}, 5)):
        urls = ["http://a:1", "http://b:2"]
        settings |= {"use_vllm": True, "vllm_server_base_url": urls, "vllm_server_timeout": 7.0}
        settings |= {"vllm_request_timeout": 9.0, "vllm_api_key_env": "SERVER_KEY"}
        backend = load_backend(config(**settings))
        assert isinstance(backend, VLLMBackend) and isinstance(backend, VersionedBackend)
        assert (backend.keep_versions, backend.server_urls, backend.api_key_env) == (versions, urls, "SERVER_KEY")
        assert (backend.policy.call_timeout_s, backend.wait_s) == (9.0, 7.0)


def test_a_server_of_ones_own_must_keep_the_versions_of_the_schedule(tmp_path):
    backend = VLLMBackend("http://127.0.0.1:1", tmp_path)
    check_schedule(config(), backend)
    with pytest.raises(ValueError, match="keep_versions is 2, and .* up to 3 versions .*keep_versions=3"):
        check_schedule(config(schedule="one_step"), backend)
