"""The settings of a vLLM server and of importance weights, and the backend that a config loads."""

import re
from pathlib import Path

import pytest
import yaml

from onetrunk import rollouts
from onetrunk.ppo.checks import check_parts, check_schedule
from onetrunk.ppo.config import PPOConfig
from onetrunk.rollouts.base import VersionedBackend
from onetrunk.rollouts.load import load_backend
from onetrunk.rollouts.local import LocalBackend
from onetrunk.rollouts.vllm import VLLMBackend
from tests.fakes import CannedBackend

IS = "vllm_importance_sampling"
COLOCATE = {"use_vllm": True, "vllm_mode": "colocate"}


def config(**settings):
    return PPOConfig(output_dir="out", use_cpu=True, report_to="none", **settings)


@pytest.mark.parametrize(
    ("settings", "urls"),
    [
        ({}, ["http://127.0.0.1:8000"]),
        ({"vllm_server_host": "node-2", "vllm_server_port": 9000}, ["http://node-2:9000"]),
        ({"vllm_server_base_url": "http://a:1/"}, ["http://a:1"]),
        ({"vllm_server_base_url": ["http://a:1", "https://b"]}, ["http://a:1", "https://b"]),
    ],
)
def test_a_server_has_one_address_or_several(settings, urls):
    assert config(use_vllm=True, **settings).server_urls == urls


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vllm_mode": "colocate"}, "vllm_mode is set and use_vllm is not"),
        ({"vllm_mode": "elsewhere"}, "vllm_mode is 'elsewhere'; it must be one of server, colocate"),
        ({**COLOCATE, "vllm_server_port": 9000}, "vllm_server_port is set, and vllm_mode 'colocate' has no server"),
        ({**COLOCATE, "vllm_gpu_memory_utilization": 1.0}, "must be above 0 and below 1"),
        ({**COLOCATE, "vllm_max_model_length": 1}, "vllm_max_model_length is 1; it must be a whole number"),
        ({**COLOCATE, "schedule": "one_step"}, "vllm_mode 'colocate' has the trainer's GPU only between two updates"),
        ({"use_vllm": True, "vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode belongs to vllm_mode 'colocate'"),
        ({"vllm_server_port": 9000}, "vllm_server_port is set and use_vllm is not"),
        ({"use_vllm": True, "vllm_server_port": 0}, "whole number from 1 to 65535"),
        ({"use_vllm": True, "vllm_server_base_url": "localhost:8000"}, "write it with its scheme"),
        ({"use_vllm": True, "vllm_server_base_url": ["http://a", "http://a/"]}, "names a server twice"),
        ({"use_vllm": True, "vllm_server_timeout": 0}, "vllm_server_timeout is 0; it must be a number of seconds"),
        ({"use_vllm": True, "vllm_request_timeout": -1}, "vllm_request_timeout is -1; it must be a number of seconds"),
        ({"vllm_api_key_env": "SERVER_KEY"}, "vllm_api_key_env is set and use_vllm is not"),
        ({f"{IS}_mode": "sequence_mask"}, "long completions outside the bounds; set token_truncate or token_mask"),
        ({f"{IS}_mode": "sequence_truncate"}, "sequence_truncate' is not supported"),
        ({f"{IS}_mode": "tokens"}, "must be one of token_truncate, token_mask"),
        ({f"{IS}_clip_max": -1.0}, f"{IS}_clip_max is -1.0; it must be a number, 0 or more, or null"),
        ({f"{IS}_clip_min": "low"}, f"{IS}_clip_min is 'low'"),
        ({f"{IS}_clip_min": 3.0}, "the upper bound must be above 0 and above the lower one"),
        ({f"{IS}_clip_max": None}, "are both null"),
        ({"vllm_gpu_memory_utilization": 0.5}, "vllm_gpu_memory_utilization belongs to vllm_mode 'colocate'"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_the_fix(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


def test_without_a_correction_there_need_be_no_bound():
    settings = config(**{f"{IS}_clip_max": None, f"{IS}_correction": False})
    assert settings.vllm_importance_sampling_clip_max is None


def test_the_settings_in_the_readme_are_those_of_a_run():
    text = (Path(rollouts.__file__).parent / "README.md").read_text(encoding="utf-8")
    shared, colocated = (config(**yaml.safe_load(block)) for block in re.findall("```yaml\n(.*?)```", text, re.DOTALL))
    assert shared.server_urls == ["http://localhost:8000"] and not shared.is_colocated
    assert colocated.is_colocated and colocated.vllm_enable_sleep_mode


def test_without_a_server_this_process_samples():
    backend = load_backend(config(max_rollout_rows=3))
    assert isinstance(backend, LocalBackend) and backend.max_rows == 3


def test_a_server_and_a_backend_of_ones_own_exclude_each_other():
    with pytest.raises(ValueError, match="use_vllm is set and rollout_backend is a CannedBackend; give one of them"):
        check_parts(config(use_vllm=True), None, CannedBackend())


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
