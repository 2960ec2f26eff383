"""Reward servers stand under the same rules as judges: which addresses are called, and what a refusal repeats."""

import pytest

from onetrunk.rewards.remote import RemoteReward
from onetrunk.rewards.resolve import resolve_reward
from onetrunk.utils.calls import RetryPolicy
from tests.judges.stub_server import StubServer


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://169.254.169.254/classify", "credentials"),
        ("https://metadata.google.internal/classify", "credentials"),
        ("http://2852039166/score", "credentials"),
        ("http://[::ffff:169.254.169.254]/score", "credentials"),
        ("http://8.8.8.8/classify", "plain http"),
        ("https://anna:geheim@host/classify", "api_key_env"),
        ("https://host/classify?token=geheim", "after it"),
        ("http://0.0.0.0:8000/classify", "127.0.0.1"),
        ("https:///classify", "names no host"),
    ],
)
def test_an_address_that_no_judge_may_have_is_refused_for_a_reward_server(url, sentence):
    for make in (RemoteReward, resolve_reward):
        with pytest.raises(ValueError, match=sentence) as error:
            make(url)
        assert "the address of a reward server" in str(error.value) and "geheim" not in str(error.value)


@pytest.mark.parametrize(
    "spec", ["file:///etc/passwd", "ftp://host/classify", "gopher://host/x", "HTTP://169.254.169.254/classify"]
)
def test_another_scheme_is_no_server_and_reads_nothing(spec):
    with pytest.raises(ValueError):
        resolve_reward(spec)


def test_a_redirect_is_not_followed_to_another_host():
    def answer(body):
        return 200, {"data": []}

    policy = RetryPolicy(max_calls=2, first_delay_s=0.004, max_delay_s=0.02, call_timeout_s=5.0, patience_s=0.3)
    with StubServer(routes={"/classify": answer}) as elsewhere:
        target = f"{elsewhere.root}/classify"
        with StubServer(routes={"/classify": answer}, fault="redirect", redirect_to=f"{target}?key=geheim") as stub:
            with pytest.raises(RuntimeError, match=f"a redirect to {target}") as error:
                RemoteReward(f"{stub.root}/classify", policy=policy).check()
        assert stub.bodies and not elsewhere.bodies and "geheim" not in str(error.value)
