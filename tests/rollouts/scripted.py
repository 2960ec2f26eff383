"""Answers to the turns of episodes by a script; no environment and no thread of its own."""

import random
import threading
from concurrent.futures import Future


def observation(row, turn, turns=4):
    """The ids that follow a turn: of other lengths, and other numbers of turns, from row to row."""
    draw = random.Random(100 * row + turn)
    return None if turn >= draw.randint(0, turns) else draw.choices(range(14, 60), k=draw.randint(0, 9))


class Scripted:
    """Answers with `observation`: at once, or from another thread after a while, the later rows first."""

    def __init__(self, observation=observation, delay=None):
        self.observation, self.delay, self.turns = observation, delay, {}

    def begin(self, row, token_ids, stopped):
        turns = self.turns.setdefault(row, [])
        ids, future = self.observation(row, len(turns)), Future()
        turns.append((token_ids, stopped))
        if self.delay is None:
            future.set_result(ids)
        else:
            threading.Timer(self.delay(row, len(turns)), future.set_result, [ids]).start()
        return future

    def poll(self):
        pass
