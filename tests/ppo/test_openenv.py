"""An environment behind a real OpenEnv server on the loopback, by a class in TRL's manner; needs the extra openenv."""

import socket
import subprocess
import sys
import time

import pytest
from datasets import Dataset

from onetrunk import PPOTrainer
from tests.chat import calling, taught_base
from tests.ppo.support import logged, make_config

openenv = pytest.importorskip("openenv.core")
SERVER = """
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed_message: str = ""


class EchoEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id, step_count=0)
        return EchoObservation(done=False, reward=0.0)

    def step(self, action, **kwargs):
        self._state.step_count += 1
        return EchoObservation(echoed_message=action.message, done=False, reward=0.1 * len(action.message))

    @property
    def state(self):
        return self._state


app = create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def server(tmp_path):
    """Start an echo server as OpenEnv's own template has it; return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER)
    process = subprocess.Popen([sys.executable, "server.py", str(port)], cwd=tmp_path)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None, "the server ended"
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


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


@pytest.mark.slow
def test_a_policy_trains_against_an_openenv_server(server, tmp_path, monkeypatch):
    monkeypatch.setattr(Echo, "address", server)
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
    # "hello" has 5 letters, each worth 0.1.
    assert all(0 < score <= 0.5 for score in logged(trainer, "score/Echo")) and len(logged(trainer, "score/Echo")) == 2
