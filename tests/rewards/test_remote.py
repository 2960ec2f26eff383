"""A reward model behind HTTP: the three kinds of server, faults, bad addresses, and PPO's own sum of rewards."""

import pytest

from onetrunk.rewards import ModelReward, PerToken, PerTurn, RemoteReward, resolve_reward
from onetrunk.rewards.remote import remote_reward
from onetrunk.servers.fleet import RetryPolicy, run_async
from tests.models.reward_adapters import a_scorer
from tests.ppo.support import logged, make_trainer, trained
from tests.servers.stub import Stub, draw
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

PATIENT = RetryPolicy(
    max_calls=20, first_delay_s=0.004, max_delay_s=0.02, call_timeout_s=10.0, patience_s=30.0, max_timeouts=20
)


def classify(body):
    texts = body.get("input") or [str(body["messages"])]
    assert body["use_activation"] is False
    rows = [{"index": i, "label": "x", "probs": [draw(text) - 0.5], "num_classes": 1} for i, text in enumerate(texts)]
    # In any order: the index counts.
    return 200, {"object": "list", "model": "judge-1", "data": rows[::-1]}


def anything(body):
    rows = zip(body["prompts"], body["completions"], strict=True)
    return 200, {"scores": [None if "skip" in str(p) else draw(p, c) for p, c in rows]}


ROUTES = {"/classify": classify, "/rate": anything}
EXPECTED = {"/classify": lambda prompt, completion: draw(prompt + completion) - 0.5, "/rate": draw}


def rows(count):
    return [f"prompt {i} " for i in range(count)], [f"completion {i}" for i in range(count)]


def call(reward, prompts, completions, **columns):
    return run_async(reward(prompts=prompts, completions=completions, completion_ids=[], **columns))


@pytest.mark.parametrize("path", ROUTES)
def test_every_row_gets_its_own_score_whatever_the_batches(path):
    prompts, completions = rows(37)
    expected = list(map(EXPECTED[path], prompts, completions))
    with Stub(ROUTES, latency_s=0.005) as stub:
        reward = RemoteReward(stub.root + path, batch_size=5, max_concurrency=3, policy=PATIENT)
        reward.check()
        stub.bodies.clear()
        stub.most_open = 0
        assert call(reward, prompts, completions, other=["x"] * 37) == pytest.approx(expected)
        assert call(reward, [], []) == []
    assert len(stub.bodies) == 8 and stub.most_open == 3


def test_conversations_go_as_messages_to_the_template_of_the_server():
    prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(3)]
    completions = [[{"role": "assistant", "content": f"reply {i}"}] for i in range(3)]
    with Stub(ROUTES) as stub:
        call(RemoteReward(f"{stub.root}/classify", policy=PATIENT), prompts, completions)
        expected = [p + c for p, c in zip(prompts, completions, strict=True)]
        assert sorted((body["messages"] for body in stub.bodies), key=str) == expected
        stub.bodies.clear()
        call(RemoteReward(f"{stub.root}/rate", policy=PATIENT), prompts, completions)
        assert stub.bodies[0]["prompts"] == prompts and stub.bodies[0]["completions"] == completions


@pytest.mark.parametrize("conversational", [False, True])
def test_with_its_tokenizer_a_remote_model_reads_what_it_reads_here(tmp_path, conversational):
    a_scorer(max_position_embeddings=16, pad_token_id=0, reads_end_token=True).save_pretrained(tmp_path)
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(tmp_path)
    local = ModelReward(tmp_path)

    def serve(body):
        from onetrunk.models.reward_model import score_token_ids

        return 200, {"data": [{"probs": [s]} for s in score_token_ids(local.model, body["input"], 4).tolist()]}

    prompts = ["the cat sees ", "the dog " * 20]
    completions = ["a bird .", "sleeps under a tree ."]
    if conversational:
        prompts = [[{"role": "user", "content": p}] for p in prompts]
        completions = [[{"role": "assistant", "content": c}] for c in completions]
    with Stub({"/classify": serve}) as stub:
        remote = RemoteReward(f"{stub.root}/classify", tokenizer=str(tmp_path), policy=PATIENT)
        assert call(remote, prompts, completions) == pytest.approx(local(prompts, completions), abs=1e-6)


def test_a_remote_model_reads_the_template_variables_of_a_row_or_says_that_it_does_not(tmp_path):
    a_scorer(pad_token_id=0, reads_end_token=True).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer(chat_template="{{ mood }} " + CHAT_TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    columns = {"prompts": [[{"role": "user", "content": "the cat"}]] * 2}
    columns["completions"] = [[{"role": "assistant", "content": "a bird ."}]] * 2
    columns["chat_template_kwargs"] = [{"mood": "warm"}, {"mood": "cold"}]
    with Stub(ROUTES) as stub:
        remote = RemoteReward(f"{stub.root}/classify", tokenizer=str(tmp_path), policy=PATIENT)
        call(remote, **columns)
        first = [tokenizer.decode(ids).split()[0] for body in stub.bodies for ids in body["input"]]
        assert first == ["warm", "cold"]
        with pytest.raises(ValueError, match="set #tokenizer="):
            call(RemoteReward(f"{stub.root}/classify", policy=PATIENT), **columns)


def test_a_row_that_is_refused_does_not_take_its_batch_with_it():
    def picky(body):
        if any("completion 3" == c for c in body["completions"]):
            return 400, {"error": "too long"}
        return anything(body)

    with Stub({"/rate": picky}) as stub:
        found = call(RemoteReward(f"{stub.root}/rate", batch_size=4, policy=PATIENT), *rows(8))
        assert [i for i, s in enumerate(found) if s is None] == [3]
        with pytest.raises(RuntimeError, match="rejects every row: HTTP 400: too long"):
            call(RemoteReward(f"{stub.root}/rate", policy=PATIENT), ["a", "b"], ["completion 3", "completion 3"])


def test_ppo_trains_on_it_and_leaves_out_what_it_did_not_score(tmp_path):
    asked = []

    def half(body):
        asked.extend(body["prompts"])
        return 200, {"scores": [None if i % 4 == 0 else float(len(c)) for i, c in enumerate(body["completions"])]}

    with Stub({"/rate": half}) as stub:
        trainer = trained(tmp_path, reward=f"{stub.root}/rate#name=remote", max_unscored_fraction=0.5)
        with pytest.raises(RuntimeError, match="reward server"):
            make_trainer(tmp_path / "other", reward=f"{stub.root}/nowhere")
    # Two rows of the check, and four of the rollout, of which the first has no score.
    assert len(asked) == 2 + 4
    assert logged(trainer, "reward/unscored_fraction") == [0.25] and len(logged(trainer, "score/remote")) == 1


def test_a_service_may_give_rewards_per_turn_and_per_token(tmp_path):
    bodies = []

    def dense(body):
        bodies.append(body)
        rows = zip(body["completion_ids"], body["turn_ids"], strict=True)
        forms = [({"per_token": [0.5] * len(ids)}, {"per_turn": [0.5] * len({*turns})}) for ids, turns in rows]
        return 200, {"scores": [form[i % 2] for i, form in enumerate(forms)]}

    def short(body):
        return 200, {"scores": [{"per_turn": [1, 2, 3]}] * len(body["prompts"])}

    def odd(body):
        return 200, {"scores": [body.get("model") and {"per_step": [1]}, {"per_turn": ["x"]}]}

    with Stub({"/rate": dense, "/short": short, "/odd": odd}) as stub:
        reward = resolve_reward(f"{stub.root}/rate#token_ids=1&batch_size=2")
        assert len(bodies) == 1  # The trial.
        given = {"completion_ids": [[5, 6, 7], [5, 6], [5]], "turn_ids": [[0, 0, 1], [0, 0], [0]]}
        found = run_async(reward(prompts=["a", "b", "c"], completions=["x", "y", "z"], **given))
        # Batches of two.
        assert found == [PerToken([0.5] * 3), PerTurn([0.5]), PerToken([0.5])]
        stub.bodies.clear()
        with pytest.raises(ValueError, match="'short' returned PerTurn with 3 numbers for row 0, which has 1"):
            trained(tmp_path, reward=f"{stub.root}/short")
        assert not any("turn_ids" in body for body in stub.bodies)
        for model, entry in ((None, "per_turn"), ("m", "per_step")):
            with pytest.raises(RuntimeError, match=f"a score that is not a number .*{entry}.*expected"):
                RemoteReward(f"{stub.root}/odd", model=model, policy=PATIENT).check()
        with pytest.raises(ValueError, match="token_ids is for JSON services alone"):
            RemoteReward(f"{stub.root}/classify", token_ids=True)


def test_a_recipe_names_it_by_its_address_with_options_behind_a_hash(monkeypatch):
    monkeypatch.setenv("SCORES_KEY", "tok-123")
    with Stub(ROUTES, key="tok-123") as stub:
        options = "model=judge-1&api_key_env=SCORES_KEY&batch_size=3&timeout_s=2.5&max_concurrency=2"
        reward = resolve_reward(f"{stub.root}/classify#{options}")
        assert isinstance(reward, RemoteReward) and reward.__name__ == "judge-1"
        assert (reward.batch_size, reward.policy.call_timeout_s, reward.max_concurrency) == (3, 2.5, 2)
        assert all(body["model"] == "judge-1" for body in stub.bodies) and len(stub.bodies) == 1
        assert "tok-123" not in repr(vars(reward))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("http://me:hunter2@127.0.0.1/classify", "api_key_env"),
        ("http://127.0.0.1:9/classify#colour=2", "there are model, tokenizer"),
        ("http://127.0.0.1:9/classify#batch_size=many", "'many' is not a value for batch_size"),
        ("http://127.0.0.1:9/classify#batch_size=0", "batch_size is 0"),
        ("http://127.0.0.1:9/classify#api_key_env=NO_SUCH_KEY_HERE", "is not set"),
        ("http://127.0.0.1:9/rate#tokenizer=gpt2", "tokenizer is for /classify"),
        ("http://127.0.0.1:9/classify?key=1", "is not a server's URL"),
    ],
)
def test_an_address_or_option_that_cannot_work_is_refused(spec, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        remote_reward(spec)
    assert "hunter2" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda body: (200, {"data": [{"probs": [1.0]}] * 2}), "a softmax over its one label"),
        (lambda body: (200, {"data": [{"probs": [0.4, 0.6]}] * 2}), "probabilities of 2 labels: that is a classifier"),
        (lambda body: (200, {"data": [{"probs": [0.5]}]}), "1 scores for 2 completions"),
        (lambda body: (200, {"data": [{"probs": ["x"]}] * 2}), "a score that is not a number"),
        (lambda body: (200, {"data": [{"index": 0, "probs": [1]}] * 2}), "not of the form"),
        (lambda body: (200, {"scores": [1, 2]}), "not of the form"),
        (lambda body: (200, []), "not of the form"),
        (lambda body: (200, "<!doctype html><html></html>"), "an HTML page"),
        (lambda body: (404, {"detail": "Not Found"}), "HTTP 404: Not Found; check the URL's path"),
        (lambda body: (200, {**classify(body)[1], "model": "other"}), "scores from model 'other'"),
    ],
)
def test_a_server_that_is_no_reward_model_is_found_at_the_start(answer, sentence):
    policy = RetryPolicy(first_delay_s=0.004, max_delay_s=0.01)
    with Stub({"/classify": answer}) as stub:
        with pytest.raises(RuntimeError, match=sentence) as error:
            RemoteReward(f"{stub.root}/classify", model="judge-1", policy=policy).check()
    assert str(error.value).startswith(f"reward server {stub.root}/classify") and "\n" not in str(error.value)
