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


@pytest.fixture
def address(tmp_path):
    """Start the environment that `openenv init` makes, which echoes messages and pays 0.1 for each letter."""
    subprocess.run([sys.executable, "-m", "openenv.cli", "init", "echo_env"], cwd=tmp_path, check=True)
    app = tmp_path / "echo_env/server/app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=16,"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["uvicorn", "echo_env.server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", *words], cwd=tmp_path)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert server.poll() is None, "the server ended"
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait()


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
