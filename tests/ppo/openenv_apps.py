"""OpenEnv servers for test_openenv, in one process: texts at /words, tools at /adding, numbers at /counting."""

import os

from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    words: str


class Said(Observation):
    answer: str = ""


class Words(Environment):
    """Answers with the seed and the hint of the row, then with the number of the turn; ends after two turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, hint="", **kwargs):
        self.turn = 0
        return Said(answer=f"{hint} {seed % 7}")

    def step(self, action, timeout_s=None, **kwargs):
        if action.words == "crash":
            os._exit(1)
        if action.words == "fail":
            raise ValueError("no such word")
        self.turn += 1
        return Said(answer=f"turn {self.turn}", reward=len(action.words) / 10, done=self.turn == 2)


class Adding(MCPEnvironment):
    """Pays 0.5 for each call, and ends at a sum above 10."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server, self.sum = FastMCP("adding"), 0

        @server.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            self.sum = a + b
            return self.sum

        @server.tool()
        def fail(why: str) -> str:
            """Fail."""
            raise ValueError(why)

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.sum = 0
        return Observation(metadata={"status": "ready"})

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s)
        observation.reward, observation.done = 0.5, self.sum > 10
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("this environment takes calls only")


class Count(Action):
    number: int
    times: int


class Counting(Words):
    pass


app = FastAPI()
for path, *made in (
    ("words", Words, Say, Said),
    ("adding", Adding, CallToolAction, CallToolObservation),
    ("counting", Counting, Count, Said),
):
    app.mount(f"/{path}", create_app(*made, env_name=path, max_concurrent_envs=16))
