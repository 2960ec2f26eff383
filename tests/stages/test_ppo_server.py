"""`onetrunk ppo` on a vLLM server: what it cannot work with is one message before training; a fake server."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from onetrunk import cli
from tests.ppo.support import base_model
from tests.rollouts.stub_vllm import StubVLLM
from tests.stages.small_runs import run, words_of

pytestmark = pytest.mark.usefixtures("in_folder")


def served(**settings):
    """Return a fake server of the base of the commands."""
    return StubVLLM(AutoModelForCausalLM.from_pretrained("base"), **settings)


def on(url):
    return "--use_vllm", "true", "--vllm_server_base_url", url


def rejected(capsys, output, *options, without=()):
    """Run PPO, which must end before training with exit code 1 and one error; return what it said."""
    words = words_of("ppo", "--output_dir", output, *options)
    for option in without:
        place = words.index(option)
        del words[place : place + 2]
    assert cli.main(words) == 1
    said = capsys.readouterr().err
    assert [line.startswith("error: ") for line in said.splitlines()].count(True) == 1 and "Traceback" not in said
    # What was published to see whether the server takes it is deleted when the process ends.
    assert not [path for path in Path(output).rglob("*.safetensors") if "_adapters" not in path.parts]
    return " ".join(said.split())


def test_a_run_on_a_server_with_a_key_trains_and_writes_the_key_nowhere(tmp_path, monkeypatch):
    key = "abc123def456ghi789"
    monkeypatch.setenv("SERVER_KEY", key)
    with served(key=key) as server:
        assert run("ppo", "--output_dir", tmp_path, *on(server.url), "--vllm_api_key_env", "SERVER_KEY") == 0
        assert any("-policy-v0" in name for _, name in server.events) and not server.missing
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_server_that_is_down_is_named_with_the_command_that_starts_it(tmp_path, capsys):
    options = ("--vllm_server_timeout", 0.2)
    said = rejected(capsys, tmp_path, *on("http://127.0.0.1:9"), *options)
    assert "vLLM server http://127.0.0.1:9: not ready after 0 s" in said and "onetrunk serve MODEL --port" in said


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"loads_adapters": False}, (), "start it with --enable-lora and the environment variable"),
        ({"raw": True}, ("--temperature", 0.7), "start it with --logprobs-mode processed_logprobs"),
        ({"max_rank": 1}, (), "LoRA rank 2 is greater than max_lora_rank 1.; start it with --max-lora-rank 2 or more"),
        ({"max_length": 5}, (), "start it with --max-model-len 6 or more, or lower max_completion_length"),
        ({}, ("--use_dora", "true"), "the adapter 'default' is DoRA (use_dora)"),
    ],
    ids=["no adapters", "raw logprobs", "rank", "positions", "dora"],
)
def test_a_server_or_an_adapter_that_cannot_be_used_is_told(settings, options, message, tmp_path, capsys):
    with served(**settings) as server:
        assert message in rejected(capsys, tmp_path, *on(server.url), *options)
        assert not any("-policy-" in name for _, name in server.events)


def test_another_base_model_on_the_server_is_told(tmp_path, capsys):
    with StubVLLM(base_model(seed=1)) as server:
        said = rejected(capsys, tmp_path, *on(server.url))
        assert "serves another base model: its logprobs of" in said and "it loaded /models/base" in said
