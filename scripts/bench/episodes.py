"""Times episodes of the local sampler: the cache kept over turns against a prefill of every turn, and a slow tool.

    python scripts/bench/episodes.py [--rows 8] [--repeats 3] [--delay 0.5]

Every figure is a ratio of medians within one run, the two sides in turn, so that other work on the machine is in both.
The first counts CPU seconds: a model of shape `base`, prompts of 256 tokens, 4 turns of 16, observations of 16. The
second counts wall seconds: 32 rows of a tiny model, whose turns take less than the tool of row 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from concurrent.futures import Future

import torch
from transformers import LogitsProcessorList
from workload import EOS, FORBIDDEN, PAD, Workload

from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.episodes.rows import play_in_waves
from onetrunk.rollouts.local import LocalBackend

NUM_TURNS, TURN, OBSERVATION = 4, 16, 16
LONGEST = NUM_TURNS * TURN + (NUM_TURNS - 1) * OBSERVATION


class EndTurns:
    """A logits processor that ends every turn after TURN tokens, and nowhere else."""

    def __init__(self, prompt: int):
        self.prompt = prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = (input_ids != PAD).sum(1) - self.prompt
        is_last = (length % (TURN + OBSERVATION) == TURN - 1).to(scores.device)
        scores[:, PAD] = FORBIDDEN
        scores[:, EOS] = torch.where(is_last, -FORBIDDEN, FORBIDDEN)
        return scores


class Tool:
    """Gives the same observation after every turn but the last; to row 0 after `delay` seconds."""

    def __init__(self, delay: float = 0.0):
        self.delay = delay
        self.turns: dict[int, int] = {}
        self.ends: dict[int, float] = {}
        self.start = time.perf_counter()

    def begin(self, row: int, token_ids: list[int], stopped: bool) -> Future[list[int] | None]:
        """Answer a turn, and note when the last one of a row came."""
        assert len(token_ids) == TURN and stopped
        turn = self.turns[row] = self.turns.get(row, 0) + 1
        future: Future[list[int] | None] = Future()
        answer = None if turn == NUM_TURNS else list(range(4, 4 + OBSERVATION))
        if answer is None:
            self.ends[row] = time.perf_counter() - self.start
        if row == 0 and self.delay:
            threading.Timer(self.delay, future.set_result, [answer]).start()
        else:
            future.set_result(answer)
        return future


def sampling(work: Workload) -> tuple[LocalBackend, tuple]:
    """Return a backend, and the arguments of its calls but for the answers."""
    backend = LocalBackend(work.policy().eval(), logits_processor=LogitsProcessorList([EndTurns(work.prompt)]))
    keys = [(0, 0, row) for row in range(work.rollout)]
    return backend, (work.prompts()[: work.rollout], SamplingParams(LONGEST, stop_token_ids=(EOS,)), keys)


def kept_against_anew(rows: int, repeats: int) -> dict[str, float]:
    """Return the CPU seconds of both ways, and their ratio."""
    backend, call = sampling(Workload(shape="base", prompt=256, rollout=rows))
    seconds: dict[str, list[float]] = {"kept_s": [], "anew_s": []}
    for _ in range(repeats):
        start = time.process_time()
        kept = backend.generate_turns(*call, Tool())
        middle = time.process_time()
        anew = play_in_waves(backend.generate, *call, Tool())
        seconds["kept_s"].append(middle - start)
        seconds["anew_s"].append(time.process_time() - middle)
        assert kept.completion_ids == anew.completion_ids
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {**medians, "kept_over_anew": medians["kept_s"] / medians["anew_s"]}


def delay_of_others(repeats: int, delay: float) -> dict[str, float]:
    """Return the mean times at which the rows without a slow tool are over, with and without it, and their ratio."""
    backend, call = sampling(Workload(shape="tiny", prompt=64, rollout=32))
    seconds: dict[float, list[float]] = {0.0: [], delay: []}
    for _ in range(repeats):
        for seconds_of_tool, times in seconds.items():
            tool = Tool(seconds_of_tool)
            backend.generate_turns(*call, tool)
            times.append(statistics.mean(end for row, end in tool.ends.items() if row))
    without, with_tool = map(statistics.median, seconds.values())
    return {"without_s": without, "with_s": with_tool, "with_over_without": with_tool / without}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="rows of the first comparison")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.5, help="seconds of the slow tool")
    options = parser.parse_args()
    print(json.dumps({"cache": kept_against_anew(options.rows, options.repeats)}), flush=True)
    print(json.dumps({"slow_tool": delay_of_others(4 * options.repeats + 1, options.delay)}))


if __name__ == "__main__":
    main()
