"""`onetrunk ppo`, `eval` and `prefs` on a vLLM server: a fake one with a real model."""

import pytest
from transformers import AutoModelForCausalLM

from onetrunk import cli
from onetrunk.rollouts.vllm_requests import PROBE_PROMPTS
from tests.feedback import runs
from tests.ppo.support import base_model
from tests.rollouts.stub_vllm import BASE, StubVLLM
from tests.stages.small_runs import error_of, metrics, read_rows, run, statistics
from tests.stages.test_eval_judge import CHECKS, save_adapter

NUM_PROMPTS = 6
# So cold that every draw is the most probable token: a server and this process then give the same completions.
COLD = ("--temperature", "1e-5")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = runs.make_inputs(tmp_path_factory.mktemp("inputs"), num_prompts=NUM_PROMPTS - 1)
    (folder / "checks.py").write_text(CHECKS)
    save_adapter(folder / "adapter", folder / "model", seed=1)
    save_adapter(folder / "adapter-2", folder / "model", seed=2)
    rubric = {"warm": f"{folder}/checks.py:warm", "concise": f"{folder}/checks.py:concise"}
    runs.write_recipe(folder, judge=["rubric"], rubric=rubric)
    return folder


@pytest.fixture
def stub(inputs, empty_folder):
    with served(inputs / "model") as server:
        yield server


def served(model, **settings):
    return StubVLLM(AutoModelForCausalLM.from_pretrained(model), **settings)


def evaluate(inputs, *options, out):
    words = ["--model_name_or_path", inputs / "adapter", "--dataset_name", inputs / "prompts.jsonl"]
    words += ["--reward_funcs", f"{inputs}/checks.py:warm", "--max_completion_length", 6, "--use_cpu", "true"]
    return cli.main(["eval", *map(str, [*words, "--output_dir", out, *options])])


def on(stub):
    return "--use_vllm", "true", "--vllm_server_base_url", stub.url


def published(stub):
    """Return (nonce, number-role-version) of each adapter that was loaded, in order."""
    names = [name.split("-", 2)[1:] for kind, name in stub.events if kind == "load"]
    return [nonce for nonce, _ in names], [what.split("-", 1)[1] for _, what in names]


def asked(stub):
    """Return how many prompts of the data each adapter, or the base, has answered. A probe asks for 8 tokens."""
    names = [body["model"] for body in stub.bodies if body["max_tokens"] == 6]
    return [names.count(name) for name in dict.fromkeys(names)]


@pytest.mark.slow
def test_every_side_of_an_evaluation_samples_under_its_own_name_and_ends_as_in_this_process(stub, inputs, tmp_path):
    options = [*COLD, "--opponent", inputs / "adapter-2"]
    assert evaluate(inputs, *options, out="local") == 0
    assert evaluate(inputs, *options, *on(stub), out="served") == 0
    local, served = metrics(tmp_path / "local"), metrics(tmp_path / "served")
    assert (local.pop("sampled_by"), served.pop("sampled_by")) == ("this process", "vLLM 0.32.0")
    assert "| sampled_by | vLLM 0.32.0 |" in (tmp_path / "served/_report/report.md").read_text()
    assert read_rows(tmp_path / "served/pairs.jsonl") == read_rows(tmp_path / "local/pairs.jsonl")
    for role in ("policy", "reference", "opponent"):
        for name in ("score/mean", "score/warm", "completion/length"):
            assert served[role][name] == local[role][name]
    assert served["policy"].keys() == local["policy"].keys()
    # The reference is the server's base.
    nonces, what = published(stub)
    assert what == ["policy-v0", "reference-v0"]
    assert nonces[0] != nonces[1]
    assert asked(stub) == [NUM_PROMPTS] * 3
    # At the end nothing is left, on the server and on the disk.
    assert stub.adapters == {} and not stub.missing and not list((tmp_path / "served/_adapters").iterdir())


def test_what_keeps_a_server_from_sampling_is_one_message_before_anything_is_written(inputs, tmp_path, capsys):
    short = ["--max_completion_length", 40]
    with StubVLLM(base_model(seed=1), max_length=30) as other:
        assert evaluate(inputs, *on(other), *short, out=tmp_path / "a") == 1
        assert "start it with --max-model-len" in capsys.readouterr().err
        assert evaluate(inputs, *on(other), out=tmp_path / "b") == 1
        assert "serves another base model" in capsys.readouterr().err
        assert runs.prefs(inputs, *on(other), out=tmp_path / "c") == 1
        assert "serves another base model" in capsys.readouterr().err
        assert other.adapters == {}
    down = ["--use_vllm", "true", "--vllm_server_base_url", "http://127.0.0.1:9", "--vllm_server_timeout", 0.2]
    for command in (evaluate, runs.prefs):
        assert command(inputs, *down, out=tmp_path / "d") == 1
        assert "vLLM server http://127.0.0.1:9: not ready" in capsys.readouterr().err
    assert evaluate(inputs, "--vllm_server_base_url", "http://127.0.0.1:9", out=tmp_path / "e") == 2
    assert "vllm_server_base_url is set and use_vllm is not" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/metrics.json"))


@pytest.mark.parametrize("model", ["model", "adapter"])
def test_preferences_are_sampled_on_the_server_and_never_twice(stub, inputs, tmp_path, model):
    options = ["--model_name_or_path", inputs / model, "--keep_ties", "true", "--num_generations", 2, *on(stub)]
    assert runs.prefs(inputs, *options, out="served") == 0
    made = statistics(tmp_path / "served")
    assert made["about"]["sampled by"] == "vLLM 0.32.0"
    assert made["counts"]["completions"] == 2 * (NUM_PROMPTS - 1)
    assert published(stub)[1] == (["policy-v1"] if model == "adapter" else [])
    assert stub.adapters == {} and not stub.missing
    # The same command reads the ledger: the server is only checked.
    rows = (tmp_path / "served/data/preferences.jsonl").read_bytes()
    stub.bodies.clear()
    assert runs.prefs(inputs, *options, out="served") == 0
    assert {body["model"] for body in stub.bodies} == {BASE} and len(stub.bodies) == PROBE_PROMPTS
    assert (tmp_path / "served/data/preferences.jsonl").read_bytes() == rows


def test_an_evaluation_and_preferences_have_the_key_of_the_server(stub, inputs, monkeypatch, tmp_path, capsys):
    stub.key = "abc123def456ghi789"
    monkeypatch.setenv("SERVER_KEY", stub.key)
    assert evaluate(inputs, *on(stub), out="without") == 1
    assert "HTTP 401" in capsys.readouterr().err
    key = ("--vllm_api_key_env", "SERVER_KEY")
    assert evaluate(inputs, *on(stub), *key, out="eval") == 0
    assert runs.prefs(inputs, "--model_name_or_path", inputs / "adapter", *on(stub), *key, out="prefs") == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(stub.key.encode() in path.read_bytes() for path in written)


def test_a_signal_to_prefs_unloads_its_adapter_and_says_how_to_go_on(stub, inputs, tmp_path, capsys):
    (tmp_path / "stop.py").write_text("def stop(**columns):\n    raise KeyboardInterrupt\n")
    rubric = ["--rubric", '{"warm": "stop.py:stop", "concise": "stop.py:stop"}']
    assert runs.prefs(inputs, "--model_name_or_path", inputs / "adapter", *on(stub), *rubric) == 130
    assert published(stub)[1] == ["policy-v1"] and stub.adapters == {}
    assert "run the same command again to resume" in capsys.readouterr().err


def test_a_run_on_a_server_with_a_key_trains_and_writes_the_key_nowhere(in_folder, tmp_path, monkeypatch):
    key = "abc123def456ghi789"
    monkeypatch.setenv("SERVER_KEY", key)
    with served("base", key=key) as server:
        assert run("ppo", "--output_dir", tmp_path, *on(server), "--vllm_api_key_env", "SERVER_KEY") == 0
        assert any("-policy-v0" in name for _, name in server.events) and not server.missing
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_an_adapter_that_no_server_can_serve_is_told_before_it_is_published(in_folder, tmp_path, capsys):
    with served("base") as server:
        assert run("ppo", "--output_dir", tmp_path, *on(server), "--use_dora", "true") == 1
        assert "the adapter 'default' is DoRA (use_dora)" in " ".join(error_of(capsys).split())
        assert not any("-policy-" in name for _, name in server.events)
