"""`onetrunk ppo` on a vLLM server: what it cannot work with is one message before training; a fake server."""

import pytest
from transformers import AutoModelForCausalLM

from tests.rollouts.stub_vllm import StubVLLM
from tests.stages.small_runs import error_of, run

pytestmark = pytest.mark.usefixtures("in_folder")


def served(**settings):
    """Return a fake server of the base of the commands."""
    return StubVLLM(AutoModelForCausalLM.from_pretrained("base"), **settings)


def on(url):
    return "--use_vllm", "true", "--vllm_server_base_url", url


def test_a_run_on_a_server_with_a_key_trains_and_writes_the_key_nowhere(tmp_path, monkeypatch):
    key = "abc123def456ghi789"
    monkeypatch.setenv("SERVER_KEY", key)
    with served(key=key) as server:
        assert run("ppo", "--output_dir", tmp_path, *on(server.url), "--vllm_api_key_env", "SERVER_KEY") == 0
        assert any("-policy-v0" in name for _, name in server.events) and not server.missing
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"loads_adapters": False}, (), "start it with --enable-lora and the environment variable"),
        ({"max_length": 5}, (), "start it with --max-model-len 6 or more, or lower max_completion_length"),
        ({}, ("--use_dora", "true"), "the adapter 'default' is DoRA (use_dora)"),
    ],
    ids=["no adapters", "positions", "dora"],
)
def test_a_server_or_an_adapter_that_cannot_be_used_is_told(settings, options, message, tmp_path, capsys):
    with served(**settings) as server:
        assert run("ppo", "--output_dir", tmp_path, *on(server.url), *options) == 1
        assert message in " ".join(error_of(capsys).split())
        assert not any("-policy-" in name for _, name in server.events)
    # What was published to see whether the server takes it is deleted when the process ends.
    assert not [path for path in tmp_path.rglob("*.safetensors") if "_adapters" not in path.parts]
