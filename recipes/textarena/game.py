"""GuessTheNumber of textarena as a Gymnasium text environment: 1 for the number, else how near the last guess was."""

import threading

import textarena

GAME = {"env_id": "GuessTheNumber-v0-raw", "max_number": 10, "max_turns": 3}
# textarena seeds and reads the global generator of `random`, and onetrunk resets episodes in several threads.
LOCK = threading.Lock()


class GuessTheNumber:
    def reset(self, *, seed=None, options=None):
        self.game = textarena.make(**GAME)
        with LOCK:
            self.game.reset(num_players=1, seed=(options or {}).get("seed", seed))
        return self._new_messages(), {}

    def step(self, action):
        done, _ = self.game.step(action)
        self.reward = self.game.close()[0][0] if done else 0.0
        return self._new_messages(), self.reward, done, False, {}

    def _new_messages(self):
        return "\n".join(text for sender, text, _ in self.game.get_observation()[1] if sender == textarena.GAME_ID)


def won(environments, **columns):
    return [float(environment.reward == 1) for environment in environments]
