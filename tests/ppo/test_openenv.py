"""Environments behind real OpenEnv servers on the loopback, by their addresses and by a class in TRL's manner.

Needs the extra openenv.
"""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset

from onetrunk import PPOTrainer, cli
from onetrunk.servers.openenv import open_environment
from tests.chat import calling, chat_tokenizer, taught_base, tool_call
from tests.ppo.support import logged, make_config
from tests.processes import python, served
from tests.rollouts.test_episodes import CHAT, Scripted, counts_of, episodes_of, play, turns_of
from tests.stages.small_runs import error_of, make_material, metrics
from tests.stages.test_episode_stages import STOPS, command

openenv = pytest.importorskip("openenv.core")
pytestmark = pytest.mark.slow


def serving(app, folder, log):
    """Serve an app; yield its address."""
    return served([sys.executable, "-m", "uvicorn", app, "--host", "127.0.0.1"], log / "uvicorn.log", cwd=folder)


@pytest.fixture
def address(tmp_path):
    """Start the environment that `openenv init` makes, which echoes messages and pays 0.1 for each letter."""
    python("-m", "openenv.cli", "init", "echo_env", cwd=tmp_path)
    app = tmp_path / "echo_env/server/app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=16,"))
    with serving("echo_env.server.app:app", tmp_path, tmp_path) as address:
        yield address


@pytest.fixture(scope="module")
def apps(tmp_path_factory):
    with serving("openenv_apps:app", Path(__file__).parent, tmp_path_factory.mktemp("apps")) as address:
        yield address


class Echo:
    """As TRL's OpenEnv examples wrap a client: the tool steps, and the last reward is that of the episode."""

    address = ""

    def __init__(self):
        self.client = openenv.GenericEnvClient(base_url=self.address).sync()

    def reset(self, **kwargs) -> None:
        self.reward = 0.0
        self.client.reset()

    def echo(self, message: str) -> str:
        """
        Echo a message.

        Args:
            message: What to say.

        Returns:
            The same.
        """
        result = self.client.step({"message": message})
        self.reward = result.reward
        return result.observation["echoed_message"]

    def get_reward(self) -> float:
        return self.reward


def test_a_policy_trains_against_an_openenv_server(address, tmp_path, monkeypatch):
    monkeypatch.setattr(Echo, "address", address)
    talk = calling("Say hello.", ("echo", {"message": "hello"}), "hello", "Said.")
    taught_base(tmp_path / "base", [Echo().echo], [talk])
    trainer = PPOTrainer(
        str(tmp_path / "base"),
        None,
        make_config(tmp_path / "out", num_rollouts=2, max_completion_length=100, max_turns=2, learning_rate=1e-4),
        Dataset.from_dict({"prompt": [talk[:1]] * 4}),
        environment_factory=Echo,
    )
    trainer.train()
    # "hello" has 5 letters.
    assert all(0 < score <= 0.5 for score in logged(trainer, "score/Echo")) and len(logged(trainer, "score/Echo")) == 2


# What each takes as the policy's, byte by byte.
BYTES = chat_tokenizer()


def play_texts(address, *texts, **limits):
    episodes = episodes_of(partial(open_environment, address), tokenizer=BYTES, **limits)
    rows = {"prompts": ["a cat"], "columns": {"hint": ["be brief"]}, "length": 300}
    return play(episodes, Scripted(turns_of(BYTES, *(f"{text}<|im_end|>" for text in texts))), **rows)


def observed(rollout):
    """Return the text of the prompt, and of the observations."""
    row = zip(rollout.completion_ids[0], rollout.turn_ids[0], strict=True)
    return BYTES.decode(rollout.prompt_ids[0]), BYTES.decode([token for token, turn in row if turn < 0])


def test_an_environment_of_one_text_answers_turn_by_turn(apps):
    rollout = play_texts(f"{apps}/words", "hello", "hi")
    prompt, answers = observed(rollout)
    assert prompt[:-1].endswith("be brief ") and prompt[-1] in "0123456" and answers == "turn 1"
    assert rollout.turn_rewards == [[0.5, 0.2]] and rollout.stopped == [True]
    assert observed(play_texts(f"{apps}/words", "hello", "hi")) == (prompt, answers)


def test_what_a_server_rejects_is_an_observation_and_a_lost_session_fails_the_episode(apps, tmp_path):
    rollout = play_texts(f"{apps}/words", "fail", "hello", max_turns=2)
    assert "no such word" in observed(rollout)[1] and rollout.turn_rewards == [[0.0, 0.5]]
    # In this order: the server ends at the last one.
    with serving("openenv_apps:app", Path(__file__).parent, tmp_path) as address:
        lost = play_texts(f"{address}/words", "hello", "crash")
    assert lost.episodes[0].failure.startswith(f"step: {address}/words") and counts_of(lost).failed_episodes == 1


def test_tools_of_a_server_are_called_and_each_turn_has_their_reward(apps):
    episodes = episodes_of(partial(open_environment, f"{apps}/adding"), tokenizer=BYTES)
    assert str(episodes) == "OpenEnvTools (add, fail)"
    two = tool_call("add", a=2, b=3) + tool_call("fail", why="tired")
    turns = (two, tool_call("add", a=1), tool_call("add", a=9, b=9), "never said")
    rollout = play(episodes, Scripted(turns_of(BYTES, *(f"{t}<|im_end|>" for t in turns))), [CHAT], length=4000)
    contents = [m["content"] for m in rollout.episodes[0].messages if m["role"] == "tool"]
    # The sum of 18 ends the episode, so that the last result is not seen.
    assert contents[0] == "5" and "tired" in contents[1] and "argument 'b' is missing" in contents[2]
    assert len(contents) == 3 and rollout.turn_rewards == [[1.0, 0.0, 0.5]]
    assert counts_of(rollout).tool_calls == 4 and counts_of(rollout).tool_errors == 2


def test_ppo_and_eval_take_an_address_from_yaml(apps, tmp_path, monkeypatch, capsys):
    make_material(tmp_path)
    monkeypatch.chdir(tmp_path)
    wrong = {"counting": "have the fields number, times", "nothing": "no OpenEnv server answers"}
    for path, message in wrong.items():
        assert cli.main(command("ppo", environment=f"{apps}/{path}")) == 1 and message in error_of(capsys)
    settings = {"environment": f"{apps}/words", "stop_tokens": STOPS}
    assert cli.main(command("ppo", **settings)) == 0
    assert "| rewards | the environment OpenEnvText |" in Path("out-ppo/README.md").read_text()
    assert cli.main(command("eval", **settings)) == 0
    assert metrics("out-eval")["policy"]["score/OpenEnvText"] > 0
    assert all("score/OpenEnvText" in json.loads(line) for line in open("out-eval/samples-policy.jsonl"))
