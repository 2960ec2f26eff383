"""VLLMBackend against a fake server with a real model: what it publishes, asks, checks, and survives."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig

from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts import LocalBackend, RolloutBackend, SamplingParams
from onetrunk.rollouts.publishing import ADAPTER_FILE, check_servable
from onetrunk.rollouts.vllm import VLLMBackend, vllm_policy
from onetrunk.rollouts.vllm_requests import Request, checked_completion
from onetrunk.servers.errors import CallError
from onetrunk.servers.fleet import RetryPolicy
from tests.places import CPU, found_by_ranks, join_group
from tests.ppo.support import base_model, lora, sft_model
from tests.rollouts.scripted import Scripted
from tests.rollouts.small import PROMPTS, assert_same, logprobs_of
from tests.rollouts.stub_vllm import StubVLLM
from tests.servers.stub import Stub, wait_until

PARAMS = SamplingParams(max_completion_length=5, temperature=0.8, stop_token_ids=tuple(range(8, 14)))
KEYS = [(3, 1, row) for row in range(len(PROMPTS))]
# Deadlines that only a server that hangs can miss, on a busy machine too; short waits otherwise.
PATIENT = RetryPolicy(max_calls=5, first_delay_s=0.02, max_delay_s=0.1, call_timeout_s=120.0, patience_s=120.0)


def shaken(model, seed=0):
    """Give the policy's adapter other weights; return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def policy(seed=0):
    """Return the same model at every call; only the policy's update depends on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return shaken(TrunkModel(base_model(), lora()), seed)


MADE = []


def backend_of(servers, folder, **options):
    urls = [server if isinstance(server, str) else server.url for server in servers]
    MADE.append(VLLMBackend(urls, folder, **{"policy": PATIENT, "wait_s": 120.0} | options))
    return MADE[-1]


@pytest.fixture
def stub():
    with StubVLLM(base_model()) as server:
        yield server
        while MADE:
            MADE.pop().close()


def assert_sampled_from(model, rollout, temperature=PARAMS.temperature, tolerance=5e-5):
    ours = torch.cat(logprobs_of(model, rollout, temperature))
    torch.testing.assert_close(torch.cat(list(rollout.sampler_logprobs)), ours, atol=tolerance, rtol=0)


def assert_equal(rollout, other):
    assert rollout.completion_ids == other.completion_ids and rollout.stopped == other.stopped
    assert all(map(torch.equal, rollout.sampler_logprobs, other.sampler_logprobs))


# --- sampling ----------------------------------------------------------------------------------------------------


def test_a_rollout_is_sampled_from_the_published_policy_and_its_keys_decide_the_rows(stub, tmp_path):
    model, backend = policy(), backend_of([stub], tmp_path)
    assert isinstance(backend, RolloutBackend)
    backend.sync(model, 7)
    rollout = backend.generate(PROMPTS, PARAMS, KEYS)
    assert rollout.policy_version == 7 and list(rollout.prompt_ids) == PROMPTS
    assert_sampled_from(model, rollout)
    assert rollout.stopped == [ids[-1] in PARAMS.stop_token_ids for ids in rollout.completion_ids]
    # The order of the rows does not matter, and another key gives another completion.
    turned = backend.generate(PROMPTS[::-1], PARAMS, KEYS[::-1])
    assert list(turned.completion_ids)[::-1] == list(rollout.completion_ids)
    other = backend.generate(PROMPTS, PARAMS, [(4, 1, row) for row in range(len(PROMPTS))])
    assert other.completion_ids != rollout.completion_ids
    greedy = PROMPTS, SamplingParams(6, 0.0, (9, 10)), KEYS
    assert_same(backend.generate(*greedy), LocalBackend(model).generate(*greedy))
    # Everything that a generation_config.json of the server could change is sent.
    sent = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    assert all(body.items() >= sent.items() for body in stub.bodies if body["model"] != "base")


def test_all_turns_of_an_episode_go_to_one_server_and_episodes_to_all(stub, tmp_path):
    with StubVLLM(base_model()) as second:
        backend = backend_of([stub, second], tmp_path)
        backend.sync(policy(), 0)
        for row in range(8):
            for turn in range(3):
                backend.generate([[40 + row]], PARAMS, [(0, 0, row, *[turn][:turn])])
        served = [sorted(b["prompt"][0] - 40 for b in s.bodies if b["model"] != "base") for s in (stub, second)]
    assert sorted(sum(served, [])) == sorted([*range(8)] * 3) and all(served)
    assert not set(served[0]) & set(served[1])


def test_progress_is_told_and_poll_can_end_a_rollout(stub, tmp_path):
    told = []
    backend = backend_of([stub], tmp_path, progress=lambda *done: told.append(done))
    backend.sync(policy(), 0)
    rollout = backend.generate(PROMPTS, PARAMS, KEYS)
    assert [done for done, _, _ in told] == [1, 2, 3, 4, 5] and told[-1][2] == sum(map(len, rollout.completion_ids))

    told.clear()
    rollout = backend.generate_turns(PROMPTS, PARAMS, KEYS, Scripted(lambda row, turn: None), "policy", 0)
    assert told[-1] == (5, 5, sum(map(len, rollout.completion_ids))) and {total for _, total, _ in told} == {5}

    def poll():
        raise InterruptedError

    backend.poll, stub.fault = poll, "hang"
    with pytest.raises(InterruptedError):
        backend.generate(PROMPTS, PARAMS, KEYS)


@pytest.mark.parametrize(
    ("prompts", "keys", "message"),
    [
        ([[5], []], KEYS[:2], "prompt 1 is empty"),
        ([[5] * 124], KEYS[:1], "128 positions, and a prompt with its completion may have 129 tokens"),
    ],
)
def test_rows_that_cannot_be_sampled_are_named(stub, tmp_path, prompts, keys, message):
    backend = backend_of([stub], tmp_path)
    backend.sync(policy(), 0)
    with pytest.raises((ValueError, RuntimeError), match=message):
        backend.generate(prompts, PARAMS, keys)


# --- publishing --------------------------------------------------------------------------------------------------


def test_each_version_has_a_new_name_and_files_outlive_their_adapter_by_one_sync(stub, tmp_path):
    model, backend = policy(), backend_of([stub], tmp_path)
    for version in range(4):
        backend.sync(shaken(model, version), version)
        assert_sampled_from(model, backend.generate(PROMPTS, PARAMS, KEYS))
    first, second, third, fourth = (f"{version + 1}-policy-v{version}" for version in range(4))
    events = [("load", first), ("load", second), ("load", third), ("unload", first)]
    events += [("load", fourth), ("unload", second)]
    assert [(kind, name.split("-", 2)[2]) for kind, name in stub.events] == events
    written = next(tmp_path.glob(f"*/{fourth}")).iterdir()
    assert {path.name for path in written} == {ADAPTER_FILE, "adapter_config.json"}
    # v0 was unloaded a sync ago and is gone; v1 was unloaded by this one.
    assert sorted(path.name for path in tmp_path.glob("*/*-policy-v*")) == [second, third, fourth]
    backend.close()
    assert not stub.adapters and not any(tmp_path.iterdir()) and not stub.missing


def test_the_same_version_is_published_once_unless_its_weights_differ(stub, tmp_path):
    model, backend = policy(), backend_of([stub], tmp_path)
    backend.sync(model, 2)
    num_events = len(stub.events)
    backend.sync(model, 2)
    assert len(stub.events) == num_events
    backend.sync(shaken(model, 1), 2)
    assert [kind for kind, _ in stub.events[num_events:]].count("load") == 1
    assert_sampled_from(model, backend.generate(PROMPTS, PARAMS, KEYS))
    assert len(stub.adapters) == 1


def test_an_older_version_is_sampled_while_a_newer_one_is_published(stub, tmp_path):
    model, backend = policy(), backend_of([stub], tmp_path, keep_versions=3)
    for version in range(4):
        backend.sync(shaken(model, version), version)
    for version in (1, 2, 3):
        rollout = backend.generate_as("policy", version, PROMPTS, PARAMS, KEYS)
        assert rollout.policy_version == version
        assert_sampled_from(policy(version), rollout)
    with pytest.raises(RuntimeError, match=r"version 0 of the policy is not on .* have \[1, 2, 3\]"):
        backend.generate_as("policy", 0, PROMPTS, PARAMS, KEYS)


@pytest.mark.parametrize("continues", [False, True], ids=["the base", "the adapter that it started from"])
def test_the_reference_is(continues, stub, tmp_path):
    model = TrunkModel.from_adapter(sft_model()) if continues else TrunkModel(base_model(), lora())
    backend = backend_of([stub], tmp_path)
    backend.sync(shaken(model, 5), 3)
    of_policy = backend.generate(PROMPTS, PARAMS, KEYS)
    reference = backend.generate_as("reference", 0, PROMPTS, PARAMS, KEYS)
    with model.as_role("reference"):
        assert_sampled_from(model, reference)
        # An evaluation of the model before training syncs in this role: it must not sample from the policy.
        backend.sync(model, 0)
        assert_equal(backend.generate(PROMPTS, PARAMS, KEYS), reference)
    backend.sync(model, 3)
    assert_equal(backend.generate(PROMPTS, PARAMS, KEYS), of_policy)
    assert of_policy.completion_ids != reference.completion_ids
    assert sum(name.endswith("reference-v0") for _, name in stub.events) == continues


def test_a_second_model_has_its_own_reference_and_its_base_is_proved_too(stub, tmp_path):
    backend = backend_of([stub], tmp_path)
    backend.sync(TrunkModel.from_adapter(sft_model()), 0)
    second = TrunkModel.from_adapter(shaken(sft_model(), 7))
    backend.sync(second, 0)
    with second.as_role("reference"):
        assert_sampled_from(second, backend.generate_as("reference", 0, PROMPTS, PARAMS, KEYS))
    with pytest.raises(RuntimeError, match="serves another base model"):
        backend.sync(TrunkModel(base_model(seed=1), lora()), 0)


def test_only_the_roles_that_a_backend_names_are_published(stub, tmp_path):
    model = shaken(TrunkModel.from_adapter(sft_model()), 5)
    backend = backend_of([stub], tmp_path, roles=("policy",))
    backend.sync(model, 3)
    assert_sampled_from(model, backend.generate(PROMPTS, PARAMS, KEYS))
    assert not any(name.endswith("reference-v0") for _, name in stub.events)
    # Without its adapter the reference would be the base.
    with pytest.raises(ValueError, match="the reference is an adapter that is not published; name it in roles"):
        backend.generate_as("reference", 0, PROMPTS, PARAMS, KEYS)


def test_a_model_without_adapters_samples_from_the_base(stub, tmp_path):
    backend = backend_of([stub], tmp_path)
    backend.sync(base_model(), 0)
    assert_sampled_from(base_model(), backend.generate(PROMPTS, PARAMS, KEYS))
    assert not stub.events


def test_a_fault_costs_calls_and_changes_no_sample(stub, tmp_path):
    model, backend = policy(), backend_of([stub], tmp_path, policy=replace(PATIENT, max_calls=40))
    backend.sync(model, 1)
    # No stop tokens: a completion that is cut is shorter than the limit, whatever it is.
    params, keys = SamplingParams(4, 1.0), [(0, 0, row) for row in range(15)]
    well = backend.generate(PROMPTS * 3, params, keys)
    for fault in ("cut", "500"):
        stub.fault, stub.rate, stub.num_faults = fault, 0.5, 0
        assert_equal(backend.generate(PROMPTS * 3, params, keys), well)
        assert stub.num_faults >= 3


ASKED = Request([5, 9], SamplingParams(4, 1.0, stop_token_ids=(3,)), seed=1, model="policy", vocab_size=64)


def answer(tokens, logprobs=None, **changes):
    """Return an answer of vLLM; `changes` of its only choice."""
    logprobs = [-1.0] * len(tokens) if logprobs is None else logprobs
    choice = {"prompt_token_ids": [5, 9], "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}, **changes}
    return {"model": "policy", "choices": [choice]}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({**answer([3]), "model": "other"}, "an answer from model 'other', but 'policy' was asked"),
        ({"model": "policy", "choices": []}, "an answer that is not a completion"),
        (answer([3], prompt_token_ids=[5]), "an answer to another prompt"),
        (answer([3], token_ids=None), "it returns no token ids; it needs vLLM 0.11 or later"),
        ({"model": "policy", "choices": [{"prompt_token_ids": [5, 9], "token_ids": [3]}]}, "or without logprobs"),
        (answer([7, 8, 7]), "a completion that was cut off after 3 of 4 tokens"),
        (answer([7, 8, 7, 8, 7]), "a completion of 5 tokens that continues after its end"),
        (answer([7, 3, 7]), "a completion of 3 tokens that continues after its end"),
        (answer([7, 3], [-1.0]), "1 logprobs for 2 tokens"),
        (answer([7, 3], [-1.0, float("-inf")]), "logprobs that are not finite, or above 0"),
        (answer([7, 3], [-1.0, 0.5]), "logprobs that are not finite, or above 0"),
        (answer([64, 3]), "it serves another base model: it sampled the token 64, and the policy knows 64"),
        (answer([-1, 3]), "it serves another base model: it sampled the token -1, and the policy knows 64"),
    ],
)
def test_a_completion_that_breaks_a_check_is_an_error_and_never_a_sample(given, reason):
    with pytest.raises(CallError, match=reason):
        checked_completion(given, ASKED, "policy")


def test_a_row_that_a_server_never_finishes_ends_the_rollout_at_its_deadline(stub, tmp_path):
    backend = backend_of([stub], tmp_path)
    backend.sync(policy(), 1)
    stub.fault, backend.policy = "trickle", vllm_policy(0.5)
    with pytest.raises(RuntimeError, match="row . no completion: no answer within 0.5 s; raise vllm_request_timeout"):
        backend.generate(PROMPTS, PARAMS, KEYS)
    # One deadline for a row: it is not asked again.
    assert len(stub.bodies) - 2 * len(PROMPTS) <= 3


STAYS, AT_ONCE = r" gives row \d no completion: ", ": "


@pytest.mark.parametrize(
    ("fault", "ends", "reason"),
    [
        ("cut", STAYS, "a completion that was cut off after 3 of 4 tokens"),
        ("dead_engine", STAYS, "HTTP 500: EngineCore encountered an issue"),
        ("wait_a_day", AT_ONCE, r"it asks to wait 86400 s \(Retry-After; HTTP 429: the budget .*--resume auto"),
        ("unknown_token", AT_ONCE, "it serves another base model: it sampled the token 1000000, .*--resume auto"),
    ],
)
def test_a_fault_that_stays_or_that_no_repetition_mends_ends_the_rollout(fault, ends, reason, stub, tmp_path):
    backend = backend_of([stub], tmp_path, policy=replace(PATIENT, max_calls=2))
    backend.sync(policy(), 1)
    stub.fault = fault
    with pytest.raises(RuntimeError, match=f"vLLM server {stub.url}{ends}{reason}"):
        backend.generate(PROMPTS, SamplingParams(4, 1.0), KEYS)


def test_a_server_that_dies_ends_the_rollout_and_every_later_one_until_a_new_start(stub, tmp_path):
    backend = backend_of([stub], tmp_path)
    backend.sync(policy(), 1)
    stub.dies_after, stub.down_s = 2, None
    with pytest.raises(RuntimeError, match=f"vLLM server {stub.url} gives row . no completion: the connection failed"):
        backend.generate(PROMPTS, PARAMS, KEYS)
    stub.restart()
    with pytest.raises(RuntimeError, match=LOST.format(stub.url)):
        backend.sync(policy(), 2)
    # What a resumed run does.
    backend.close()
    backend.sync(policy(), 2)
    assert_sampled_from(policy(), backend.generate(PROMPTS, PARAMS, KEYS))


def test_the_rows_of_a_server_that_dies_go_to_the_others_and_the_next_publication_names_it(stub, tmp_path):
    model = policy()
    with StubVLLM(base_model()) as second:
        backend = backend_of([stub, second], tmp_path)
        backend.sync(model, 1)
        well = backend.generate(PROMPTS * 3, PARAMS, [(0, 0, row) for row in range(15)])
        second.dies_after = 2
        assert_equal(backend.generate(PROMPTS * 3, PARAMS, [(0, 0, row) for row in range(15)]), well)
        wait_until(lambda: second.is_alive)
        with pytest.raises(RuntimeError, match=LOST.format(second.url)):
            backend.sync(shaken(model, 2), 2)


LOST = "vLLM server {}: it no longer has the adapter onetrunk-.*, so it was started again.*--resume auto"


def test_nothing_is_sampled_from_or_published_on_a_server_that_came_back_with_another_base(stub, tmp_path):
    backend, model = backend_of([stub], tmp_path), policy()
    backend.sync(model, 1)
    stub.kill()
    stub.base = base_model(seed=1).eval()
    stub.restart()
    with pytest.raises(RuntimeError, match=LOST.format(stub.url)):
        backend.generate(PROMPTS, PARAMS, KEYS)
    with pytest.raises(RuntimeError, match=LOST.format(stub.url)):
        backend.sync(model, 7)
    assert not any(json.loads(question)["model"] != "base" for question in stub.sold)
    # A new start proves the base again.
    backend.close()
    with pytest.raises(RuntimeError, match="serves another base model"):
        backend.sync(policy(), 7)


def test_a_key_of_the_server_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "abc123def456ghi789")
    with StubVLLM(base_model(), key="abc123def456ghi789") as server:
        with pytest.raises(RuntimeError, match=rf"{server.url}: HTTP 401: Unauthorized.*vllm_api_key_env"):
            backend_of([server], tmp_path / "without").check()
        backend = backend_of([server], tmp_path / "with", api_key_env="SERVER_KEY")
        backend.sync(policy(), 0)
        assert_sampled_from(policy(), backend.generate(PROMPTS, PARAMS, KEYS))
        while MADE:
            MADE.pop().close()


# --- checks before training --------------------------------------------------------------------------------------


def test_the_check_waits_for_a_server_that_is_starting(stub, tmp_path, caplog):
    stub.kill()
    backend = backend_of([stub], tmp_path)
    threading.Timer(0.3, stub.restart).start()
    backend.check()
    assert "waiting up to 120 s for the vLLM server" in caplog.text


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        ({}, {"loads_adapters": False}, "start it with --enable-lora and .* VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({}, {"raw": True}, "logprobs before temperature .* start it with --logprobs-mode processed_logprobs"),
        ({}, {"max_rank": 2}, "LoRA rank 4 is greater than max_lora_rank 2.; start it with --max-lora-rank 4 or more"),
        ({}, {"max_length": 10**400}, "a list of models of an unknown form"),
        ({"seed": 1}, {}, r"serves another base model: its logprobs of 64 tokens differ .* /models/base"),
        ({"vocab_size": 40}, {}, "gives row . no completion: .* is out of vocabulary"),
        ({"vocab_size": 256}, {}, r"serves another base model: it sampled the token \d+, and the policy"),
    ],
)
def test_a_server_with_other_settings_or_another_base_is_rejected(base, settings, message, tmp_path):
    with StubVLLM(base_model(**base), **settings) as server:
        with pytest.raises(RuntimeError, match=rf"vLLM server {server.url}.*{message}"):
            backend_of([server], tmp_path).sync(policy(), 0)


def test_a_server_of_another_kind_is_rejected(tmp_path):
    with Stub({"/health": lambda _body: (200, {})}) as server:
        with pytest.raises(RuntimeError, match="no vLLM answers there"):
            backend_of([server.root], tmp_path).check()


def test_a_server_with_few_positions_is_checked_within_them(tmp_path):
    with StubVLLM(base_model(), max_length=9) as server:
        backend = backend_of([server], tmp_path)
        backend.check_policy(policy(), longest_row=9)
        assert {len(body["prompt"]) + body["max_tokens"] for body in server.bodies} == {9}
        with pytest.raises(RuntimeError, match="has 9 positions.* 10 tokens; start it with --max-model-len 10"):
            backend.check_policy(policy(), longest_row=10)
        MADE.pop().close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "is DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"has modules_to_save \['lm_head'\]"),
        ({"bias": "lora_only"}, "has a bias"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapts lm_head"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern"),
    ],
)
def test_an_adapter_that_no_server_can_serve_is_rejected(options, message):
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **options})
    with pytest.raises(ValueError, match=f"the adapter {message}.*; train a plain LoRA adapter, or sample in this"):
        check_servable(config)


def test_a_folder_that_the_server_cannot_read_is_named(stub, tmp_path):
    said = {"error": {"message": "No adapter found"}}
    stub.free["/v1/load_lora_adapter"] = lambda _body: (404, said)
    with pytest.raises(RuntimeError, match=f"must be able to read {tmp_path}/.*-policy-v0: put the folder where both"):
        backend_of([stub], tmp_path).sync(policy(), 0)


def test_what_a_killed_process_of_the_run_has_left_is_unloaded_and_deleted(stub, tmp_path):
    killed = backend_of([stub], tmp_path)
    killed.sync(policy(), 0)
    left = set(stub.adapters)
    resumed = backend_of([stub], tmp_path)
    resumed.sync(policy(), 0)
    assert left and not left & set(stub.adapters) and not stub.missing
    assert [path.name for path in tmp_path.iterdir()] == [name.split("-")[1] for name in stub.adapters]


def test_an_adapter_of_someone_else_is_left_alone(stub, tmp_path):
    model = policy()
    model.save_pretrained(tmp_path / "mine")
    stub.load({"lora_name": "mine", "lora_path": str(tmp_path / "mine")})
    backend = backend_of([stub], tmp_path / "run")
    backend.sync(model, 0)
    backend.close()
    assert list(stub.adapters) == ["mine"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_urls": []}, "server_urls is empty"),
        ({"server_urls": "ftp://127.0.0.1"}, "not a server's URL"),
        ({"server_urls": ["http://127.0.0.1:1", "http://127.0.0.1:1/v1"]}, "names a server twice"),
        ({"keep_versions": 1}, "keep_versions is 1; set it to 2 or more"),
    ],
)
def test_settings_that_cannot_work_are_rejected(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        VLLMBackend(**{"server_urls": "http://127.0.0.1:1", "folder": tmp_path, **options})


def test_nothing_is_sampled_before_the_first_sync(stub, tmp_path):
    with pytest.raises(RuntimeError, match="nothing is published yet"):
        backend_of([stub], tmp_path).generate(PROMPTS, PARAMS, KEYS)


def work(rank, folder, url):
    """Return the rows of the last of three versions, and the error of a publication that fails."""
    join_group(CPU, folder, rank, 2)
    model, backend, error = policy(), VLLMBackend(url, Path(folder) / "adapters", policy=PATIENT), ""
    for version in range(3):
        backend.sync(shaken(model, version), version)
        rollout = backend.generate(PROMPTS, PARAMS, [(version, rank, row) for row in range(len(PROMPTS))])
        assert_sampled_from(model, rollout)
    if rank == 0:  # Only the first process reads the adapter's config.
        model.peft_config["default"].save_pretrained = None
    try:
        backend.sync(shaken(model, 9), 9)
    except (TypeError, RuntimeError) as raised:
        error = str(raised)
    dist.barrier()
    backend.close()
    return {"version": rollout.policy_version, "rows": rollout.completion_ids, "error": error}


@pytest.mark.slow
@pytest.mark.multi_process
def test_with_two_processes_the_first_publishes_and_both_sample(tmp_path):
    with StubVLLM(base_model()) as stub:
        first, second = found_by_ranks(work, tmp_path, 2, stub.url)
        wait_until(lambda: not stub.adapters)
    assert first["version"] == second["version"] == 2 and first["rows"] != second["rows"]
    loads = [name.split("-", 2)[2] for kind, name in stub.events if kind == "load"]
    assert loads == ["1-policy-v0", "2-policy-v1", "3-policy-v2"] and not stub.missing
    # What fails on the first process fails on all of them, instead of leaving them waiting.
    assert "process 0, which does this for the others, failed" in second["error"] and first["error"]
